"""Places for sessions at replicas: each holds as many as it decodes at a time."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Collection, Sequence

from mimo.fleet import routing


class Seats:
  """Gives out places, least-loaded replica first; who finds none waits, first come first served.

  A place that was taken is given back exactly once, by whoever took it.
  """

  def __init__(self, capacity: Sequence[int]) -> None:
    """`capacity`: sessions per replica. Raises ValueError for none, or for less than one."""
    if not capacity or min(capacity) < 1:
      raise ValueError(f'sessions per replica are {list(capacity)}; expected at least 1 each')
    self._capacity = tuple(capacity)
    self._in_use = [0] * len(capacity)
    self._waiting: collections.deque[tuple[asyncio.Future[int], frozenset[int]]] = (
      collections.deque()
    )

  @property
  def capacity(self) -> tuple[int, ...]:
    return self._capacity

  @property
  def in_use(self) -> tuple[int, ...]:
    return tuple(self._in_use)

  async def take(self, allowed: Collection[int]) -> int:
    """Waits for a place at one of the replicas `allowed`, and returns which."""
    waiter = asyncio.get_running_loop().create_future()
    self._waiting.append((waiter, frozenset(allowed)))
    self._seat()
    try:
      return await waiter
    except asyncio.CancelledError:
      # Cancelled in the moment between being seated and being told of it.
      if waiter.done() and not waiter.cancelled():
        self.give(waiter.result())
      raise

  def give(self, replica: int) -> None:
    """Gives a place back."""
    assert self._in_use[replica] > 0, f'replica {replica} has no place taken'
    self._in_use[replica] -= 1
    self._seat()

  def _seat(self) -> None:
    """Seats whoever can be, in the order in which they came."""
    still = []
    while self._waiting:
      waiter, allowed = self._waiting.popleft()
      if waiter.done():
        continue  # cancelled while it waited
      replica = routing.least_loaded(self._in_use, self._capacity, allowed)
      if replica is None:
        still.append((waiter, allowed))
      else:
        self._in_use[replica] += 1
        waiter.set_result(replica)
    self._waiting.extend(still)
