"""What a run owns: it is closed whatever fails, and its numbers are taken while it goes on."""

import asyncio
import dataclasses
import errno

import jax
import numpy as np
import pytest

from mimo.experiments import cli, hosts, prepare, run, schema, train
from mimo.experiments.exits import Exits
from mimo.experiments.learner import Learner
from mimo.experiments.records import Records
from mimo.experiments.run import Run
from mimo.experiments.workdir import Workdir
from mimo.samplers.native import NativeSampler
from mimo.telemetry import writers
from mimo.weights.checkpoints import Checkpoints
from mimo.weights.publication import Publisher


class _Told(hosts.Peers):
  def __init__(self) -> None:
    super().__init__()
    self.commands: list[object] = []

  def tell(self, command: int, *numbers: int) -> None:
    self.commands.append(command)


def test_the_others_are_told_to_stop_where_a_run_can_not_be_set_up(
  tiny_config, tmp_path, monkeypatch
) -> None:
  planned = dataclasses.replace(prepare.plan(schema.parse(tiny_config)), peers=_Told())

  def full(*_, **__):
    raise OSError('the disk is full')

  async def set_up() -> None:
    async with Exits() as exits:
      workdir = Workdir(tmp_path / 'run', {}, '')
      exits.own(workdir.close)
      Run(planned, workdir, exits)

  monkeypatch.setattr(run, 'Records', full)
  for name in ('wait', 'close'):
    monkeypatch.setattr(Checkpoints, name, lambda self, name=name: told.append(name))
  told = planned.peers.commands
  with pytest.raises(OSError, match='full'):
    asyncio.run(set_up())
  # A save that spans processes ends where all of them wait for it.
  assert told == [hosts.BEGIN, hosts.STOP, 'wait', 'close']
  told.clear()
  monkeypatch.setattr(run, 'start', full)
  with pytest.raises(OSError, match='full'):
    asyncio.run(set_up())
  assert told == [hosts.BEGIN, hosts.STOP]


def test_numbers_are_taken_during_the_next_update_and_a_failing_close_skips_nothing(
  tiny_config, tmp_path, monkeypatch
) -> None:
  with tiny_config.unlocked():
    tiny_config.updates = 3
    tiny_config.checkpoints.every_updates = 0  # the end
  events = []

  def noting(name, method):
    def noted(self, *args, **kwargs):
      # `update` counts from 1 either way: a record says its step, and nothing else is counted.
      events.append((name, args[0] if name == 'recorded' else 1 + len(events) - _recorded(events)))
      return method(self, *args, **kwargs)

    return noted

  async def close(self) -> None:
    events.append(('closed', self.contract.source.pool))
    if self.contract.source.pool in ('b200_nvfp4', 'a100_bf16'):
      raise RuntimeError(f'{self.contract.source.pool} does not end')

  monkeypatch.setattr(Learner, 'update', noting('begun', Learner.update))
  monkeypatch.setattr(Records, 'update', noting('recorded', Records.update))
  monkeypatch.setattr(NativeSampler, 'close', close)
  # The last one made is closed first, and the first error is the one raised.
  with pytest.raises(RuntimeError, match='b200_nvfp4 does not end') as raised:
    train.train(tiny_config, str(tmp_path / 'run'))
  assert raised.value.__notes__ == ['then, while closing: RuntimeError: a100_bf16 does not end']
  assert events[:6] == [
    ('begun', 1),
    ('begun', 2),
    ('recorded', 1),
    ('begun', 3),
    ('recorded', 2),
    ('recorded', 3),
  ]
  assert events[6:] == [
    ('closed', pool) for pool in ('evaluation', 'h100_fp8', 'b200_nvfp4', 'a100_bf16')
  ]
  # The directory is free, the checkpoint is whole, and every record is written.
  policy = (tmp_path / 'run' / 'policy').read_text().strip()
  Workdir(tmp_path / 'run', schema.plain(schema.parse(tiny_config)), policy).close()
  assert (tmp_path / 'run' / 'checkpoints' / '3').is_dir()
  records = writers.read(tmp_path / 'run' / 'metrics.jsonl')
  assert [r['step'] for r in records if 'rollout/reward' in r] == [1, 2, 3]
  assert [r['step'] for r in records if 'eval/heldout/pass@1' in r] == [0, 3]


def _recorded(events) -> int:
  return sum(name == 'recorded' for name, _ in events)


@pytest.mark.parametrize('schedule', ['async', 'lockstep'])
def test_a_first_publication_that_fails_ends_the_run_and_names_the_view(
  tiny_config, tmp_path, monkeypatch, schedule
) -> None:
  publish_view = Publisher._publish_view

  def full(self, name, *rest):
    if name == 'fp8_channel':
      raise OSError(errno.ENOSPC, 'No space left on device')
    return publish_view(self, name, *rest)

  monkeypatch.setattr(Publisher, '_publish_view', full)
  with tiny_config.unlocked():
    tiny_config.rollouts.schedule = schedule
  words = r'view fp8_channel could not be published: .*No space left'
  with pytest.raises(cli.Mistake, match=words):
    train.train(tiny_config, str(tmp_path / 'run'))


def test_a_first_publication_that_reaches_no_view_ends_the_run(
  tiny_config, tmp_path, monkeypatch
) -> None:
  def full(self, name, *rest):
    raise OSError(errno.ENOSPC, 'No space left on device')

  monkeypatch.setattr(Publisher, '_publish_view', full)
  with pytest.raises(cli.Mistake, match=r'update 0 reached no view: bf16: .*No space left'):
    train.train(tiny_config, str(tmp_path / 'run'))


def test_transfers_that_nobody_asked_for_are_refused_on_every_thread() -> None:
  double = jax.jit(lambda x: x + x)
  ones = np.ones(3, np.float32)

  async def threads() -> None:
    async with Exits() as exits:
      executor = run._thread('update', exits)
      with pytest.raises(jax.errors.JaxRuntimeError, match='Disallowed host-to-device'):
        await asyncio.get_running_loop().run_in_executor(executor, double, ones)

  with run.guarded():
    with pytest.raises(jax.errors.JaxRuntimeError, match='Disallowed host-to-device'):
      double(ones)
    assert jax.device_get(double(jax.device_put(ones))).tolist() == [2, 2, 2]
  asyncio.run(threads())
  assert double(ones).tolist() == [2, 2, 2]
