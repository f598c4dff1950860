"""The clock by hand, and how long a step takes."""

import json

import pytest

from mimo.rollouts.virtual import NEVER, Clock, PoolSpeed
from mimo.samplers.base import Step


@pytest.mark.parametrize(
  ('steps', 'fed', 'prefilled', 'secs'),
  [
    (4, 4, 0, 2.0),  # one session: as slow as a session is
    (4, 80, 0, 8.0),  # twenty: as slow as the replica is
    (4, 4, 30, 2.3),
    (0, 0, 0, 0.0),
  ],
)
def test_a_step_takes_as_long_as_its_pool_needs(steps, fed, prefilled, secs):
  speed = PoolSpeed(
    session_tokens_per_sec=2.0,
    replica_tokens_per_sec=10.0,
    prefill_tokens_per_sec=100.0,
    publication_secs=0.0,
  )
  assert speed.secs(Step((), steps, fed, prefilled)) == pytest.approx(secs)


def test_weights_land_when_their_publication_is_over():
  clock = Clock()
  clock.now = 5.0
  assert clock.hand_out(0, update_secs=10.0, slowest_secs=8.0) == (5.0, 5.0)
  assert clock.asks_at == 15.0
  clock.now = 17.0
  assert clock.hand_out(1, update_secs=10.0, slowest_secs=8.0) == (12.0, 2.0)
  # Update 1 was done at 15 and update 2 is at 27.
  for now, publication, landed in (
    (15.0, 0.0, 1),
    (22.9, 8.0, -1),
    (23.0, 8.0, 1),
    (27.0, 0.0, 2),
    (35.0, 8.0, 2),
  ):
    clock.now = now
    assert clock.landed(publication) == landed
  clock.hand_out(2, update_secs=1.0, slowest_secs=8.0)
  # What every replica has got past is forgotten.
  assert [update for update, _ in clock.state()['updated_at']] == [2, 3]


def test_turns_arrive_in_order_and_first_come_first():
  clock = Clock()
  assert clock.next_arrival() == NEVER
  clock.arrive(3.0, 1, 'late')
  clock.arrive(1.0, 0, 'first')
  clock.arrive(1.0, 2, 'second')
  other = Clock()
  other.restore(json.loads(json.dumps(clock.state())))
  for each in (clock, other):
    assert each.next_arrival() == 1.0
    assert list(each.arrivals()) == []
    each.now = 1.0
    assert list(each.arrivals()) == [(0, 'first'), (2, 'second')]
    each.arrive(2.0, 3, 'later')
    each.now = 3.0
    assert list(each.arrivals()) == [(1, 'late'), (3, 'later')]
