"""Sampling that overlaps the update: groups in flight all the time, bounded by back-pressure."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mimo.rollouts import versions
from mimo.rollouts.base import Batch, RolloutError, RolloutSettings, StaleRange
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.groups import MIN_MEMBERS, GroupRunner
from mimo.rollouts.keys import session_key
from mimo.rollouts.tally import Tally
from mimo.samplers.base import Sampler
from mimo.tasks.base import Task
from mimo.types import Group, PromptRef, Trajectory

_Ranges = tuple[StaleRange, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AsyncLimits:
  """How far sampling may run ahead of training.

  Attributes:
    in_flight_batches: groups being sampled, in batches.
    buffered_batches: groups sampled and not yet trained on, in batches. What ends when the buffer
      is full stays in flight, in the way of new groups.
    max_staleness_updates: trajectories with a staler token are dropped and counted as they would
      be trained on; None drops none.
  """

  in_flight_batches: float = 1.3
  buffered_batches: float = 2.0
  max_staleness_updates: int | None = None

  def __post_init__(self) -> None:
    if not 0.0 < self.in_flight_batches < math.inf:
      raise ValueError(f'in_flight_batches is {self.in_flight_batches}; expected a number > 0')
    if not 1.0 <= self.buffered_batches < math.inf:
      raise ValueError(f'buffered_batches is {self.buffered_batches}; expected a number >= 1')
    if self.max_staleness_updates is not None and self.max_staleness_updates < 0:
      raise ValueError(
        f'max_staleness_updates is {self.max_staleness_updates}; expected a number >= 0 or None'
      )


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
    groups = settings.groups
    self._settings = settings
    self._update_of = update_of
    self._max_staleness = limits.max_staleness_updates
    self._max_in_flight = max(1, math.floor(limits.in_flight_batches * groups))
    self._max_buffered = math.floor(limits.buffered_batches * groups)
    self._tally = Tally([s.contract.source.pool for s in samplers], state and state['totals'])
    self._runner = GroupRunner(task, samplers, settings, self._tally)
    self._cursor = Cursor(
      split=settings.split,
      size=task.size(settings.split),
      seed=settings.seed,
      state=state and state['cursor'],
    )
    self._running: set[asyncio.Task[Group | None]] = set()
    self._ended: collections.deque[Group] = collections.deque()
    self._fitted = 0  # the first of them that were found fit, and wait for the rest of a batch
    self._dropped_in_a_row = 0
    self._why_dropped: collections.Counter[str] = collections.Counter()
    # What was sampled before an update may be too old after it, and no more than that is buffered
    # or in flight; when a further batch is dropped, what is sampled now is no better.
    self._max_dropped = self._max_in_flight + self._max_buffered + max(groups, 4)
    self._changed = asyncio.Event()
    self._error: BaseException | None = None
    self._closed = False
    self._handed_out_at: float | None = None

  @property
  def in_flight(self) -> int:
    """Groups being sampled, and those that ended and find the buffer full."""
    return len(self._running) + max(0, len(self._ended) - self._max_buffered)

  @property
  def buffered(self) -> int:
    """Groups that ended and are not yet handed out."""
    return min(len(self._ended), self._max_buffered)

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
    for group, _ in ready:
      self._cursor.done(group.prompt.group)
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
    while not self._closed and self._error is None and self.in_flight < self._max_in_flight:
      prompt = self._cursor.take()
      key = functools.partial(self._key, prompt)
      task = asyncio.ensure_future(self._runner.run(prompt, key=key, replica=None))
      self._running.add(task)
      task.add_done_callback(functools.partial(self._end, prompt))

  def _key(self, prompt: PromptRef, member: int) -> Any:
    # Nobody knows yet which update will train on the group; its number alone tells keys apart.
    return session_key(seed=self._settings.seed, update=0, group=prompt.group, member=member)

  def _end(self, prompt: PromptRef, task: asyncio.Task[Group | None]) -> None:
    """Takes in a group that ended, whatever way."""
    self._running.discard(task)
    if task.cancelled():
      if not self._closed:
        self._error = self._error or RolloutError(f'group {prompt.group} was cancelled')
    elif (error := task.exception()) is not None:
      self._error = self._error or error
    elif (group := task.result()) is None:
      self._cursor.done(prompt.group)
    else:
      self._ended.append(group)
    self._pump()
    self._changed.set()

  def _take(self, update: int) -> list[tuple[Group, list[_Ranges]]] | None:
    """Returns a batch's groups with their staleness, or None while there are too few.

    Raises what a background task raised, or RolloutError once closed.
    """
    if self._error is not None:
      raise self._error
    if self._closed:
      raise RolloutError('the rollouts were closed')
    count = self._settings.groups
    ready: list[tuple[Group, list[_Ranges]]] = []
    while self._ended and len(ready) < count and len(ready) + len(self._ended) >= count:
      group = self._ended.popleft()
      known, self._fitted = self._fitted > 0, max(0, self._fitted - 1)
      fit = self._fit(group, update)
      if fit is None:
        self._drop(group)
        continue
      ready.append(fit)
      if not known:
        self._dropped_in_a_row = 0
        self._why_dropped.clear()
    if len(ready) == count:
      return ready
    self._ended.extendleft(group for group, _ in reversed(ready))
    self._fitted += len(ready)
    self._pump()  # in place of those that were dropped
    return None

  def _drop(self, group: Group) -> None:
    """Counts a group that is not trained on. Raises RolloutError when nothing else comes."""
    self._tally.count('groups_dropped')
    self._cursor.done(group.prompt.group)
    self._dropped_in_a_row += 1
    if self._dropped_in_a_row >= self._max_dropped:
      why = '; '.join(f'{reason}: {n} times' for reason, n in self._why_dropped.most_common(8))
      self._error = RolloutError(
        f'{self._dropped_in_a_row} groups were dropped one after another, for having fewer than '
        f'{MIN_MEMBERS} members that may be trained on; expected sampling to go on. {why}'
      )
      raise self._error

  def _fit(self, group: Group, update: int) -> tuple[Group, list[_Ranges]] | None:
    """Returns what of a group may be trained on now, or None when that is too little."""
    kept: list[Trajectory] = []
    parts: list[_Ranges] = []
    for trajectory in group.trajectories:
      pool = trajectory.source.pool
      ranges = versions.stale_ranges(trajectory, update, self._update_of)
      if ranges is None:
        self._tally.count('trajectories_abandoned')
        unknown = set(trajectory.versions().tolist()) - set(self._update_of)
        self._why_dropped[
          f'pool {pool}: drawn under publication {max(unknown)}, which is abandoned or unknown'
        ] += 1
      elif self._too_stale(ranges):
        self._tally.count('trajectories_stale')
        self._why_dropped[f'pool {pool}: staler than {self._max_staleness} updates'] += 1
      else:
        kept.append(trajectory)
        parts.append(ranges)
    if len(kept) < MIN_MEMBERS:
      return None
    return dataclasses.replace(group, trajectories=tuple(kept)), parts

  def _too_stale(self, ranges: _Ranges) -> bool:
    bound = self._max_staleness
    return bound is not None and max(part.updates for part in ranges) > bound
