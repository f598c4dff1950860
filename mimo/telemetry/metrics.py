"""What one update is told of, as a flat dict of named scalars and a few histograms.

`mimo.telemetry.names` says how scalars are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mimo.telemetry import names
from mimo.telemetry.writers import Histogram
from mimo.types import EpisodeEnd, FinishReason, Group, Trajectory

# Bin edges. Staleness is counted in updates, one bin for each of 0..15 and one beyond.
STALENESS_EDGES = (*range(17), 1024)
LENGTH_EDGES = (0, *(2**i for i in range(19)))


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


def objective_metrics(
  overall: Mapping[str, Any], by_source: Mapping[str, Any], sources: Sequence[str]
) -> dict[str, float]:
  """Names the objective's diagnostics, over all tokens and by source.

  Args:
    overall: scalars, already divided.
    by_source: the same leaves, [num_sources]; a source without tokens has nothing to say and is
      left out.
    sources: the pools' names, in the order of the leaves.

  Returns:
    `train/<leaf>` and `source/<pool>/<leaf>`, with the two masked shares added up.

  Raises:
    ValueError: a leaf has another length than `sources`.
  """
  out = flatten('train', _with_masked(overall))
  for name, leaf in by_source.items():
    if np.shape(leaf) != (len(sources),):
      raise ValueError(f'{name} has shape {np.shape(leaf)}; expected one value of each {sources}')
  for i, pool in enumerate(sources):
    if by_source[names.TOKENS][i] > 0:
      leaves = {name: leaf[i] for name, leaf in by_source.items()}
      out |= flatten(f'source/{pool}', _with_masked(leaves))
  return out


def _with_masked(leaves: Mapping[str, Any]) -> dict[str, Any]:
  low, high = leaves[names.MASKED_LOW], leaves[names.MASKED_HIGH]
  return {**leaves, names.MASKED_SHARE: low + high}


def staleness(trajectory: Trajectory, update: int, update_of: Mapping[int, int]) -> np.ndarray:
  """Returns [S] int64: how many updates behind `update` each sampled token's weights were.

  Args:
    trajectory: an episode trained on.
    update: updates applied to the trainer's weights as the batch is trained on.
    update_of: updates applied to the weights of each publication number.

  Raises:
    ValueError: a token's publication isn't in `update_of`.
  """
  versions = trajectory.versions()
  numbers, where = np.unique(versions, return_inverse=True)
  unknown = [int(n) for n in numbers if int(n) not in update_of]
  if unknown:
    raise ValueError(
      f'a trajectory of {trajectory.source.pool} was sampled by publications {unknown}; '
      f'expected some of the {len(update_of)} that this run knows'
    )
  updates = np.array([update_of[int(n)] for n in numbers], np.int64)
  return update - updates[where]


def batch_metrics(
  groups: Sequence[Group], *, update: int, update_of: Mapping[int, int]
) -> tuple[dict[str, float], dict[str, Histogram]]:
  """What the episodes of one batch say, over all and by source.

  Args:
    groups: the batch.
    update: updates applied to the trainer's weights as the batch is trained on.
    update_of: updates applied to the weights of each publication number.

  Returns:
    (scalars, histograms): under `rollout/` and `source/<pool>/`; rewards, solved share, response
    lengths, ends and finish reasons as shares, staleness in updates; group counts.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  stale = [staleness(t, update, update_of) for t in trajectories]
  scalars = _episodes('rollout', trajectories, stale)
  for pool in sorted({t.source.pool for t in trajectories}):
    rows = [i for i, t in enumerate(trajectories) if t.source.pool == pool]
    part = _episodes(f'source/{pool}', [trajectories[i] for i in rows], [stale[i] for i in rows])
    scalars |= part
  scalars['rollout/groups'] = float(len(groups))
  scalars['rollout/groups_equal'] = float(
    sum(len({t.reward for t in group.trajectories}) <= 1 for group in groups)
  )
  scalars['rollout/members_missing'] = float(
    sum(group.asked - len(group.trajectories) for group in groups)
  )
  every = np.concatenate(stale) if stale else np.zeros(0)
  lengths = np.array([t.num_sampled for t in trajectories])
  histograms = {
    'rollout/staleness_updates': Histogram.of(every, STALENESS_EDGES),
    'rollout/response_tokens': Histogram.of(lengths, LENGTH_EDGES),
  }
  return scalars, histograms


def _episodes(
  prefix: str, trajectories: Sequence[Trajectory], stale: Sequence[np.ndarray]
) -> dict[str, float]:
  """Returns the scalars of some episodes."""
  count = len(trajectories)
  rewards = np.array([t.reward for t in trajectories], np.float64)
  turns = [turn for t in trajectories for turn in t.turns]
  tokens = sum(t.num_sampled for t in trajectories)
  every = np.concatenate(stale) if stale else np.zeros(0)
  out = {
    'episodes': float(count),
    'turns': float(len(turns)),
    'tokens_sampled': float(tokens),
    'tokens_total': float(sum(len(t.tokens) for t in trajectories)),
    'reward': _ratio(rewards.sum(), count),
    'pass@1': _ratio(float((rewards >= 1.0).sum()), count),
    'response_tokens': _ratio(tokens, count),
    'staleness_mean_updates': _ratio(every.sum(), len(every)),
    'staleness_max_updates': float(every.max()) if len(every) else math.nan,
  }
  for end in EpisodeEnd:
    if end.scored:
      out[f'end/{end}'] = _ratio(sum(t.end is end for t in trajectories), count)
  for finish in FinishReason:
    out[f'finish/{finish}'] = _ratio(sum(turn.finish is finish for turn in turns), len(turns))
  return {f'{prefix}/{name}': value for name, value in out.items()}


def _ratio(total: float, count: float) -> float:
  return float(total) / float(count) if count else math.nan
