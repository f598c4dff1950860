"""What a run tells its other processes where it fails outside of its loop."""

import asyncio
import dataclasses

import pytest

from mimo.experiments import hosts, prepare, records, schema
from mimo.experiments.run import Run
from mimo.experiments.workdir import Workdir


class _Told(hosts.Peers):
  def __init__(self) -> None:
    super().__init__()
    self.commands: list[int] = []

  def tell(self, command: int, *numbers: int) -> None:
    self.commands.append(command)


class _Closed:
  closed = False

  def close(self) -> None:
    self.closed = True  # by which the others are told


@pytest.fixture
def planned(tiny_config):
  return dataclasses.replace(prepare.plan(schema.parse(tiny_config)), peers=_Told())


def test_the_others_are_told_to_stop_where_a_run_can_not_be_set_up(
  planned, tmp_path, monkeypatch
) -> None:
  def full(*_, **__):
    raise OSError('the disk is full')

  monkeypatch.setattr(records, 'make_writer', full)
  workdir = Workdir(tmp_path / 'run', schema.plain(planned.experiment))
  with pytest.raises(OSError, match='full'):
    Run(planned, workdir)
  assert planned.peers.commands == [hosts.BEGIN, hosts.STOP]


def test_the_others_are_told_to_stop_where_a_sampler_fails_to_close(planned, tmp_path) -> None:
  class Broken:
    async def close(self):
      raise RuntimeError('it does not end')

  learners = []

  def learner_of(state):
    learners.append(_Closed())
    return learners[0]

  planned = dataclasses.replace(planned, learner_of=learner_of)
  run = Run(planned, Workdir(tmp_path / 'run', schema.plain(planned.experiment)))
  run.samplers = (Broken(),)
  with pytest.raises(RuntimeError, match='does not end'):
    asyncio.run(run.close())
  assert learners[0].closed
