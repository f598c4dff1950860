"""Ends a run in good order where a signal asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import types
from collections.abc import Awaitable, Iterator
from typing import TypeVar

# From a supervisor, a keyboard, a closed terminal, and a batch system that warns of its time limit.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)

_T = TypeVar('_T')


class Stopped(Exception):
  """A signal arrived before the work was done."""


@contextlib.contextmanager
def on_signals() -> Iterator[asyncio.Event]:
  """Yields an event that the first of `SIGNALS` sets; a second one ends the process at once.

  Call it on a running event loop of the main thread. A signal that the process ignored before, as
  under nohup, stays ignored. Handlers are put back in the end.
  """
  stop = asyncio.Event()
  loop = asyncio.get_running_loop()
  heeded = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

  def handle(_number: int, _frame: types.FrameType | None) -> None:
    # The system's own action from now on: it needs no Python, which a long computation holds up.
    for number in heeded:
      signal.signal(number, signal.SIG_DFL)
    loop.call_soon_threadsafe(stop.set)

  before = {number: signal.signal(number, handle) for number in heeded}
  try:
    yield stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


async def unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T:
  """Returns the result of `work`, which is cancelled where `stop` is set first.

  A result that is there is returned, whatever else happened in the same turn of the event loop: it
  may be a batch whose prompts count as trained on.

  Raises:
    Stopped: `stop` was set before there was a result.
  """
  task = asyncio.ensure_future(work)
  stopping = asyncio.ensure_future(stop.wait())
  try:
    if not stop.is_set():
      await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      task.cancel()
      await asyncio.wait({task})
    if task.cancelled() and stop.is_set():
      raise Stopped
    return task.result()
  finally:
    stopping.cancel()
    task.cancel()
    await asyncio.wait({task, stopping})
