"""An event loop whose clock jumps: time passes only while everything waits for it.

What runs on it takes no time of its clock, however long it computes; `asyncio.sleep` alone does.
So a program whose coroutines are functions of what they read is a function as well, its times
included, as long as it starts no thread and waits for nothing outside of the process.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Callable
from contextvars import Context
from typing import TypeVarTuple

_Args = TypeVarTuple('_Args')


class _JumpingSelector(selectors.DefaultSelector):  # type: ignore[valid-type, misc]
  """Polls without waiting, and moves the clock to where the wait would have ended."""

  now_secs = 0.0

  def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
    # A signal's byte in the loop's own pipe is such an event.
    events: list[tuple[selectors.SelectorKey, int]] = super().select(0)
    if not events:
      if timeout is None:
        raise RuntimeError(
          'nothing can happen any more: no event is due, no timer is set, and everything waits'
        )
      self.now_secs += max(0.0, timeout)
    return events


class _Moment(float):
  """A time of the loop's clock. Of equal ones the one that was set first comes first."""

  def __new__(cls, secs: float, number: int) -> _Moment:
    return super().__new__(cls, secs)

  def __init__(self, secs: float, number: int) -> None:
    self._number = number

  def __lt__(self, other: float) -> bool:
    if isinstance(other, _Moment) and float(self) == float(other):
      return self._number < other._number
    return float(self) < float(other)


class VirtualLoop(asyncio.SelectorEventLoop):
  """An event loop on a virtual clock, which starts at 0.

  Timers of one moment fire in the order in which they were set; a plain loop's heap keeps no such
  order, so that a timer which was set and cancelled could change what follows.
  """

  def __init__(self) -> None:
    self._jumping = _JumpingSelector()
    self._numbers = itertools.count()
    super().__init__(self._jumping)

  def time(self) -> float:
    """Returns the virtual seconds since the loop was made."""
    return self._jumping.now_secs

  def call_at(
    self,
    when: float,
    callback: Callable[[*_Args], object],
    *args: *_Args,
    context: Context | None = None,
  ) -> asyncio.TimerHandle:
    """Calls back at a time of the virtual clock."""
    moment = _Moment(when, next(self._numbers))
    return super().call_at(moment, callback, *args, context=context)
