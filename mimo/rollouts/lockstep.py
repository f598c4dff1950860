"""Sampling in step with training: no threads, and a pure function of the seed.

Update u trains on groups sampled wholly by the weights of update max(0, u - lag), so every token is
u - max(0, u - lag) updates stale. Nothing runs between two batches. What is sampled depends on
(seed, group, member) and on weights, never on the clock, as long as no attempt is lost to
the wall clock and samplers draw from their keys alone. A retry uses the same key on the same
replica, so an attempt lost in passing leaves no trace in the batch.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mimo.fleet import routing
from mimo.rollouts import versions
from mimo.rollouts.base import Batch, RolloutError, RolloutSettings
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.groups import GroupRunner, together
from mimo.rollouts.keys import session_key
from mimo.rollouts.tally import Tally
from mimo.samplers.base import Sampler
from mimo.tasks.base import Task
from mimo.types import Group, PromptRef

# Makes every sampler serve the weights of one update of this run's history, and returns their
# publication number once they do.
Pin = Callable[[int], Awaitable[int]]


class LockstepRollouts:
  """A RolloutSource that samples a batch when it is asked for one.

  Groups are handed out in the order of their numbers. Where one is dropped, the next prompts take
  its place.
  """

  def __init__(
    self,
    task: Task,
    samplers: Sequence[Sampler],
    settings: RolloutSettings,
    *,
    lag: int,
    pin: Pin,
    state: Mapping[str, Any] | None = None,
  ) -> None:
    """Opens a source.

    Args:
      task: where prompts and rewards come from.
      samplers: started ones, one per replica, in an order that never changes.
      settings: of groups and episodes.
      lag: how many updates behind the trainer the samplers are.
      pin: makes the samplers serve an update's weights.
      state: what `state` of an earlier source returned.
    """
    if lag < 0:
      raise ValueError(f'lag is {lag}; expected a number >= 0')
    self._settings = settings
    self._lag = lag
    self._pin = pin
    self._tally = Tally([s.contract.source.pool for s in samplers], state and state['totals'])
    self._runner = GroupRunner(task, samplers, settings, self._tally)
    self._table = routing.table(self._runner.seats.capacity)
    self._cursor = Cursor(
      split=settings.split,
      size=task.size(settings.split),
      seed=settings.seed,
      state=state and state['cursor'],
    )
    self._handed_out_at: float | None = None

  async def batch(self, update: int) -> Batch:
    """Pins the version, samples the groups and hands them out.

    Raises RolloutError when a sampler did not keep to the version pinned.
    """
    clock = asyncio.get_running_loop().time
    asked = clock()
    held = max(0, update - self._lag)
    number = await self._pin(held)
    groups = await self._sample()
    staleness = []
    for trajectory in (t for group in groups for t in group.trajectories):
      ranges = versions.stale_ranges(trajectory, update, {number: held})
      if ranges is None:
        raise RolloutError(
          f'pool {trajectory.source.pool} sampled by versions '
          f'{sorted({int(v) for v in trajectory.versions()})}; expected {number}, which is pinned'
        )
      staleness.append(ranges)
    for group in groups:
      self._cursor.done(group.prompt.group)
    since = asked if self._handed_out_at is None else self._handed_out_at
    self._handed_out_at = clock()
    stats = self._tally.drain(
      groups,
      staleness,
      secs=self._handed_out_at - since,
      wait_secs=self._handed_out_at - asked,
      in_flight=0,
      buffered=0,
    )
    return Batch(update, tuple(groups), tuple(staleness), stats)

  def state(self) -> dict[str, Any]:
    """Returns the cursor and the counts; see RolloutSource."""
    return {'cursor': self._cursor.state(), 'totals': self._tally.totals()}

  async def close(self) -> None:
    """Does nothing: nothing runs between two batches."""

  async def _sample(self) -> list[Group]:
    """Returns a batch's groups, by number."""
    groups: list[Group] = []
    taken: list[PromptRef] = []
    try:
      while (missing := self._settings.groups - len(groups)) > 0:
        prompts = [self._cursor.take() for _ in range(missing)]
        taken += prompts
        results = await together(self._group(prompt) for prompt in prompts)
        for prompt, group in zip(prompts, results, strict=True):
          if group is None:
            self._cursor.done(prompt.group)
          else:
            groups.append(group)
    except BaseException:
      self._cursor.requeue(prompt.group for prompt in taken)
      raise
    return groups

  async def _group(self, prompt: PromptRef) -> Group | None:
    where = {'seed': self._settings.seed, 'group': prompt.group}
    key = functools.partial(_key, **where)
    replica = functools.partial(_replica, self._table, **where)
    return await self._runner.run(prompt, key=key, replica=replica)


def _key(member: int, *, seed: int, group: int) -> Any:
  return session_key(seed=seed, group=group, member=member)


def _replica(table: Sequence[int], member: int, *, seed: int, group: int) -> int:
  return routing.fixed(table, seed=seed, group=group, member=member)
