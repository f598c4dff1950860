import asyncio

import pytest

from mimo.rollouts.seats import Seats


def test_sessions_go_to_the_largest_free_share(kit):
  async def main():
    seats = Seats([2, 4])
    taken = [await seats.take(range(2)) for _ in range(6)]
    # Free shares 1|1, 1/2|1, 1/2|3/4, 1/2|1/2, 0|1/2, 0|1/4.
    assert taken == [0, 1, 1, 0, 1, 1]
    assert seats.in_use == seats.capacity == (2, 4)

  kit.run(main())


def test_who_comes_first_is_seated_first(kit):
  async def main():
    seats = Seats([1, 1])
    await seats.take({0})
    await seats.take({1})
    order = []

    async def wait(name, allowed):
      order.append((name, await seats.take(allowed)))

    waiting = [asyncio.ensure_future(wait(*w)) for w in (('x', {1}), ('y', {0, 1}), ('z', {0}))]
    await asyncio.sleep(1)
    seats.give(0)  # x may not have it
    await asyncio.sleep(1)
    assert order == [('y', 0)]
    seats.give(0)
    seats.give(1)
    await asyncio.gather(*waiting)
    assert order == [('y', 0), ('x', 1), ('z', 0)] or order == [('y', 0), ('z', 0), ('x', 1)]

  kit.run(main())


def test_a_cancelled_wait_takes_no_place(kit):
  async def main():
    seats = Seats([1])
    await seats.take({0})
    early = asyncio.ensure_future(seats.take({0}))
    late = asyncio.ensure_future(seats.take({0}))
    await asyncio.sleep(1)
    early.cancel()
    await asyncio.sleep(1)
    seats.give(0)  # seats `late`, which has not run yet ...
    assert seats.in_use == (1,)
    late.cancel()  # ... and never gets to know of it
    await asyncio.gather(early, late, return_exceptions=True)
    assert seats.in_use == (0,)
    assert await seats.take({0}) == 0

  kit.run(main())


@pytest.mark.parametrize('capacity', [[], [3, 0]])
def test_a_fleet_without_places_is_refused(capacity):
  with pytest.raises(ValueError, match='expected at least 1 each'):
    Seats(capacity)
