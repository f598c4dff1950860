import pathlib

import numpy as np
import pytest

from mimo.tasks import base
from mimo.tasks.repair import RepairTask, task, vocabulary


@pytest.fixture
def repair() -> RepairTask:
  return RepairTask()


@pytest.fixture
def hard_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
  path = tmp_path / 'hard.txt'
  monkeypatch.setattr(task, 'HARD_FILE', path)
  task._hard_indices.cache_clear()
  yield path
  task._hard_indices.cache_clear()


def test_is_a_task(repair: RepairTask):
  as_task: base.Task = repair
  assert as_task.name == 'repair'
  assert as_task.stop_ids == (vocabulary.STOP_ID,)
  assert as_task.max_turn_tokens <= 8
  assert as_task.max_tokens == 96
  assert (as_task.size('train'), as_task.size('heldout')) == (65536, 256)


def test_start_opens_fresh_episodes_of_the_named_problem(repair: RepairTask):
  first, second = repair.start('heldout', 3), repair.start('heldout', 3)
  assert first is not second
  np.testing.assert_array_equal(first.prompt, second.prompt)
  assert repair.task_id('heldout', 3) != repair.task_id('heldout', 4)


def test_hard_is_a_quarter_of_heldout(repair: RepairTask):
  names = [repair.task_id('hard', index) for index in range(repair.size('hard'))]
  heldout = {repair.task_id('heldout', index): index for index in range(256)}
  assert len(set(names)) == len(names) == 64
  for index, name in enumerate(names):
    np.testing.assert_array_equal(
      repair.start('hard', index).prompt, repair.start('heldout', heldout[name]).prompt
    )


def test_a_stale_hard_list_is_named(repair: RepairTask, hard_file: pathlib.Path):
  hard_file.write_text('0123456789ab\n')
  with pytest.raises(ValueError, match=r'hard.txt.*0123456789ab'):
    repair.size('hard')


def test_a_missing_hard_list_is_named(repair: RepairTask, hard_file: pathlib.Path):
  with pytest.raises(ValueError, match=r'hard.txt is missing.*pretrain'):
    repair.size('hard')


@pytest.mark.parametrize(('split', 'index'), [('test', 0), ('heldout', 256), ('train', -1)])
def test_what_does_not_exist_is_named(repair: RepairTask, split: str, index: int):
  with pytest.raises(ValueError, match='expected'):
    repair.start(split, index)
