"""Groups: the samples of one prompt, each routed by itself, lost ones tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from mimo.rollouts.base import RolloutError, RolloutSettings
from mimo.rollouts.seats import Seats
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.rollouts.tally import Tally
from mimo.samplers.base import Sampler
from mimo.tasks.base import Task
from mimo.types import Group, PromptRef, Trajectory

# A group teaches nothing with fewer members: its mean is its only reward.
MIN_MEMBERS = 2

_T = TypeVar('_T')


async def together(jobs: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
  """Runs jobs at the same time and returns their results in order.

  When one fails the others are cancelled and waited for, and its error is raised as it is.
  """
  tasks = [asyncio.ensure_future(job) for job in jobs]
  try:
    return list(await asyncio.gather(*tasks))
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class GroupRunner:
  """Samples groups on a fleet; owns the places at its replicas."""

  def __init__(
    self, task: Task, samplers: Sequence[Sampler], settings: RolloutSettings, tally: Tally
  ) -> None:
    self._task = task
    self._samplers = tuple(samplers)
    self._settings = settings
    self._tally = tally
    self._dropped_in_a_row = 0
    self.seats = Seats([sampler.contract.max_sessions for sampler in samplers])

  async def run(
    self,
    prompt: PromptRef,
    *,
    key: Callable[[int], np.ndarray],
    replica: Callable[[int], int] | None,
  ) -> Group | None:
    """Samples one group.

    Args:
      prompt: the task and group.
      key: member -> [2] uint32.
      replica: member -> its replica, or None where the least-loaded takes it.

    Returns:
      The group with its scored members, or None, counted, when fewer than two are left.

    Raises:
      RolloutError: as many groups as a batch holds were dropped one after another.
    """

    size = self._settings.options.group_size
    results = await together(
      self._member(prompt, member, key(member), replica and replica(member))
      for member in range(size)
    )
    scored = tuple(trajectory for trajectory in results if trajectory is not None)
    if len(scored) >= MIN_MEMBERS:
      self._dropped_in_a_row = 0
      return Group(prompt, scored, size)
    self._tally.count('groups_dropped')
    self._dropped_in_a_row += 1
    if self._dropped_in_a_row >= max(self._settings.options.prompts_per_update, 4):
      raise RolloutError(
        f'{self._dropped_in_a_row} groups were dropped one after another for having fewer than '
        f'{MIN_MEMBERS} scored members; expected sampling to go on. Some of what was said: '
        f'{"; ".join(self._tally.errors())}'
      )
    return None

  async def _member(
    self, prompt: PromptRef, member: int, key: np.ndarray, fixed: int | None
  ) -> Trajectory | None:
    """Samples one member, again where an attempt of it was lost.

    Args:
      prompt: the task and group.
      member: index in the group.
      key: [2] uint32.
      fixed: the replica of every attempt, or None where the least-loaded takes each.

    Returns:
      A scored trajectory, or None, counted, when every attempt was lost.
    """
    settings, failed = self._settings, set[int]()
    for number in range(1 + settings.options.retries):
      replica = await self.seats.take(self._allowed(failed) if fixed is None else {fixed})
      try:
        spec = EpisodeSpec(
          session=f'{settings.incarnation}/{prompt.group}/{member}/{number}',
          prompt=prompt,
          member=member,
          incarnation=settings.incarnation,
          sampling=settings.sampling,
          key=key,
          wall_clock_secs=settings.options.episode_timeout_secs,
        )
        attempt = await run_episode(self._task, self._samplers[replica], spec)
      finally:
        self.seats.give(replica)
      self._tally.attempt(attempt, retry=number > 0)
      if attempt.error is None:
        return attempt.trajectory
      failed.add(replica)
    self._tally.count('members_lost')
    return None

  def _allowed(self, failed: Collection[int]) -> Collection[int]:
    """Replicas that have not lost this member yet, or all where each has."""
    everyone = range(len(self._samplers))
    return [r for r in everyone if r not in failed] or everyone
