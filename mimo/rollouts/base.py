"""The rollout port: how a run samples, and what a batch says of itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from mimo import checks
from mimo.types import EpisodeEnd, FinishReason, Group, SamplingParams, Trajectory


class RolloutError(Exception):
  """Sampling cannot go on, or the source was closed while a batch was awaited."""


SCHEDULES = ('async', 'lockstep', 'simulated')

# Four months: what is longer is a slip of the hand.
_LONGEST_SECS = 1e7


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VirtualOptions:
  """How long things take in a simulated run: the section `rollouts.virtual`.

  Attributes:
    update_secs: from a batch to the weights that come of it, in virtual seconds.
    publication_secs: from an update's end until replicas serve its weights, in virtual seconds.
    answer_secs: an environment's answer to a turn that another follows, in virtual seconds.
    session_tokens_per_sec: what one session draws, however few there are, per virtual second.
    turn_tokens: tokens drawn in a turn; with a pool's turns_per_hour, what a replica draws in all.
  """

  update_secs: float = 60.0
  publication_secs: float = 30.0
  answer_secs: float = 2.0
  session_tokens_per_sec: float = 4.0
  turn_tokens: float = 6.0

  def __post_init__(self) -> None:
    for name in ('update_secs', 'publication_secs', 'answer_secs'):
      checks.number(name, getattr(self, name), least=0, most=_LONGEST_SECS)
    for name in ('session_tokens_per_sec', 'turn_tokens'):
      checks.number(name, getattr(self, name), above=0, most=1e9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
  """How a run samples: the section `rollouts`.

  Attributes:
    schedule: async, lockstep (no threads, a pure function of the seed) or simulated (that too, with
      sampling beside training on a virtual clock).
    prompts_per_update: groups in a batch, one prompt each.
    group_size: samples asked for per prompt; at least 2, since a group of one has no mean.
    in_flight_batches: groups sampled at a time, in batches; not in lockstep.
    buffered_batches: groups sampled and not yet trained on, in batches; not in lockstep. What ends
      when the buffer is full stays in flight, in the way of new groups.
    max_staleness_updates: trajectories with a staler token, in updates, are dropped and counted as
      they would be trained on; None drops none.
    lag_updates: how many updates the samplers are behind the trainer; lockstep only.
    episode_timeout_secs: how long an episode may take once it has a place at a sampler, in seconds
      of the run's clock; the first ones wait for compilation.
    retries: how often a member whose attempt was lost is tried again.
    virtual: how long things take; simulated only.
  """

  schedule: str = 'async'
  prompts_per_update: int = 16
  group_size: int = 8
  in_flight_batches: float = 1.3
  buffered_batches: float = 2.0
  max_staleness_updates: int | None = None
  lag_updates: int = 1
  episode_timeout_secs: float = 600.0
  retries: int = 2
  virtual: VirtualOptions = dataclasses.field(default_factory=VirtualOptions)

  def __post_init__(self) -> None:
    checks.one_of('schedule', self.schedule, SCHEDULES)
    checks.whole('prompts_per_update', self.prompts_per_update, least=1, most=2**16)
    checks.whole('group_size', self.group_size, least=2, most=2**12)
    checks.number('in_flight_batches', self.in_flight_batches, above=0, most=1000)
    checks.number('buffered_batches', self.buffered_batches, least=1, most=1000)
    if self.max_staleness_updates is not None:
      checks.whole('max_staleness_updates', self.max_staleness_updates, least=0)
    checks.whole('lag_updates', self.lag_updates, least=0, most=1000)
    checks.number('episode_timeout_secs', self.episode_timeout_secs, above=0, most=_LONGEST_SECS)
    checks.whole('retries', self.retries, least=0, most=100)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
  """How sampling keeps step with training; see `mimo.rollouts.source.RolloutSource`.

  Attributes:
    in_flight: groups being sampled at a time, in batches.
    buffered: groups that ended and wait to be trained on, in batches.
    pin_lag: None samples beside training, by whatever weights the samplers follow; n samples while
      a batch is awaited, by the weights of n updates before it.
  """

  in_flight: float
  buffered: float
  pin_lag: int | None

  def __post_init__(self) -> None:
    checks.number('in_flight', self.in_flight, above=0)
    checks.number('buffered', self.buffered, least=0)
    if max(self.in_flight, self.buffered) < 1:
      raise ValueError(
        f'in_flight is {self.in_flight} and buffered is {self.buffered}; expected 1 or more of '
        'one of them: no batch would ever be whole'
      )
    if self.pin_lag is not None:
      checks.whole('pin_lag', self.pin_lag, least=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
  """What a source needs to know beside its pacing.

  Attributes:
    options: of groups and episodes.
    sampling: how tokens are drawn.
    seed: of the prompt order and the session keys, in [0, 2**32).
    incarnation: which start of the run this is, from 0.
    split: the task's split that prompts come from.
  """

  options: RolloutOptions
  sampling: SamplingParams
  seed: int
  incarnation: int
  split: str = 'train'

  def __post_init__(self) -> None:
    checks.whole('seed', self.seed, least=0, most=2**32 - 1)


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
