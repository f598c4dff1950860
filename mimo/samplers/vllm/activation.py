"""Activating a version of a view in a running server, as one step that holds or changes nothing.

    check files, config and tensors -> pause, keeping requests -> load, verified -> stamp -> resume

Until the last check has passed, no weight is touched. If loading fails after that, the weights
that were served before are loaded again, under the same checks, before anything resumes. If that
fails too, requests in flight are aborted and the server serves nothing until an activation
succeeds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from typing import Protocol

from mimo.samplers.vllm.messages import Activation, Failure, Outcome
from mimo.samplers.vllm.view_files import Layout, check_files, check_layout, read_layout
from mimo.types import Version

_log = logging.getLogger(__name__)


class Engine(Protocol):
  """What an activation needs of the engine."""

  async def pause(self, *, drop_cache: bool) -> None:
    """Stops scheduling and keeps requests; `drop_cache` forgets keys and values, theirs too."""

  async def load(self, directory: str) -> None:
    """Loads a view's weights, every tensor of it; raises where one is not loaded."""

  async def stamp(self, number: int) -> None:
    """Has tokens drawn from now on carry this version."""

  async def resume(self) -> None: ...

  async def abort_all(self) -> None:
    """Ends every request as aborted, and stays paused."""


class ActivationError(Exception):
  """An activation failed.

  Attributes:
    outcome: NOT_ACTIVATED where what was served before still is, BROKEN where nothing is.
  """

  def __init__(self, message: str, outcome: Outcome = Outcome.NOT_ACTIVATED):
    super().__init__(message)
    self.outcome = outcome


@dataclasses.dataclass(frozen=True, slots=True)
class _Served:
  version: Version
  directory: str


class Activator:
  """What is served, and how that changes. One activation at a time."""

  def __init__(self, engine: Engine, *, layout: Layout):
    """Serves nothing yet.

    Args:
      engine: already started, with the weights of some view.
      layout: of the view that it was started with.
    """
    self._engine = engine
    self._layout = layout
    self._served: _Served | None = None
    self._lock = asyncio.Lock()
    self.broken: str | None = None

  @property
  def version(self) -> Version | None:
    """What is served; None where nothing is."""
    return None if self._served is None or self.broken is not None else self._served.version

  @property
  def number(self) -> int | None:
    return None if self.version is None else self.version.number

  @property
  def activating(self) -> bool:
    return self._lock.locked()

  def refuse(self, min_version: int | None) -> Failure | None:
    """Returns why a request that asks for a minimum version can't be served now, or None."""
    if self.broken is not None:
      return Failure(Outcome.BROKEN, self.broken, None)
    if self._served is None:
      return Failure(Outcome.NOT_READY, 'no version is activated yet', None)
    served = self._served.version.number
    if min_version is not None and served < min_version:
      message = f'version {served} is served; expected at least {min_version}'
      return Failure(Outcome.STALE, message, served)
    return None

  async def activate(self, activation: Activation) -> float:
    """Serves a version once this returns how many seconds requests stood still.

    Serving it already changes nothing. Raises ActivationError; see there what is served then.
    """
    if self._lock.locked():
      raise ActivationError('another activation is under way')
    async with self._lock:
      if self.version == activation.version:
        return 0.0
      try:
        await asyncio.to_thread(self._check, activation)
      except (ValueError, OSError) as error:
        raise ActivationError(f'{_name(activation)}: {error}') from None
      return await self._switch(activation)

  def _check(self, activation: Activation) -> None:
    check_files(activation.directory, activation.files)
    check_layout(read_layout(activation.directory), self._layout)

  async def _switch(self, activation: Activation) -> float:
    start = time.monotonic()
    await self._engine.pause(drop_cache=activation.prefix_cache == 'drop' or self._served is None)
    try:
      await self._engine.load(activation.directory)
      await self._engine.stamp(activation.version.number)
    except Exception as error:
      await self._restore(f'{_name(activation)}: {type(error).__name__}: {error}')
    self._served = _Served(activation.version, activation.directory)
    self.broken = None
    await self._engine.resume()
    return time.monotonic() - start

  async def _restore(self, reason: str) -> None:
    """Goes back to what was served before, and raises."""
    if self._served is None or self.broken is not None:
      await self._engine.abort_all()
      raise ActivationError(reason)
    try:
      await asyncio.to_thread(
        lambda served: check_layout(read_layout(served.directory), self._layout), self._served
      )
      await self._engine.load(self._served.directory)
      await self._engine.stamp(self._served.version.number)
    except Exception as error:
      self.broken = (
        f'{reason}; version {self._served.version.number} could not be loaded again: '
        f'{type(error).__name__}: {error}'
      )
      _log.error(self.broken)
      await self._engine.abort_all()
      raise ActivationError(self.broken, Outcome.BROKEN) from error
    await self._engine.resume()
    raise ActivationError(reason)


def _name(activation: Activation) -> str:
  return f'version {activation.version.number} in {activation.directory}'
