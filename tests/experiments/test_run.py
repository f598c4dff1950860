"""What a run tells the run's other processes where it fails before its loop begins."""

import dataclasses

import pytest

from mimo.experiments import hosts, prepare, records
from mimo.experiments.run import Run
from mimo.experiments.workdir import Workdir


class _Told(hosts.Peers):
  def __init__(self) -> None:
    super().__init__()
    self.commands: list[int] = []

  def tell(self, command: int, *numbers: int) -> None:
    self.commands.append(command)


def test_the_others_are_told_to_stop_where_a_run_can_not_be_set_up(
  tiny_config, tmp_path, monkeypatch
) -> None:
  peers = _Told()
  plan = dataclasses.replace(prepare.plan(tiny_config), peers=peers)

  def full(*_, **__):
    raise OSError('the disk is full')

  monkeypatch.setattr(records, 'make_writer', full)
  workdir = Workdir(tmp_path / 'run', tiny_config.to_dict())
  with pytest.raises(OSError, match='full'):
    Run(plan, workdir)
  assert peers.commands == [hosts.BEGIN, hosts.STOP]
