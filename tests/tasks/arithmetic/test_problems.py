import collections
import re

import pytest

from mimo.tasks.arithmetic import problems


def _all(split):
  return [problems.problem(split, i) for i in range(problems.SIZES[split])]


def _sum(problem):
  """The kind and numbers, read from the id."""
  return tuple(problem.id.rsplit('_', 2)[0].split('_'))


def test_answers_follow_from_the_text():
  rules = {
    'gets': lambda a, b: a + b,
    'loses': lambda a, b: a - b,
    'bags': lambda a, b: a * b,
  }
  kinds = collections.Counter()
  for problem in _all('heldout') + _all('train')[:500]:
    pattern = next(pattern for pattern in rules if re.search(pattern, problem.text))
    kinds[pattern] += 1
    numbers = map(int, re.findall(r'\d+', problem.text))
    assert problem.answer == rules[pattern](*numbers) >= 1, problem
  assert min(kinds.values()) > 50


def test_splits_share_no_sum():
  train, heldout = _all('train'), _all('heldout')
  assert not {_sum(p) for p in train} & {_sum(p) for p in heldout}
  assert len({p.id for p in heldout}) == len(heldout)
  texts = collections.Counter(p.text for p in train + heldout)
  assert len({p.id for p in train + heldout}) == len(texts)


def test_first_problems_stay_what_they_are():
  # A run resumes by index: another generator would be another data set.
  first = [problems.problem(split, i).id for split in ('train', 'heldout') for i in (0, 1)]
  assert first == [
    'bags_2_7_Grace_stickers',
    'bags_3_3_Farid_shells',
    'gain_11_9_Carla_books',
    'bags_4_7_Farid_cards',
  ]


def test_refusals():
  with pytest.raises(ValueError, match=r"no split 'hard'; expected one of \['heldout', 'train'\]"):
    problems.problem('hard', 0)
  with pytest.raises(ValueError, match='task 64 of heldout; expected 0 to 63'):
    problems.problem('heldout', 64)
