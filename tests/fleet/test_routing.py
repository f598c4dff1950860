import collections
import fractions

import hypothesis
import pytest
from hypothesis import strategies as st

from mimo.fleet import routing

_FLEETS = st.lists(st.integers(1, 48), min_size=1, max_size=6)


def test_the_largest_free_share_wins():
  # Free shares 8/16, 13/24, 20/48.
  assert routing.least_loaded([8, 11, 28], [16, 24, 48]) == 1
  assert routing.least_loaded([8, 24, 28], [16, 24, 48]) == 0
  assert routing.least_loaded([0, 0], [4, 8]) == 0  # a tie goes to the first
  assert routing.least_loaded([4, 8], [4, 8]) is None


def test_only_allowed_replicas_are_looked_at():
  assert routing.least_loaded([0, 3], [4, 4], allowed={1}) == 1
  assert routing.least_loaded([0, 4], [4, 4], allowed={1}) is None


@hypothesis.given(_FLEETS, st.data())
@hypothesis.settings(deadline=None)
def test_shares_are_compared_as_fractions(capacity, data):
  in_use = [data.draw(st.integers(0, c)) for c in capacity]
  shares = [fractions.Fraction(c - u, c) for u, c in zip(in_use, capacity, strict=True)]
  expected = shares.index(max(shares)) if max(shares) > 0 else None
  assert routing.least_loaded(in_use, capacity) == expected


def test_a_table_of_three_pools():
  # Weights 1, 1, 2: by hand, credits (1,1,2) -> 2; (2,2,0) -> 0; (-1,3,2) -> 1; (0,0,4) -> 2.
  assert routing.table([4, 4, 8]) == (2, 0, 1, 2)


@hypothesis.given(_FLEETS)
@hypothesis.settings(deadline=None)
def test_a_table_is_proportional_and_even(capacity):
  table = routing.table(capacity)
  counts = collections.Counter(table)
  for r, sessions in enumerate(capacity):
    share = sessions / sum(capacity)
    assert counts[r] / len(table) == pytest.approx(share)
    for length in range(1, len(table) + 1):
      assert abs(table[:length].count(r) - length * share) < len(capacity)


def test_sessions_of_a_batch_follow_the_capacities():
  table = routing.table([12, 16, 48])
  counts = collections.Counter(
    routing.fixed(table, seed=3, group=g, member=m) for g in range(400) for m in range(8)
  )
  for r, sessions in enumerate([12, 16, 48]):
    assert counts[r] / 3200 == pytest.approx(sessions / 76, abs=0.02)


def test_a_place_depends_on_every_argument_and_on_nothing_else():
  table = routing.table([1] * 997)
  base = dict(seed=1, group=3, member=4)
  place = routing.fixed(table, **base)
  assert place == routing.fixed(table, **base)
  for name in base:
    assert routing.fixed(table, **{**base, name: base[name] + 1}) != place


@pytest.mark.parametrize('capacity', [[], [4, 0]])
def test_a_table_of_nothing_is_refused(capacity):
  with pytest.raises(ValueError, match='expected at least 1 each'):
    routing.table(capacity)
