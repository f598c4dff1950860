"""The bookkeeping that both drivers share; what it bounds is tested through them."""

import pytest

from mimo.rollouts.backlog import AsyncLimits, Backlog
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.tally import Tally
from mimo.types import Group


@pytest.fixture
def backlog(kit):
  cursor = Cursor(split='train', size=10, seed=0)
  limits = AsyncLimits(in_flight_batches=1.5, buffered_batches=1.0)
  return Backlog(
    kit.settings(groups=2), limits, cursor=cursor, tally=Tally(['a']), update_of={0: 0}
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


def test_a_state_keeps_the_order_in_which_groups_ended(backlog):
  prompts = [backlog.start() for _ in range(3)]
  for prompt in (prompts[2], prompts[0], prompts[1]):
    backlog.end(prompt, Group(prompt, (), 3))
  state = backlog.state()
  assert state['ended'] == [2, 0, 1]
  other = [Group(prompt, (), 3) for prompt in prompts]
  backlog._ended.clear()
  for group in other:
    backlog._ended.append(group)
  backlog.restore(state)
  assert backlog.state() == state
