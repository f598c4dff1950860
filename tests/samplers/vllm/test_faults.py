"""What goes wrong with a real server, and what it costs: time, and nothing else."""

import asyncio
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from mimo.samplers.vllm import client as http
from mimo.samplers.vllm.client import VllmClient
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import TurnSample

pytestmark = pytest.mark.vllm

_ROOT = pathlib.Path(__file__).parents[3]
_CHILD = pathlib.Path(__file__).with_name('replica_child.py')
_LONG = 1000  # tokens of a turn that something happens in
_TRIES = 20


def _processes(pid: int) -> dict[int, tuple[str, str]]:
  """Returns process id -> (when it began, command line) of a process and all that came of it."""
  parents, found = {}, {}
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit():
      try:
        state, parent, *rest = (entry / 'stat').read_text().rpartition(')')[2].split()
        command = (entry / 'cmdline').read_text().replace('\0', ' ')
      except OSError:
        continue
      if state != 'Z':
        parents[int(entry.name)] = int(parent)
        found[int(entry.name)] = rest[17], command
  tree, new = set(), {pid} & found.keys()
  while new:
    tree |= new
    new = {child for child, parent in parents.items() if parent in new} - tree
  return {child: found[child] for child in tree}


def _expect_gone(processes: dict[int, tuple[str, str]], secs: float = 30.0) -> None:
  deadline = time.monotonic() + secs
  left = processes
  while left:
    # By their beginning too: an id may be another's by now.
    left = {pid: one for pid, one in left.items() if _processes(pid).get(pid, ('',))[0] == one[0]}
    assert not left or time.monotonic() < deadline, left
    time.sleep(0.05)


def _pid(rig, part: str) -> int:
  """Returns the id of the server's process whose command line has `part` in it."""
  guard = rig.processes[-1].pid
  processes = _processes(guard)
  (pid,) = [pid for pid, (_, command) in processes.items() if part in command and pid != guard]
  return pid


async def _drawn(rig) -> int:
  """Returns how many tokens a server whose engine stands still has drawn, once all are counted."""
  before, tokens = -1, (await rig.status()).tokens
  while tokens != before:
    await asyncio.sleep(0.2)
    before, tokens = tokens, (await rig.status()).tokens
  return tokens


async def _freeze_in_mid_turn(rig, tokens: int) -> tuple[asyncio.Future[TurnSample], int]:
  """Begins a long turn and stops the engine within it. Returns the turn, and the engine's id.

  Where this process is slow, a turn may end before its engine is stopped: then another is begun.
  So what is returned is a turn that has begun and cannot end.
  """
  engine = _pid(rig, 'EngineCore')
  for _ in range(_TRIES):
    before = (await rig.status()).tokens
    turn = asyncio.ensure_future(rig.turn('long', max_turn_tokens=tokens))
    while (await rig.status()).tokens == before and not turn.done():
      await asyncio.sleep(0.01)
    os.kill(engine, signal.SIGSTOP)
    if before < await _drawn(rig) < before + tokens:
      assert not turn.done()
      return turn, engine
    os.kill(engine, signal.SIGCONT)
    await turn
  pytest.fail(f'{_TRIES} turns of {tokens} tokens ended before their engine could be stopped')


def _same(one: TurnSample, two: TurnSample) -> bool:
  return np.array_equal(one.tokens, two.tokens) and np.array_equal(one.logps, two.logps)


def test_the_stock_route_draws_the_same_turn(rig) -> None:
  """The slow fallback, on the same server: ids, log-probs, candidates and versions."""

  async def both():
    client, number = await rig.replica.serving(60.0)
    request = GenerateRequest('packed', rig.prompt, rig.params, 99, number, 5.0)
    stock = VllmClient(
      rig.processes[-1].url, limits=rig.client_limits, max_connections=1, packed=False
    )
    try:
      return await client.generate(request), await stock.generate(
        dataclasses.replace(request, request='stock')
      )
    finally:
      await stock.close()

  packed, stock = rig.run(both())
  assert _same(packed, stock)
  assert packed.spans == stock.spans
  assert np.array_equal(packed.full_support, stock.full_support)
  assert np.array_equal(packed.candidates.offsets, stock.candidates.offsets)
  for row in range(len(packed.tokens)):  # equally likely ones may come in another order
    ours, theirs = (
      dict(zip(*c.row(row), strict=True)) for c in (packed.candidates, stock.candidates)
    )
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[token] - theirs[token]) for token in ours) < 1e-6


