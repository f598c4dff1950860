"""Two processes on one machine are one trainer: the same numbers as a process alone."""

import importlib.util
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from mimo.experiments import hosts
from mimo.weights.checkpoints import Checkpoints

_ROOT = pathlib.Path(__file__).parents[2]
_CHILD = pathlib.Path(__file__).with_name('hosts_child.py')


def _start(out: pathlib.Path, port: int, process: int) -> subprocess.Popen:
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
    'PYTHONPATH': str(_ROOT),
    hosts.COORDINATOR: f'127.0.0.1:{port}',
    hosts.PROCESSES: '2',
    hosts.PROCESS: str(process),
  }
  return subprocess.Popen(
    [sys.executable, str(_CHILD), str(out)],
    env=environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def _finish(process: subprocess.Popen) -> None:
  try:
    output, _ = process.communicate(timeout=600)
  finally:
    process.kill()
  assert process.returncode == 0, output


def test_two_processes_are_one_trainer(tmp_path):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  started = [_start(tmp_path, port, process) for process in range(2)]
  spec = importlib.util.spec_from_file_location('hosts_child', _CHILD)
  assert spec is not None and spec.loader is not None
  child = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(child)
  trainer, learner, batch = child.make_learner()
  losses = []
  for _ in range(2):
    learner.state, metrics = trainer.update(learner.state, batch)
    losses.append(float(metrics['loss']))
  expected = {name: x.astype(np.float32) for name, x in learner.snapshot()}
  for process in started:
    _finish(process)
  got = dict(np.load(tmp_path / 'first.npz'))
  np.testing.assert_allclose(got.pop('losses'), losses, rtol=1e-4)
  assert got.keys() == expected.keys()
  for name, x in expected.items():  # a last bit of bf16 may differ
    np.testing.assert_allclose(got[name], x, rtol=2**-7, atol=1e-6, err_msg=name)
  # Both processes wrote their parts of one checkpoint; a process alone reads it.
  state, meta = Checkpoints(tmp_path / 'checkpoints', 1).restore(2, trainer.abstract_state())
  assert meta == {'said': 'by the first'}
  for x, y in zip(*map(jax.tree.leaves, (state.params, learner.state.params)), strict=True):
    assert np.linalg.norm(x - y) <= 1e-4 * np.linalg.norm(y)


def test_the_environment_goes_before_the_configuration(monkeypatch):
  alone = hosts.Cluster()
  assert hosts.from_environment(alone) == alone and alone.processes == 1
  stated = hosts.Cluster(coordinator='a:1', processes=4, process=1)
  assert hosts.from_environment(stated) == stated
  monkeypatch.setenv(hosts.PROCESS, '3')
  assert hosts.from_environment(stated).process == 3
  monkeypatch.setenv(hosts.PROCESS, '4')
  with pytest.raises(ValueError, match=r'distributed\.process is 4 of 4; expected one of 0 to 3'):
    hosts.from_environment(stated)
  monkeypatch.setenv(hosts.PROCESS, 'x')
  with pytest.raises(ValueError, match="MIMO_PROCESS is 'x'; expected a whole number"):
    hosts.from_environment(stated)
  with pytest.raises(ValueError, match="coordinator is 'a'; expected host:port"):
    hosts.Cluster(coordinator='a', processes=2)
