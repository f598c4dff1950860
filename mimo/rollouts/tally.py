"""Counts what happens between two batches, and over the run."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

from mimo.rollouts.base import PoolStats, RolloutStats, StaleRange
from mimo.rollouts.session import Attempt
from mimo.types import EpisodeEnd, FinishReason, Group

# What lost attempts said, per batch: enough to see what is wrong, however many are lost.
_ERRORS_KEPT = 8


@dataclasses.dataclass(slots=True)
class _PoolCounts:
  episodes: int = 0
  lost: int = 0
  turns: int = 0
  sampled_tokens: int = 0
  tokens: int = 0


class _Interval:
  """Counts since the previous batch."""

  def __init__(self, pools: Sequence[str]) -> None:
    self.pools = {name: _PoolCounts() for name in pools}
    self.ends: collections.Counter[EpisodeEnd] = collections.Counter()
    self.finishes: collections.Counter[FinishReason] = collections.Counter()
    self.failures: collections.Counter[str] = collections.Counter()
    self.counts: collections.Counter[str] = collections.Counter()
    self.errors: list[str] = []
    self.response_tokens: list[int] = []
    self.lost_tokens: list[int] = []


class Tally:
  """Counts events; `drain` turns those since the last one into a batch's stats.

  It keeps numbers, never trajectories, so what is lost or dropped is freed at once.
  """

  def __init__(self, pools: Sequence[str], totals: Mapping[str, int] | None = None) -> None:
    self._pools = sorted(set(pools))
    self._interval = _Interval(self._pools)
    self._totals = collections.Counter(totals or {})

  def attempt(self, attempt: Attempt, *, retry: bool) -> None:
    """Counts an attempt that ended, scored or lost."""
    trajectory, now = attempt.trajectory, self._interval
    name = trajectory.source.pool
    pool = now.pools[name]
    pool.episodes += 1
    pool.turns += len(trajectory.turns)
    pool.sampled_tokens += trajectory.num_sampled
    pool.tokens += len(trajectory.tokens)
    now.ends[trajectory.end] += 1
    now.finishes.update(turn.finish for turn in trajectory.turns)
    self.count('episodes')
    if retry:
      self.count('retries')
    if attempt.error is None:
      now.response_tokens.append(trajectory.num_sampled)
    else:
      pool.lost += 1
      now.lost_tokens.append(trajectory.num_sampled)
      now.failures[f'{name}: {trajectory.end.value}'] += 1
      self.count('lost')
      self._note(f'{name}: {trajectory.end.value}: {attempt.error}')
    for error in attempt.cleanup_errors:
      self.count('cleanups_failed')
      self._note(f'{name}: {error}')

  def count(self, name: str, by: int = 1) -> None:
    """Counts `by` more of something that has no details."""
    self._interval.counts[name] += by
    self._totals[name] += by

  def errors(self) -> tuple[str, ...]:
    """Returns some of what lost attempts said since the last batch."""
    return tuple(self._interval.errors)

  def totals(self) -> dict[str, int]:
    """Returns counts over the run, earlier starts included: a JSON object."""
    return dict(sorted(self._totals.items()))

  def drain(
    self,
    groups: Sequence[Group],
    staleness: Sequence[Sequence[StaleRange]],
    *,
    secs: float,
    wait_secs: float,
    in_flight: int,
    buffered: int,
  ) -> RolloutStats:
    """Returns the stats of a batch and starts counting anew."""
    now, self._interval = self._interval, _Interval(self._pools)
    stale: collections.Counter[int] = collections.Counter()
    for ranges in staleness:
      for part in ranges:
        stale[part.updates] += part.end - part.start
    self._totals['groups_trained'] += len(groups)
    return RolloutStats(
      secs=secs,
      wait_secs=wait_secs,
      pools={name: PoolStats(**dataclasses.asdict(pool)) for name, pool in now.pools.items()},
      ends=dict(now.ends),
      finishes=dict(now.finishes),
      failures=dict(now.failures),
      errors=tuple(now.errors),
      retries=now.counts['retries'],
      members_lost=now.counts['members_lost'],
      groups_dropped=now.counts['groups_dropped'],
      trajectories_stale=now.counts['trajectories_stale'],
      trajectories_abandoned=now.counts['trajectories_abandoned'],
      cleanups_failed=now.counts['cleanups_failed'],
      response_tokens=tuple(now.response_tokens),
      lost_tokens=tuple(now.lost_tokens),
      rewards=tuple(t.reward for group in groups for t in group.trajectories),
      staleness=dict(sorted(stale.items())),
      in_flight=in_flight,
      buffered=buffered,
    )

  def _note(self, error: str) -> None:
    if len(self._interval.errors) < _ERRORS_KEPT:
      self._interval.errors.append(error[:300])
