"""A whole run from three real vLLM servers, one of which is killed on the way."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mimo.telemetry import writers

pytestmark = pytest.mark.vllm

_ROOT = pathlib.Path(__file__).parents[2]
_POOLS = ('cpu_bf16', 'cpu_fp8', 'cpu_nvfp4')
_UPDATES = 3
_SECS = 400.0  # for the servers and the first update, and again for the rest


def _servers(workdir: pathlib.Path) -> dict[int, str]:
  """Returns process id -> command line of the servers that a run in `workdir` started."""
  found = {}
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit():
      with contextlib.suppress(OSError):
        command = (entry / 'cmdline').read_text().replace('\0', ' ')
        if f'{workdir}/servers/' in command:
          found[int(entry.name)] = command
  return found


def _children(pid: int) -> list[int]:
  with contextlib.suppress(OSError):
    return [int(child) for child in open(f'/proc/{pid}/task/{pid}/children').read().split()]
  return []


def _updates(workdir: pathlib.Path) -> list[dict]:
  path = workdir / 'metrics.jsonl'
  return [r for r in writers.read(path) if 'train/kl' in r] if path.exists() else []


def _kill_a_server(run: subprocess.Popen, workdir: pathlib.Path) -> set[int]:
  """Kills the fp8 server while the run stands still, so that the run cannot end before that.

  Returns the servers' process ids.
  """
  run.send_signal(signal.SIGSTOP)
  try:
    assert len(_updates(workdir)) < _UPDATES, 'the run was over before a server could be killed'
    servers = _servers(workdir)
    (guard,) = [pid for pid, command in servers.items() if '-I' in command and 'cpu_fp8' in command]
    started = {*servers, *(child for pid in servers for child in _children(pid))}
    (server,) = _children(guard)
    os.kill(server, signal.SIGKILL)
    return started
  finally:
    run.send_signal(signal.SIGCONT)


def test_training_goes_on_from_three_servers_while_one_is_killed(tmp_path) -> None:
  workdir, said = tmp_path / 'run', tmp_path / 'said'
  environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}
  with open(said, 'wb') as file:
    run = subprocess.Popen(
      [
        *(sys.executable, '-m', 'mimo.experiments.train', f'--workdir={workdir}'),
        *(f'--config={_ROOT / "configs" / "mixed_vllm.py"}', f'--config.updates={_UPDATES}'),
        *('--config.rollouts.prompts_per_update=3', '--config.trainer.rows=4'),
      ],
      stdout=file,
      stderr=file,
      cwd=_ROOT,
      env=environment,
    )
  try:
    deadline = time.monotonic() + _SECS
    while not _updates(workdir):
      assert run.poll() is None, said.read_text()
      assert time.monotonic() < deadline, f'no update within {_SECS} s: {said.read_text()}'
      time.sleep(0.1)
    started = _kill_a_server(run, workdir)
    try:
      status = run.wait(_SECS)
    except subprocess.TimeoutExpired:
      pytest.fail(f'the run did not end within {_SECS} s: {said.read_text()}')
  finally:
    run.kill()
    run.wait()
  assert status == 0, said.read_text()
  records = _updates(workdir)
  assert len(records) == _UPDATES
  # What the servers drew from is the trainer's policy, as nearly as each format allows.
  bounds = {'cpu_bf16': 0.02, 'cpu_fp8': 0.05, 'cpu_nvfp4': 0.5}
  for pool in _POOLS:
    kls = [record[f'source/{pool}/kl'] for record in records if f'source/{pool}/kl' in record]
    assert kls and max(kls) < bounds[pool], (pool, kls)
  assert all(records[-1][f'replica/{pool}/activations'] >= 1 for pool in _POOLS)
  # The server that was killed, and the one in its place that ended with the run.
  log = (workdir / 'servers' / 'cpu_fp8' / 'server.log').read_text()
  assert log.count('\n-- ') == 2, log
  deadline = time.monotonic() + 30
  while left := [pid for pid in started if pathlib.Path(f'/proc/{pid}').exists()]:
    assert time.monotonic() < deadline, left
    time.sleep(0.1)
