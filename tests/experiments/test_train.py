"""Whole runs of a tiny policy: they end, they go on after a kill, and they refuse bad input."""

import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from mimo.experiments import cli, prepare, schema, train
from mimo.experiments.workdir import differing_keys
from mimo.telemetry import writers
from mimo.weights.checkpoints import load_policy, write_policy
from mimo.weights.huggingface import open_model

_ROOT = pathlib.Path(__file__).parents[2]

# Dies by SIGKILL, or is sent a signal, where the update named by argv[3] begins to be published:
# its checkpoint is not yet saved, and of update 0 nothing has been sampled. With argv[5] 'save',
# right after its checkpoint has begun to be saved.
_INTERRUPTED = """
import json, os, signal, sys
from ml_collections import config_dict
from mimo.experiments import run, train

publish, save = run.Run.publish, run.Run.save

def saving(self, update):
  save(self, update)
  if update == int(sys.argv[3]) and sys.argv[5] == 'save':
    os.kill(os.getpid(), getattr(signal, sys.argv[4]))

async def publishing(self, update):
  if update == int(sys.argv[3]) and sys.argv[5] == 'publish':
    self._checkpoints.wait()  # those before
    os.kill(os.getpid(), getattr(signal, sys.argv[4]))
  return await publish(self, update)

run.Run.publish, run.Run.save = publishing, saving
train.train(config_dict.ConfigDict(json.loads(sys.argv[1])), sys.argv[2])
"""


def _interrupt(
  config, directory: str, step: int, name: str, *, at: str = 'publish'
) -> subprocess.CompletedProcess[str]:
  arguments = [json.dumps(config.to_dict()), directory, str(step), name, at]
  return subprocess.run(
    [sys.executable, '-c', _INTERRUPTED, *arguments],
    capture_output=True,
    text=True,
    cwd=_ROOT,
  )


def _leaves(directory) -> list[np.ndarray]:
  return [np.asarray(leaf) for leaf in jax.tree.leaves(load_policy(directory)[1])]


def _records(directory) -> list[dict]:
  """metrics.jsonl without what the clock decides."""
  timed = ('speed/', 'sampling/secs', 'sampling/wait_secs', 'cost/billed')
  return [
    {name: value for name, value in record.items() if not name.startswith(timed)}
    for record in writers.read(pathlib.Path(directory) / 'metrics.jsonl')
  ]


