"""Back-pressure: how many groups may be under way, and which of those that ended are trained on."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

from mimo.rollouts import versions
from mimo.rollouts.base import Pacing, RolloutError, RolloutSettings, StaleRange
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.groups import MIN_MEMBERS
from mimo.rollouts.tally import Tally
from mimo.types import Group, PromptRef, Trajectory

Ranges = tuple[StaleRange, ...]
Fit = tuple[Group, list[Ranges]]  # a group, and one entry per trajectory of it


class Backlog:
  """Counts groups under way, and keeps those that ended until a batch takes them, oldest first.

  Its owner samples: it calls `start` for a prompt while there is `room`, and `end` for it later.
  """

  def __init__(
    self,
    settings: RolloutSettings,
    pacing: Pacing,
    *,
    cursor: Cursor,
    tally: Tally,
    update_of: Mapping[int, int],
  ) -> None:
    """Opens an empty one.

    Args:
      settings: of groups.
      pacing: of back-pressure.
      cursor: where prompts come from.
      tally: counts what is dropped.
      update_of: publication number -> updates applied to its weights, of this run's history.
    """
    groups = self._groups = settings.options.prompts_per_update
    self._cursor = cursor
    self._tally = tally
    self._update_of = update_of
    self._max_staleness = settings.options.max_staleness_updates
    self._max_in_flight = max(1, math.floor(pacing.in_flight * groups))
    self._max_buffered = math.floor(pacing.buffered * groups)
    self._running = 0
    self._ended: collections.deque[Group] = collections.deque()
    self._fitted = 0  # the first of them that were found fit, and wait for the rest of a batch
    self._dropped_in_a_row = 0
    self._why_dropped: collections.Counter[str] = collections.Counter()
    # What was sampled before an update may be too old after it, and no more than that is buffered
    # or in flight; when a further batch is dropped, what is sampled now is no better.
    self._max_dropped = self._max_in_flight + self._max_buffered + max(groups, 4)

  @property
  def in_flight(self) -> int:
    """Groups being sampled, and those that ended and find the buffer full."""
    return self._running + max(0, len(self._ended) - self._max_buffered)

  @property
  def buffered(self) -> int:
    """Groups that ended and are not yet handed out."""
    return min(len(self._ended), self._max_buffered)

  @property
  def room(self) -> bool:
    """Whether another group may be started."""
    return self.in_flight < self._max_in_flight

  def start(self) -> PromptRef:
    """Returns the next prompt, which is in flight from now on."""
    self._running += 1
    return self._cursor.take()

  def end(self, prompt: PromptRef, group: Group | None) -> None:
    """Takes in a group that ended; None where too little of it is left, which is counted."""
    self._running -= 1
    if group is None:
      self._cursor.done(prompt.group)
    else:
      self._ended.append(group)

  def take(self, update: int) -> list[Fit] | None:
    """Returns a batch's groups with their staleness, or None while there are too few.

    What is not fit to train on at `update` is dropped and counted. Raises RolloutError when nothing
    else comes.
    """
    ready: list[Fit] = []
    while (
      self._ended and len(ready) < self._groups and len(ready) + len(self._ended) >= self._groups
    ):
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
    if len(ready) == self._groups:
      for group, _ in ready:
        self._cursor.done(group.prompt.group)
      return ready
    self._ended.extendleft(group for group, _ in reversed(ready))
    self._fitted += len(ready)
    return None

  def restart(self) -> None:
    """Forgets what is under way; its prompts are the next to be started."""
    self._running = self._fitted = 0
    self._ended.clear()
    self._cursor.requeue()

  def _drop(self, group: Group) -> None:
    """Counts a group that is not trained on."""
    self._tally.count('groups_dropped')
    self._cursor.done(group.prompt.group)
    self._dropped_in_a_row += 1
    if self._dropped_in_a_row >= self._max_dropped:
      why = '; '.join(f'{reason}: {n} times' for reason, n in self._why_dropped.most_common(8))
      raise RolloutError(
        f'{self._dropped_in_a_row} groups were dropped one after another, for having fewer than '
        f'{MIN_MEMBERS} members that may be trained on; expected sampling to go on. {why}'
      )

  def _fit(self, group: Group, update: int) -> Fit | None:
    """Returns what of a group may be trained on now, or None when that is too little."""
    kept: list[Trajectory] = []
    parts: list[Ranges] = []
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

  def _too_stale(self, ranges: Ranges) -> bool:
    bound = self._max_staleness
    return bound is not None and max(part.updates for part in ranges) > bound