def _breaks(rig, act) -> str:
  """Does something to a server in mid-turn. Returns what the replica says was the matter with it.

  `act` gets the ids of the server and of its engine, which stands still. Whatever it does, the
  session gets its turn, whole and from the newest version, the server is replaced, nothing of it is
  left, and the new one draws what the old one did.
  """
  rig.feed.newest = rig.publish(1.0)
  before = rig.run(rig.turn('before'))
  downs, failures = rig.replica.report().failures.get('down', 0), rig.sampler.failures
  old = _processes(rig.processes[-1].pid)
  server = _pid(rig, 'api_server')

  async def scenario():
    turn, engine = await _freeze_in_mid_turn(rig, _LONG)
    act(server, engine)
    return await turn

  sample = rig.run(scenario())
  report = rig.replica.report()
  assert len(sample.tokens) == _LONG
  assert {span.version for span in sample.spans} == {rig.feed.newest.number}
  assert report.failures.get('down', 0) == downs + 1
  failed = {kind for kind, count in rig.sampler.failures.items() if count > failures.get(kind, 0)}
  assert failed and failed <= {http.CONNECTION, http.TRUNCATED}
  assert len(old) >= 3
  _expect_gone(old)
  assert _same(before, rig.run(rig.turn('after')))
  assert report.last_failure is not None
  return report.last_failure


def test_a_killed_server_costs_a_session_nothing_but_time(rig) -> None:
  """Its engine cannot end by itself then: it stands still."""
  said = _breaks(rig, lambda server, engine: os.kill(server, signal.SIGKILL))
  assert 'the server exited with status' in said


def test_a_server_that_hangs_is_replaced(rig) -> None:
  """Its engine stands still; what answers HTTP goes on and keeps connections alive."""
  assert 'the engine has taken no step' in _breaks(rig, lambda server, engine: None)


def test_a_server_that_answers_nothing_is_replaced(rig, monkeypatch) -> None:
  """Its engine goes on; what answers HTTP stands still, and its connections stay open."""
  monkeypatch.setattr(http, '_STATUS_SECS', 3.0)

  def act(server: int, engine: int) -> None:
    os.kill(server, signal.SIGSTOP)
    os.kill(engine, signal.SIGCONT)

  assert 'its state has been unknown' in _breaks(rig, act)


def test_a_slow_server_is_waited_for(rig) -> None:
  """Its engine stands still again and again, each time for less long than a hung one is given."""
  starts, activations = rig.replica.report().starts, rig.replica.report().activations
  failures = rig.sampler.failures
  pauses, pause_secs = 4, 0.35 * rig.limits.stall_secs

  async def scenario():
    turn, engine = await _freeze_in_mid_turn(rig, 2 * _LONG)
    for _ in range(pauses):
      await asyncio.sleep(pause_secs)
      assert rig.replica.report().starts == starts, rig.replica.report().last_failure
      steps = (await rig.status()).steps
      while (await rig.status()).steps == steps:
        os.kill(engine, signal.SIGCONT)
        time.sleep(0.02)  # this loop must not come between
        os.kill(engine, signal.SIGSTOP)
        await asyncio.sleep(0.1)
      assert not turn.done(), 'the turn was too short for this machine'
    os.kill(engine, signal.SIGCONT)
    return await turn

  assert pauses * pause_secs > rig.limits.stall_secs
  assert len(rig.run(scenario()).tokens) == 2 * _LONG
  report = rig.replica.report()
  assert (report.starts, report.activations) == (starts, activations)
  assert rig.sampler.failures == failures


def _shared_memory(pids) -> set[pathlib.Path]:
  found = set()
  for pid in pids:
    for line in pathlib.Path(f'/proc/{pid}/maps').read_text().splitlines():
      if '/dev/shm/' in line and not line.endswith('(deleted)'):
        found.add(pathlib.Path(line[line.index('/dev/shm/') :]))
  return found


def test_a_server_does_not_outlive_a_run_that_is_killed(rig, tmp_path) -> None:
  """A run of its own, killed while its server serves: with a turn in flight, most probably."""
  view = shutil.copytree(rig.directory(rig.feed.newest), tmp_path / 'view')
  settings = rig.settings(view)
  stated = {'settings': dataclasses.asdict(settings), 'root': str(tmp_path)}
  (tmp_path / 'job.json').write_text(json.dumps(stated))
  said = tmp_path / 'said'
  with open(said, 'wb') as file:
    run = subprocess.Popen(
      [sys.executable, str(_CHILD), str(tmp_path / 'job.json')],
      stdout=file,
      stderr=file,
      cwd=_ROOT,
    )
  try:
    deadline = time.monotonic() + 300
    while 'turn 3' not in said.read_text():
      assert run.poll() is None and time.monotonic() < deadline, said.read_text()
      time.sleep(0.1)
    processes = _processes(run.pid)
    del processes[run.pid]
    assert any('EngineCore' in command for _, command in processes.values()), processes
    assert len(processes) >= 3
    shared = _shared_memory(processes)
  finally:
    run.kill()
    run.wait()
  _expect_gone(processes)
  assert not [path for path in shared if path.exists()]
