"""The bookkeeping of a source; what it bounds is tested through it."""

import pytest

from mimo.rollouts.backlog import Backlog
from mimo.rollouts.base import Pacing
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.tally import Tally
from mimo.types import Group


@pytest.fixture
def backlog(kit):
  cursor = Cursor(split='train', size=10, seed=0)
  pacing = Pacing(in_flight=1.5, buffered=1.0, pin_lag=None)
  return Backlog(
    kit.settings(prompts_per_update=2), pacing, cursor=cursor, tally=Tally(['a']), update_of={0: 0}
  )


def test_what_ends_beyond_the_buffer_stays_in_flight(backlog):
  prompts = [backlog.start() for _ in range(3)]
  assert (backlog.in_flight, backlog.buffered, backlog.room) == (3, 0, False)
  for prompt in prompts:
    backlog.end(prompt, Group(prompt, (), 3))
  assert (backlog.in_flight, backlog.buffered, backlog.room) == (1, 2, True)


def test_a_group_of_which_nothing_is_left_frees_its_place(backlog):
  prompt = backlog.start()
  backlog.end(prompt, None)
  assert (backlog.in_flight, backlog.buffered) == (0, 0)
  with pytest.raises(ValueError, match='not outstanding'):
    backlog.end(prompt, None)


def test_what_is_given_up_is_started_again_by_number(backlog):
  prompts = [backlog.start() for _ in range(3)]
  backlog.end(prompts[1], Group(prompts[1], (), 3))
  backlog.restart()
  assert (backlog.in_flight, backlog.buffered, backlog.room) == (0, 0, True)
  assert [backlog.start().group for _ in range(4)] == [0, 1, 2, 3]
