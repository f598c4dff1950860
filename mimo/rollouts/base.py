"""The rollout port: where a training loop gets its batches, and what a batch says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from mimo.types import EpisodeEnd, FinishReason, Group, SamplingParams, Trajectory


class RolloutError(Exception):
  """Sampling cannot go on, or the source was closed while a batch was awaited."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutSettings:
  """What every way of sampling needs to know.

  Attributes:
    groups: groups in a batch, one prompt each.
    members: samples asked for per prompt.
    sampling: how tokens are drawn.
    seed: of the prompt order and the session keys.
    incarnation: which start of the run this is, from 0.
    split: the task's split that prompts come from.
    wall_clock_secs: how long an episode may take once it has a place at a sampler; None is no
      bound.
    retries: how often a member whose attempt was lost is tried again.
  """

  groups: int
  members: int
  sampling: SamplingParams
  seed: int
  incarnation: int
  split: str
  wall_clock_secs: float | None
  retries: int = 2

  def __post_init__(self) -> None:
    if self.groups < 1:
      raise ValueError(f'groups is {self.groups}; expected at least 1')
    if self.members < 2:
      raise ValueError(f'members is {self.members}; expected at least 2: one has no mean')
    if self.seed < 0:
      raise ValueError(f'seed is {self.seed}; expected a number >= 0')
    if self.wall_clock_secs is not None and not self.wall_clock_secs > 0:
      raise ValueError(f'wall_clock_secs is {self.wall_clock_secs}; expected a number > 0 or None')
    if self.retries < 0:
      raise ValueError(f'retries is {self.retries}; expected a number >= 0')


class StaleRange(NamedTuple):
  """Tokens `[start, end)` of a trajectory come from weights `updates` behind the trainer's."""

  start: int
  end: int
  updates: int


@dataclasses.dataclass(frozen=True, slots=True)
class PoolStats:
  """What one pool did between two batches, lost attempts included: all of it costs.

  Attributes:
    episodes: attempts that ended.
    lost: those of them that are not scored.
    turns: turns sampled.
    sampled_tokens: tokens drawn.
    tokens: tokens of the episodes, prompts and observations included.
  """

  episodes: int
  lost: int
  turns: int
  sampled_tokens: int
  tokens: int


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutStats:
  """What happened between two batches, and what the batch holds.

  The first part counts everything that ended since the previous batch was handed out, whichever
  batch it is trained in, so that sums over batches leave nothing out and count nothing twice.

  Attributes:
    secs: since the previous batch was handed out, or since the first was asked for.
    wait_secs: how long this batch was waited for.
    pools: by pool name.
    ends: attempts by end.
    finishes: turns by finish reason.
    failures: lost attempts by pool and end, such as 'h100_fp8: wall_clock'.
    errors: some of what the lost attempts said.
    retries: attempts after a member's first.
    members_lost: members whose last attempt was lost too.
    groups_dropped: groups with fewer than two members left, for whatever reason.
    trajectories_stale: dropped for being staler than the bound.
    trajectories_abandoned: dropped for holding tokens of an abandoned or unknown publication.
    cleanups_failed: sessions or episodes whose release failed or took too long.
    response_tokens: sampled tokens of each scored attempt.
    lost_tokens: sampled tokens of each lost attempt, at its loss.

    rewards: of the batch's trajectories, in order.
    staleness: sampled tokens of the batch by staleness in updates.
    in_flight: groups in flight as the batch was handed out.
    buffered: groups that stay buffered.
  """

  secs: float
  wait_secs: float
  pools: Mapping[str, PoolStats]
  ends: Mapping[EpisodeEnd, int]
  finishes: Mapping[FinishReason, int]
  failures: Mapping[str, int]
  errors: tuple[str, ...]
  retries: int
  members_lost: int
  groups_dropped: int
  trajectories_stale: int
  trajectories_abandoned: int
  cleanups_failed: int
  response_tokens: tuple[int, ...]
  lost_tokens: tuple[int, ...]
  rewards: tuple[float, ...]
  staleness: Mapping[int, int]
  in_flight: int
  buffered: int

  @property
  def sampled_tokens_per_sec(self) -> float:
    """Tokens drawn per second over all pools; 0.0 where no time passed."""
    drawn = sum(pool.sampled_tokens for pool in self.pools.values())
    return drawn / self.secs if self.secs > 0 else 0.0

  def turns(self) -> dict[str, int]:
    """Returns turns sampled by pool: what the cost of sampling is counted from."""
    return {name: pool.turns for name, pool in self.pools.items()}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
  """The groups of one update.

  Attributes:
    update: updates applied to the trainer's weights as the batch is trained on.
    groups: in the order in which they are trained on. A group whose rewards are all equal is one
      of them: its advantages are zero, and its tokens count.
    staleness: one entry per trajectory, in order: its sampled token ranges.
    stats: counts.
  """

  update: int
  groups: tuple[Group, ...]
  staleness: tuple[tuple[StaleRange, ...], ...]
  stats: RolloutStats

  @property
  def trajectories(self) -> tuple[Trajectory, ...]:
    return tuple(t for group in self.groups for t in group.trajectories)


class RolloutSource(Protocol):
  """Gives one batch per update."""

  async def batch(self, update: int) -> Batch:
    """Waits until enough groups are ready and hands them out.

    Args:
      update: updates applied to the trainer's weights so far.

    Raises:
      RolloutError: sampling cannot go on. What a background task raised is raised here as it was.
    """

  def state(self) -> dict[str, Any]:
    """Returns a JSON object from which a new source goes on.

    Every batch handed out counts as trained on, so it is taken between an update and the next
    batch; prompts handed to samplers and not yet trained on or dropped are sampled again.
    """

  async def close(self) -> None:
    """Stops what runs in the background and waits for it. May be called more than once."""
