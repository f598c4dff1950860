"""Sampling that overlaps the update: groups in flight all the time, bounded by back-pressure."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mimo.rollouts.backlog import AsyncLimits, Backlog, Fit
from mimo.rollouts.base import Batch, RolloutError, RolloutSettings
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.groups import GroupRunner
from mimo.rollouts.keys import session_key
from mimo.rollouts.tally import Tally
from mimo.samplers.base import Sampler
from mimo.tasks.base import Task
from mimo.types import Group, PromptRef


class AsyncRollouts:
  """A RolloutSource whose sessions run on the event loop while the trainer updates.

  Groups are handed out in the order in which they end. Sampling starts with the first `batch`.
  """

  def __init__(
    self,
    task: Task,
    samplers: Sequence[Sampler],
    settings: RolloutSettings,
    *,
    limits: AsyncLimits,
    update_of: Mapping[int, int],
    state: Mapping[str, Any] | None = None,
  ) -> None:
    """Opens a source.

    Args:
      task: where prompts and rewards come from.
      samplers: started ones, one per replica.
      settings: of groups and episodes.
      limits: of back-pressure.
      update_of: publication number -> updates applied to its weights, of the publications of this
        run's history. It is read when a batch is handed out, so its owner adds to it at each
        publication; tokens of a version that is not in it are of an abandoned one.
      state: what `state` of an earlier source returned.
    """
    self._settings = settings
    self._tally = Tally([s.contract.source.pool for s in samplers], state and state['totals'])
    self._runner = GroupRunner(task, samplers, settings, self._tally)
    self._cursor = Cursor(
      split=settings.split,
      size=task.size(settings.split),
      seed=settings.seed,
      state=state and state['cursor'],
    )
    self._backlog = Backlog(
      settings, limits, cursor=self._cursor, tally=self._tally, update_of=update_of
    )
    self._running: set[asyncio.Task[Group | None]] = set()
    self._changed = asyncio.Event()
    self._error: BaseException | None = None
    self._closed = False
    self._handed_out_at: float | None = None

  @property
  def in_flight(self) -> int:
    """Groups being sampled, and those that ended and find the buffer full."""
    return self._backlog.in_flight

  @property
  def buffered(self) -> int:
    """Groups that ended and are not yet handed out."""
    return self._backlog.buffered

  async def batch(self, update: int) -> Batch:
    """Waits until enough groups are ready and hands them out, oldest first."""
    clock = asyncio.get_running_loop().time
    asked = clock()
    since = asked if self._handed_out_at is None else self._handed_out_at
    self._pump()
    # Nothing is awaited from the last check to the hand-out, so a cancelled call loses no group.
    while (ready := self._take(update)) is None:
      self._changed.clear()
      await self._changed.wait()
    self._pump()
    self._handed_out_at = clock()
    groups = tuple(group for group, _ in ready)
    staleness = tuple(ranges for _, parts in ready for ranges in parts)
    stats = self._tally.drain(
      groups,
      staleness,
      secs=self._handed_out_at - since,
      wait_secs=self._handed_out_at - asked,
      in_flight=self.in_flight,
      buffered=self.buffered,
    )
    return Batch(update, groups, staleness, stats)

  def state(self) -> dict[str, Any]:
    """Returns the cursor and the counts; see RolloutSource."""
    return {'cursor': self._cursor.state(), 'totals': self._tally.totals()}

  async def close(self) -> None:
    """Cancels what is in flight, waits until every session is released, and ends waiting calls."""
    self._closed = True
    self._changed.set()
    for task in self._running:
      if not task.cancelling():  # a second cancel would break into its clean-up
        task.cancel()
    if self._running:
      await asyncio.wait(self._running)  # which, unlike gather, hands no cancel on

  def _pump(self) -> None:
    """Starts groups while the bounds allow it."""
    while not self._closed and self._error is None and self._backlog.room:
      prompt = self._backlog.start()
      key = functools.partial(self._key, prompt)
      task = asyncio.ensure_future(self._runner.run(prompt, key=key, replica=None))
      self._running.add(task)
      task.add_done_callback(functools.partial(self._end, prompt))

  def _key(self, prompt: PromptRef, member: int) -> Any:
    return session_key(seed=self._settings.seed, group=prompt.group, member=member)

  def _end(self, prompt: PromptRef, task: asyncio.Task[Group | None]) -> None:
    """Takes in a group that ended, whatever way."""
    self._running.discard(task)
    if task.cancelled():
      if not self._closed:
        self._error = self._error or RolloutError(f'group {prompt.group} was cancelled')
    elif (error := task.exception()) is not None:
      self._error = self._error or error
    else:
      self._backlog.end(prompt, task.result())
    self._pump()
    self._changed.set()

  def _take(self, update: int) -> list[Fit] | None:
    """Returns a batch's groups with their staleness, or None while there are too few.

    Raises what a background task raised, or RolloutError once closed.
    """
    if self._error is not None:
      raise self._error
    if self._closed:
      raise RolloutError('the rollouts were closed')
    try:
      ready = self._backlog.take(update)
    except RolloutError as error:
      self._error = error
      raise
    if ready is None:
      self._pump()  # in place of those that were dropped
    return ready
