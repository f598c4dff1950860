import collections
import json

import hypothesis
import pytest
from hypothesis import strategies as st

from mimo.rollouts.cursor import Cursor, permutation


def _cursor(state=None, size=5, seed=3):
  return Cursor(split='train', size=size, seed=seed, state=state)


def _take(cursor, count):
  return [cursor.take() for _ in range(count)]


def test_each_epoch_is_the_whole_split_in_its_own_order():
  refs = _take(_cursor(), 20)
  assert [ref.group for ref in refs] == list(range(20))
  epochs = [[ref.index for ref in refs[5 * e : 5 * e + 5]] for e in range(4)]
  assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
  assert len({tuple(epoch) for epoch in epochs}) > 1
  assert all(ref.split == 'train' for ref in refs)


def test_orders_are_uniform():
  counts = collections.Counter(tuple(permutation(0, e, 3).tolist()) for e in range(6000))
  assert len(counts) == 6
  # Each is binomial(6000, 1/6): 1000 with a standard deviation of 29.
  assert all(abs(count - 1000) < 5 * 29 for count in counts.values())


def test_the_order_depends_on_the_seed():
  a, b = _take(_cursor(size=50), 50), _take(_cursor(size=50, seed=4), 50)
  assert [r.index for r in a] != [r.index for r in b]


def test_outstanding_prompts_come_first_after_a_resume():
  cursor = _cursor()
  refs = _take(cursor, 8)
  for group in (0, 2, 3, 6):
    cursor.done(group)
  state = json.loads(json.dumps(cursor.state()))
  assert state['outstanding'] == [1, 4, 5, 7]
  again = _cursor(state)
  resumed = _take(again, 6)
  assert resumed[:4] == [refs[g] for g in (1, 4, 5, 7)]
  assert [ref.group for ref in resumed[4:]] == [8, 9]
  assert resumed[4:] == _take(cursor, 2)


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None)
def test_nothing_is_lost_or_done_twice_over_any_number_of_resumes(data):
  """However often a run is killed, each group is done once and numbers never go back."""
  cursor, done, held = _cursor(), [], []
  for _ in range(data.draw(st.integers(1, 30))):
    action = data.draw(st.sampled_from(['take', 'done', 'resume']))
    if action == 'take':
      held.append(cursor.take().group)
    elif action == 'done' and held:
      group = held.pop(data.draw(st.integers(0, len(held) - 1)))
      cursor.done(group)
      done.append(group)
    elif action == 'resume':
      cursor, held = _cursor(cursor.state()), []
  state = cursor.state()
  assert len(set(done)) == len(done)
  assert sorted([*done, *state['outstanding']]) == list(range(state['next']))


def test_requeued_prompts_come_again_in_order():
  cursor = _cursor()
  refs = _take(cursor, 4)
  cursor.done(1)
  cursor.requeue()
  assert _take(cursor, 4) == [refs[0], refs[2], refs[3], _take(_cursor(), 5)[4]]


def test_mistakes_are_named():
  with pytest.raises(ValueError, match="split 'train' holds 0 tasks; expected at least 1"):
    _cursor(size=0)
  with pytest.raises(ValueError, match='the state is of seed 3; expected 4'):
    _cursor(_cursor().state(), seed=4)
  with pytest.raises(ValueError, match='the state is of size 5; expected 6'):
    _cursor(_cursor().state(), size=6)
  with pytest.raises(ValueError, match='group 0 is not outstanding'):
    _cursor().done(0)
