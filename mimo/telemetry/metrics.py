"""What one update is told of, as a flat dict of named scalars and a few histograms.

`mimo.telemetry.names` says how scalars are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mimo.telemetry.writers import Histogram
from mimo.types import EpisodeEnd, FinishReason, Group, Trajectory

# Bin edges. Staleness is counted in updates, one bin for each of 0..15 and one beyond.
STALENESS_EDGES = (*range(17), 1024)
LENGTH_EDGES = (0, *(2**i for i in range(19)))

# Ranges of a trajectory's tokens: (start, end, updates behind the trainer).
StaleRanges = Sequence[tuple[int, int, int]]


def flatten(prefix: str, tree: Mapping[str, Any]) -> dict[str, float]:
  """Returns the numbers of a nested dict by path, `prefix/key/...`.

  Raises ValueError for a leaf that isn't one number.
  """
  out: dict[str, float] = {}
  for key, value in tree.items():
    name = f'{prefix}/{key}' if prefix else str(key)
    if isinstance(value, Mapping):
      out |= flatten(name, value)
    elif np.ndim(value) == 0 and np.isrealobj(value) and not isinstance(value, str | bytes):
      out[name] = float(value)
    else:
      raise ValueError(f'{name} is {value!r:.60}; expected a number or a dict of numbers')
  return out


def batch_metrics(
  groups: Sequence[Group], staleness: Sequence[StaleRanges]
) -> tuple[dict[str, float], dict[str, Histogram]]:
  """What the episodes of one batch say, over all and by source.

  Args:
    groups: the batch.
    staleness: one entry per trajectory, in order: its sampled token ranges.

  Returns:
    (scalars, histograms): under `rollout/` and `source/<pool>/`; rewards, solved share, response
    lengths, ends and finish reasons as shares, staleness in updates; group counts.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  pairs = list(zip(trajectories, staleness, strict=True))
  scalars = _episodes('rollout', pairs)
  for pool in sorted({t.source.pool for t in trajectories}):
    scalars |= _episodes(f'source/{pool}', [pair for pair in pairs if pair[0].source.pool == pool])
  scalars['rollout/groups'] = float(len(groups))
  scalars['rollout/groups_equal'] = float(
    sum(len({t.reward for t in group.trajectories}) <= 1 for group in groups)
  )
  scalars['rollout/members_missing'] = float(
    sum(group.asked - len(group.trajectories) for group in groups)
  )
  histograms = {
    'rollout/staleness_updates': Histogram.of(_stale_tokens(staleness), STALENESS_EDGES),
    'rollout/response_tokens': Histogram.of(
      np.array([t.num_sampled for t in trajectories]), LENGTH_EDGES
    ),
  }
  return scalars, histograms


def rollout_metrics(stats: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Histogram]]:
  """What sampling did between two batches, lost attempts included.

  Args:
    stats: the rollout stats as a dict: numbers, dicts of numbers, `pools` by name, and tuples, of
      which the lengths of scored and lost responses are counted and the rest is left out.

  Returns:
    (scalars, histograms): under `sampling/`, and `source/<pool>/sampling/` for a pool's.
  """
  scalars: dict[str, float] = {}
  for name, value in stats.items():
    if name == 'pools':
      for pool, counts in value.items():
        scalars |= flatten(f'source/{pool}/sampling', counts)
    elif name != 'staleness' and not isinstance(value, tuple):
      scalars |= flatten('sampling', {name: value})
  histograms = {
    f'sampling/{name}': Histogram.of(np.asarray(stats[name], np.float64), LENGTH_EDGES)
    for name in ('response_tokens', 'lost_tokens')
  }
  return scalars, histograms


def _episodes(prefix: str, pairs: Sequence[tuple[Trajectory, StaleRanges]]) -> dict[str, float]:
  """Returns the scalars of some episodes."""
  trajectories = [trajectory for trajectory, _ in pairs]
  count = len(trajectories)
  rewards = np.array([t.reward for t in trajectories], np.float64)
  turns = [turn for t in trajectories for turn in t.turns]
  tokens = sum(t.num_sampled for t in trajectories)
  stale = _stale_tokens([ranges for _, ranges in pairs])
  out = {
    'episodes': float(count),
    'turns': float(len(turns)),
    'tokens_sampled': float(tokens),
    'tokens_total': float(sum(len(t.tokens) for t in trajectories)),
    'reward': _ratio(rewards.sum(), count),
    'pass@1': _ratio(float((rewards >= 1.0).sum()), count),
    'response_tokens': _ratio(tokens, count),
    'staleness_mean_updates': _ratio(stale.sum(), len(stale)),
    'staleness_max_updates': float(stale.max()) if len(stale) else math.nan,
    # Publications that drew an episode, and turns that more than one drew.
    'versions_per_episode': _ratio(
      sum(len({span.version for turn in t.turns for span in turn.spans}) for t in trajectories),
      count,
    ),
    'turns_spanning_versions': _ratio(sum(len(turn.spans) > 1 for turn in turns), len(turns)),
  }
  for end in EpisodeEnd:
    if end.scored:
      out[f'end/{end}'] = _ratio(sum(t.end is end for t in trajectories), count)
  for finish in FinishReason:
    out[f'finish/{finish}'] = _ratio(sum(turn.finish is finish for turn in turns), len(turns))
  return {f'{prefix}/{name}': value for name, value in out.items()}


def _stale_tokens(staleness: Sequence[StaleRanges]) -> np.ndarray:
  """Returns the staleness of each sampled token, [S] int64."""
  ranges = np.array([part for parts in staleness for part in parts], np.int64).reshape(-1, 3)
  return np.repeat(ranges[:, 2], ranges[:, 1] - ranges[:, 0])


def _ratio(total: float, count: float) -> float:
  return float(total) / float(count) if count else math.nan
