"""Two processes on one machine are one run: the same numbers as a process alone."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import config_dict

from mimo.experiments import hosts
from mimo.weights.checkpoints import load_policy
from mimo.weights.publication import ViewFollower
from mimo.weights.store import FileStore
from mimo.weights.views import read_view

_ROOT = pathlib.Path(__file__).parents[2]
_SETTINGS = {
  'updates': 2,
  'rollouts.schedule': 'lockstep',
  'rollouts.prompts_per_update': 4,
  'rollouts.group_size': 4,
  'trainer.rows': 2,
  'trainer.row_tokens': 256,
  'trainer.row_trained_tokens': 128,
  'evaluation.samples': 1,
  'evaluation.every_updates': 0,
  'checkpoints.every_updates': 1,
  'pools.b200_bf16.sessions': 4,
}


def _start(workdir: pathlib.Path, devices: int, **changed: str) -> subprocess.Popen:
  flags = [f'--config.{key}={value}' for key, value in _SETTINGS.items()]
  mesh = 'fsdp=2,context=2' if devices > 1 else ''
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    **changed,
  }
  return subprocess.Popen(
    [
      *(sys.executable, '-m', 'mimo.experiments.train', '--config=configs/homogeneous.py'),
      *(f'--workdir={workdir}', f'--config.trainer.mesh={mesh}', *flags),
    ],
    cwd=_ROOT,
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _finish(process: subprocess.Popen) -> str:
  try:
    output, _ = process.communicate(timeout=300)
  finally:
    process.kill()
  assert process.returncode == 0, output
  return output


def _pair(workdir: pathlib.Path) -> list[str]:
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  where = {hosts.COORDINATOR: f'127.0.0.1:{port}', hosts.PROCESSES: '2'}
  started = [_start(workdir, 2, **where, **{hosts.PROCESS: str(i)}) for i in range(2)]
  return [_finish(process) for process in started]


def _records(workdir: pathlib.Path) -> list[dict]:
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [r for r in map(json.loads, lines) if 'train/loss' in r]


def test_two_processes_are_one_run(tmp_path):
  alone = _start(tmp_path / 'alone', 1)
  outputs = _pair(tmp_path / 'pair')
  _finish(alone)
  # Only the first process speaks, and there is something to learn.
  assert 'report:' in outputs[0] and 'report:' not in outputs[1]
  pairs = list(zip(_records(tmp_path / 'pair'), _records(tmp_path / 'alone'), strict=True))
  assert [got['step'] for got, _ in pairs] == [1, 2]
  assert pairs[0][0]['train/grad_norm'] > 0
  for name in ('train/loss', 'train/grad_norm', 'train/param_norm', 'train/kl'):
    np.testing.assert_allclose(pairs[0][0][name], pairs[0][1][name], rtol=1e-4, err_msg=name)
  # What was published and what was saved are the same weights, whole.
  _, params, _ = load_policy(tmp_path / 'pair')
  follower = ViewFollower(FileStore(tmp_path / 'pair' / 'store'), 'bf16')
  version = follower.latest()
  assert version is not None and version.update == 2
  view = read_view(follower.open(version))
  _, expected, _ = load_policy(tmp_path / 'alone')
  for path in (('embed', 'embedding'), ('layers', 'mlp', 'down_proj', 'kernel')):
    saved, served, want = params, view.params, expected
    for key in path:
      saved, served, want = saved[key], served[key], want[key]
    np.testing.assert_allclose(served, saved, rtol=2**-8)
    assert np.linalg.norm(saved - want) <= 1e-3 * np.linalg.norm(want)


def test_the_environment_goes_before_the_configuration(monkeypatch):
  config = config_dict.ConfigDict({'seed': 0})
  assert hosts.make_cluster(config) == hosts.Cluster('', 1, 0)
  config.distributed = {'coordinator': 'a:1', 'processes': 4, 'process': 1}
  assert hosts.make_cluster(config) == hosts.Cluster('a:1', 4, 1)
  monkeypatch.setenv(hosts.PROCESS, '3')
  assert hosts.make_cluster(config) == hosts.Cluster('a:1', 4, 3)
  monkeypatch.setenv(hosts.PROCESS, '4')
  with pytest.raises(ValueError, match='process is 4 of 4; expected one of 0 to 3'):
    hosts.make_cluster(config)
  monkeypatch.setenv(hosts.PROCESS, 'x')
  with pytest.raises(ValueError, match="MIMO_PROCESS is 'x'; expected a whole number"):
    hosts.make_cluster(config)
  with pytest.raises(ValueError, match="coordinator is 'a'; expected host:port"):
    hosts.Cluster('a', 2, 0)
