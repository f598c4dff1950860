"""Where a training loop gets its batches: groups sampled beside training, or in step with it."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mimo import keys
from mimo.fleet import routing
from mimo.rollouts.backlog import Backlog, Fit
from mimo.rollouts.base import Batch, Pacing, RolloutError, RolloutSettings
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.groups import GroupRunner
from mimo.rollouts.tally import Tally
from mimo.samplers.base import PinnableSampler
from mimo.tasks.base import Task
from mimo.types import Group, PromptRef, Version


class RolloutSource:
  """Gives one batch per update. Its sessions run on the event loop, and its clock is the loop's.

  With `Pacing.pin_lag` None, groups are in flight all the time from the first `batch` on, each
  member at the least-loaded replica; a batch holds those that ended first.

  With a `pin_lag` n, sampling runs only while a batch is awaited. The batch of update u is drawn
  wholly by the weights of update max(0, u - n), and each member's replica is a hash of its numbers:
  the batch is a function of the seed and of the weights, never of the clock, as long as samplers
  draw from their keys alone and no member is lost to the clock. A member that is tried again has
  the same key and replica, so an attempt lost in passing leaves no trace in the batch.

  Either way the groups of a batch are in the order of their numbers.
  """

  def __init__(
    self,
    task: Task,
    samplers: Sequence[PinnableSampler],
    settings: RolloutSettings,
    *,
    pacing: Pacing,
    update_of: Mapping[int, int],
    version_of: Mapping[int, Version],
    state: Mapping[str, Any] | None = None,
  ) -> None:
    """Opens a source.

    Args:
      task: where prompts and rewards come from.
      samplers: started ones, one per replica, in an order that never changes.
      settings: of groups and episodes.
      pacing: how sampling keeps step with training.
      update_of: publication number -> updates applied to its weights, of the publications of this
        run's history. It is read when a batch is handed out, so its owner adds to it at each
        publication; tokens of a version that is not in it are of an abandoned one.
      version_of: updates -> the publication of their weights, which samplers are pinned to.
      state: what `state` of an earlier source returned.
    """
    self._samplers = tuple(samplers)
    self._settings = settings
    self._pacing = pacing
    self._version_of = version_of
    self._tally = Tally([s.contract.source.pool for s in samplers], state and state['totals'])
    self._runner = GroupRunner(task, samplers, settings, self._tally)
    self._table = routing.table(self._runner.seats.capacity)
    self._cursor = Cursor(
      split=settings.split,
      size=task.size(settings.split),
      seed=settings.seed,
      state=state and state['cursor'],
    )
    self._backlog = Backlog(
      settings, pacing, cursor=self._cursor, tally=self._tally, update_of=update_of
    )
    self._running: dict[asyncio.Task[Group | None], PromptRef] = {}
    self._changed = asyncio.Event()
    self._pinned: int | None = None
    self._sampling = False  # whether groups may start, and one that is cancelled is a failure
    self._closed = False
    self._error: BaseException | None = None
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
    """Waits until enough groups are ready and hands them out. A cancelled call loses none.

    Args:
      update: updates applied to the trainer's weights so far.

    Raises:
      RolloutError: sampling cannot go on, a sampler did not keep to the version that it was pinned
        to, or the source was closed. What a background task raised is raised here as it was.
    """
    clock = asyncio.get_running_loop().time
    asked = clock()
    since = asked if self._handed_out_at is None else self._handed_out_at
    ready = await self._gather(update)
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
    """Returns a JSON object from which a new source goes on.

    Every batch handed out counts as trained on, so it is taken between an update and the next
    batch; prompts handed to samplers and not yet trained on or dropped are sampled again.
    """
    return {'cursor': self._cursor.state(), 'totals': self._tally.totals()}

  async def close(self) -> None:
    """Cancels what is in flight, waits until every session is released, and ends waiting calls.

    May be called more than once.
    """
    self._closed = True
    self._changed.set()
    await self._stop()

  async def _gather(self, update: int) -> list[Fit]:
    """Returns a batch's groups with their staleness, in the order of their numbers."""
    beside = self._pacing.pin_lag is None
    if not beside:
      await self._stop()  # what a cancelled call may have left
      await self._pin(update)
    self._sampling = not self._closed
    self._pump()
    try:
      # Nothing is awaited from the last check to the hand-out.
      while (ready := self._take(update)) is None:
        self._changed.clear()
        await self._changed.wait()
    except BaseException:
      if not beside:
        try:
          await self._stop()
        finally:
          self._backlog.restart()
      raise
    self._sampling = beside
    self._pump()
    return sorted(ready, key=lambda fit: fit[0].prompt.group)

  async def _pin(self, update: int) -> None:
    """Holds every sampler at the version that the batch of `update` is drawn by."""
    assert self._pacing.pin_lag is not None
    held = max(0, update - self._pacing.pin_lag)
    version = self._version_of.get(held)
    if version is None:
      raise RolloutError(f'no publication of update {held} is known; expected one to draw with')
    for sampler in self._samplers:
      await sampler.pin(version)
    self._pinned = version.number

  def _pump(self) -> None:
    """Starts groups while the bounds allow it."""
    while self._sampling and self._error is None and self._backlog.room:
      prompt = self._backlog.start()
      numbers = {'seed': self._settings.seed, 'group': prompt.group}
      key = functools.partial(_key, **numbers)
      beside = self._pacing.pin_lag is None
      replica = None if beside else functools.partial(_replica, self._table, **numbers)
      task = asyncio.ensure_future(self._runner.run(prompt, key=key, replica=replica))
      self._running[task] = prompt
      task.add_done_callback(self._end)

  def _end(self, task: asyncio.Task[Group | None]) -> None:
    """Takes in a group that ended, whatever way."""
    prompt = self._running.pop(task)
    error = None if task.cancelled() else task.exception()
    if not self._sampling:
      return  # it was stopped, and its prompt is still outstanding
    if task.cancelled():
      self._error = self._error or RolloutError(f'group {prompt.group} was cancelled')
    elif error is not None:
      self._error = self._error or error
    else:
      group = task.result()
      self._error = self._error or self._stray(group)
      self._backlog.end(prompt, group)
    self._pump()
    self._changed.set()

  def _stray(self, group: Group | None) -> RolloutError | None:
    """Returns an error where a token was not drawn by the version that is pinned."""
    if self._pinned is None or group is None:
      return None
    for trajectory in group.trajectories:
      drawn = {int(version) for version in trajectory.versions()}
      if drawn - {self._pinned}:
        return RolloutError(
          f'pool {trajectory.source.pool} sampled by versions {sorted(drawn)}; expected '
          f'{self._pinned}, which is pinned'
        )
    return None

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

  async def _stop(self) -> None:
    """Cancels what is in flight and waits until every session is released."""
    self._sampling = False
    for task in self._running:
      if not task.cancelling():  # a second cancel would break into its clean-up
        task.cancel()
    if self._running:
      await asyncio.wait(self._running)  # which, unlike gather, hands no cancel on


def _key(member: int, *, seed: int, group: int) -> np.ndarray:
  return keys.key('session', seed, group, member)


def _replica(table: Sequence[int], member: int, *, seed: int, group: int) -> int:
  return routing.fixed(table, seed=seed, group=group, member=member)
