"""Whole simulated runs of a tiny policy: equal twice, and equal when they are killed between."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from mimo.experiments import cli, run, train
from mimo.rollouts import schedules
from mimo.rollouts.clock import VirtualLoop
from mimo.telemetry import writers
from mimo.weights.checkpoints import load_policy

_ROOT = pathlib.Path(__file__).parents[2]

# Kills itself where update argv[3] begins to be published.
_KILLED = """
import json, os, signal, sys
from ml_collections import config_dict
from mimo.experiments import run, train

publish = run.Run.publish

async def publishing(self, update):
  if update == int(sys.argv[3]):
    self._checkpoints.wait()  # those before
    os.kill(os.getpid(), signal.SIGKILL)
  return await publish(self, update)

run.Run.publish = publishing
train.train(config_dict.ConfigDict(json.loads(sys.argv[1])), sys.argv[2])
"""


@pytest.fixture
def simulated_config(tiny_config):
  with tiny_config.unlocked():
    tiny_config.policy = ''
    tiny_config.updates = 6
    tiny_config.rollouts.schedule = 'simulated'
    tiny_config.rollouts.group_size = 4
    tiny_config.rollouts.virtual.update_secs = 3.0
    tiny_config.rollouts.virtual.publication_secs = 2.0
    tiny_config.rollouts.virtual.answer_secs = 0.5
    for pool in tiny_config.pools.values():
      pool.turns_per_hour = 3000.0
  return tiny_config


def _kill(config, directory, step):
  arguments = [json.dumps(config.to_dict()), str(directory), str(step)]
  return subprocess.run(
    [sys.executable, '-c', _KILLED, *arguments], capture_output=True, text=True, cwd=_ROOT
  )


def _records(directory):
  """metrics.jsonl without what the real clock decides."""
  return [
    {name: value for name, value in record.items() if not name.startswith('speed/')}
    for record in writers.read(pathlib.Path(directory) / 'metrics.jsonl')
  ]


def _leaves(directory):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(load_policy(str(directory))[1])]


class _StoppedLoop(VirtualLoop):
  """Sends SIGTERM at a virtual time."""

  def __init__(self, secs):
    super().__init__()
    poll, sent = self._jumping.select, []

    def select(timeout=None):
      if self.time() >= secs and not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))
      return poll(timeout)

    self._jumping.select = select


def test_a_killed_run_and_a_stopped_one_go_on_bit_for_bit(simulated_config, tmp_path, monkeypatch):
  """tests/rollouts/test_redraw.py kills at every seventh turn of the loop, with stand-ins.

  Checkpoints are at 2, 4 and 6, so update 5 is lost to the kill; the next start is stopped while it
  waits for the batch after update 5, which it then saves.
  """
  train.train(simulated_config, str(tmp_path / 'whole'))
  broken = tmp_path / 'broken'
  killed = _kill(simulated_config, broken, 5)
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  secs = [r['sampling/secs'] for r in _records(tmp_path / 'whole') if 'rollout/reward' in r]
  monkeypatch.setattr(schedules, 'VirtualLoop', lambda: _StoppedLoop(sum(secs[:5]) + 3.5))
  train.train(simulated_config, str(broken))
  monkeypatch.undo()
  train.train(simulated_config, str(broken))
  assert (broken / 'starts').read_text().split() == ['0', '4', '5']
  assert _records(broken) == _records(tmp_path / 'whole')
  for ours, theirs in zip(_leaves(broken), _leaves(tmp_path / 'whole'), strict=True):
    np.testing.assert_array_equal(ours, theirs)

  updates = [r for r in _records(broken) if 'rollout/reward' in r]
  assert [record['step'] for record in updates] == [1, 2, 3, 4, 5, 6]
  assert any(0 < record['rollout/reward'] < 1 for record in updates)
  assert max(record['rollout/staleness_max_updates'] for record in updates) >= 2
  assert any(record['rollout/versions_per_episode'] > 1 for record in updates)
  # As-billed cost is of virtual time, from batch to batch: B200 at 6.25 dollars an hour.
  for record in updates:
    secs = record['sampling/secs']
    assert record['cost/billed_usd/b200_nvfp4'] == pytest.approx(secs * 6.25 / 3600)


@pytest.mark.parametrize(
  ('key', 'value', 'words'),
  [
    ('pools.h100_fp8.turns_per_hour', None, 'turns_per_hour is not stated'),
    ('pools.h100_fp8.server', 'vllm', "expected 'native'"),
    ('rollouts.virtual.update_secs', -1.0, 'update_secs'),
    ('rollouts.virtual.turn_tokens', 0.0, 'turn_tokens'),
  ],
)
def test_bad_input_is_refused(simulated_config, tmp_path, key, value, words):
  with simulated_config.unlocked():
    simulated_config.update_from_flattened_dict({key: value})
  with pytest.raises(cli.Mistake, match=words):
    train.train(simulated_config, str(tmp_path / 'run'))


def test_a_version_that_the_store_lost_is_named(simulated_config, tmp_path, monkeypatch):
  async def evaluate(self, update):
    self.records.evaluated.add(update)

  monkeypatch.setattr(run.Run, 'evaluate', evaluate)
  with simulated_config.unlocked():
    simulated_config.updates = 3
    simulated_config.checkpoints.every_updates = 2
  directory = tmp_path / 'run'
  train.train(simulated_config, str(directory))
  for manifest in (directory / 'store').rglob('manifests/bf16/00000001.json'):
    manifest.unlink()
  with pytest.raises(cli.Mistake, match='holds no publication of update 0; expected every one'):
    train.train(simulated_config, str(directory))