def test_lockstep_resumes_bit_identical_after_sigkill_and_ctrl_c(tiny_config, tmp_path) -> None:
  whole, broken = str(tmp_path / 'whole'), str(tmp_path / 'broken')
  with tiny_config.unlocked():
    # The base policy, so that rewards differ and gradients are not zero.
    tiny_config.policy = ''
    tiny_config.rollouts.group_size = 6
  train.train(tiny_config, whole)
  rewards = [r['rollout/reward'] for r in _records(whole) if 'rollout/reward' in r]
  assert any(0 < reward < 1 for reward in rewards)

  # Update 3 is lost with the process: the last complete checkpoint is that of update 2.
  killed = _interrupt(tiny_config, broken, 3, 'SIGKILL')
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  stopped = _interrupt(tiny_config, broken, 3, 'SIGINT')
  assert stopped.returncode == 0, stopped.stderr
  assert 'stopped after 3 of 4 updates' in stopped.stdout
  train.train(tiny_config, broken)

  for ours, theirs in zip(_leaves(broken), _leaves(whole), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert _records(broken) == _records(whole)
  assert (tmp_path / 'broken' / 'starts').read_text().split() == ['0', '2', '3']
  assert [r['step'] for r in _records(whole) if 'rollout/reward' in r] == [1, 2, 3, 4]
  html = (tmp_path / 'whole' / 'report.html').read_text()
  assert not re.search(r'(src|href)="https?:|url\(http|@import|<script', html)


def test_sigterm_before_anything_is_saved_leaves_quietly(tiny_config, tmp_path) -> None:
  stopped = _interrupt(tiny_config, str(tmp_path / 'run'), 0, 'SIGTERM')
  assert (stopped.returncode, stopped.stderr) == (0, '')
  assert 'stopped after 0 of 4 updates' in stopped.stdout
  assert not (tmp_path / 'run' / 'report.html').exists()


def test_an_async_run_killed_while_it_saves_loses_no_prompt(tiny_config, tmp_path) -> None:
  with tiny_config.unlocked():
    tiny_config.rollouts.schedule = 'async'
  directory = tmp_path / 'run'
  killed = _interrupt(tiny_config, str(directory), 2, 'SIGKILL', at='save')
  assert killed.returncode == -signal.SIGKILL, killed.stderr
  train.train(tiny_config, str(directory))
  # The save of update 2 was under way; whether it was complete or not, its state is one of the two.
  starts = (directory / 'starts').read_text().split()
  assert starts in (['0', '0'], ['0', '2'])
  meta = json.loads(next((directory / 'checkpoints' / '4' / 'meta').rglob('metadata')).read_text())
  cursor = meta['rollouts']['cursor']
  # Prompts handed out are trained on, once, or still out; none here was dropped.
  assert cursor['next'] - len(cursor['outstanding']) == 4 * 2
  assert 'groups_dropped' not in meta['rollouts']['totals']
  assert [r['step'] for r in _records(directory) if 'rollout/reward' in r] == [1, 2, 3, 4]


def test_async_run_publishes_evaluates_and_books(tiny_config, tmp_path, capsys) -> None:
  with tiny_config.unlocked():
    tiny_config.rollouts.schedule = 'async'
    tiny_config.updates = 3
  train.train(tiny_config, str(tmp_path / 'run'))
  records = writers.read(tmp_path / 'run' / 'metrics.jsonl')
  updates = [record for record in records if 'rollout/reward' in record]
  assert [record['step'] for record in updates] == [1, 2, 3]
  assert [record['step'] for record in records if 'eval/heldout/pass@1' in record] == [0, 3]
  for record in updates:
    turns = sum(record[f'cost/turns/{pool}'] for pool in tiny_config.pools)
    assert record['cost/turns'] == turns > 0
    # B200: 6.25 dollars an hour over 30,000 turns an hour.
    assert record['cost/modelled_usd/b200_nvfp4'] == pytest.approx(
      record['cost/turns/b200_nvfp4'] * 6.25 / 30000
    )
  out = capsys.readouterr().out
  assert out.count('\nupdate ') == 3
  assert f'report: {tmp_path / "run" / "report.html"}' in out
  assert list((tmp_path / 'run' / 'tensorboard').iterdir())
  # The same command again has nothing left to do, and says so by leaving everything as it is.
  before = _leaves(tmp_path / 'run')
  train.train(tiny_config, str(tmp_path / 'run'))
  for ours, theirs in zip(_leaves(tmp_path / 'run'), before, strict=True):
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
  ('key', 'value', 'words'),
  [
    ('arm', 'sc_miss', "'sc_mis'"),
    ('task', 'repare', "'repair'"),
    ('policy', '/nowhere', '/nowhere does not exist'),
    ('objective.low', -0.5, 'low'),
    ('objective.high', 0.1, 'high'),
    ('pools.h100_fp8.format', 'fp8_chanel', "'fp8_channel'"),
    ('pools.h100_fp8.format', 'fp8_block', 'multiple of 128'),
    ('pools.h100_fp8.accelerator', 'h100', "'H100'"),
    ('pools.h100_fp8.sessions', 0, 'sessions'),
    ('pools.h100_fp8.kv_cache_dtype', 'fp4', 'bf16'),
    ('rollouts.schedule', 'asink', "'async'"),
    ('rollouts.group_size', 1, '>= 2'),
    ('block_scale', 'max', 'amax'),
    ('sampling.temperature', 0.0, '>= 0.01'),
    ('sampling.candidates', 129, "at most 128, the policy's vocabulary"),
    ('trainer.mesh', 'data=64', '64'),
    ('trainer.mesh', 'dta=2', "did you mean 'data'"),
    ('trainer.mesh', 'data', 'one size of data'),
    ('trainer.row_tokens', 32, 'at least 96'),
    ('trainer.row_trained_tokens', 40, 'at least 48'),
    ('rollouts.in_flight_batches', float('inf'), 'in_flight_batches'),
    ('wandb_project', 'mine', 'wandb is not installed'),
    ('trainer.compute_dtype', 'float16', 'bfloat16'),
  ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tiny_config, tmp_path, key, value, words) -> None:
  with tiny_config.unlocked():
    tiny_config.update_from_flattened_dict({key: value})
  with pytest.raises(cli.Mistake) as raised:
    train.train(tiny_config, str(tmp_path / 'run'))
  assert words in str(raised.value)
  assert '\n' not in str(raised.value)
  assert not (tmp_path / 'run').exists()
  if value == 'data=64':
    return
  with pytest.raises(ValueError) as refused:  # and what needs no device is known without one
    prepare.read(schema.parse(tiny_config))
  assert words in str(refused.value)


def test_a_dry_run_needs_no_device_and_writes_nothing(tiny_policy, tmp_path_factory) -> None:
  orbax, tmp_path = (tmp_path_factory.mktemp(name) for name in ('orbax', 'empty'))
  write_policy(str(orbax), open_model(tiny_policy))

  def dry(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
      [sys.executable, '-m', 'mimo.experiments.train', '--config=mixed', '--dry_run', *flags],
      capture_output=True,
      text=True,
      cwd=tmp_path,
      env=os.environ | {'JAX_PLATFORMS': 'none such'},
    )

  flags = ('--config.updates=7', '--config.trainer.mesh=fsdp=4', f'--config.policy={orbax}')
  done = dry(*flags, '--config.pools.h100_fp8.format=fp8_channel')
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == f'would train 7 updates of repair in {tmp_path}/runs/mixed\n'
  done = dry('--config.policy=/nowhere')
  assert (done.returncode, done.stdout) == (1, '')
  assert done.stderr.startswith('mimo train: /nowhere does not exist; expected')
  assert not list(tmp_path.iterdir())


def test_arms_differ_in_the_arm_only() -> None:
  configs = [
    runpy.run_path(str(_ROOT / 'configs' / 'mixed.py'))['get_config'](*arm).to_dict()
    for arm in ((), ('grpo',))
  ]
  assert differing_keys(*configs) == ['arm']
