"""Closes what a run opened, whatever goes wrong meanwhile."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Awaitable, Callable


class Exits(contextlib.AsyncExitStack):
  """Closes what it owns, last opened first.

  One that fails to close keeps none of the others from being closed. The first error is raised:
  that of the body if it has one, and else that of the first to fail. Later ones become its notes.
  """

  def __init__(self) -> None:
    super().__init__()
    self._errors: list[BaseException] = []

  def own(self, close: Callable[[], Awaitable[None] | None]) -> None:
    """Has `close` called, and awaited where it is a coroutine function, when the body ends."""

    async def closing() -> None:
      try:
        result = close()
        if inspect.isawaitable(result):
          await result
      except BaseException as error:
        self._errors.append(error)

    self.push_async_callback(closing)

  async def __aexit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: types.TracebackType | None,
  ) -> bool:
    await super().__aexit__(kind, error, traceback)
    errors = self._errors if error is None else [error, *self._errors]
    if not errors:
      return False
    first, *later = errors
    for other in later:
      first.add_note(f'then, while closing: {type(other).__name__}: {other}')
    if first is not error:
      raise first
    return False
