"""The cells of a grid: what each changes, and the results that are kept of it.

A cell is `fleet/arm/staleness` with a seed. What its runs are is told by its kind, the revision of
what a run does, the policy it begins from, and the values that differ from the schema's defaults
(see `mimo.experiments.results`, which keeps them).
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from mimo.experiments import schema
from mimo.telemetry import names, writers

LABELS = ('fleet', 'arm', 'staleness', 'seed', 'update')
_MEANS = (
  names.REWARD,
  names.STALENESS,
  'rollout/versions_per_episode',
  'rollout/turns_spanning_versions',
  'rollout/response_tokens',
  'sampling/secs',
  'sampling/wait_secs',
  names.MODELLED_USD,
)
_OBJECTIVE = (names.KL, names.MASKED_SHARE, names.TAIL_RATIO, 'effective_sample')
_TRAIN = (
  *_OBJECTIVE,
  names.MASKED_LOW,
  names.MASKED_HIGH,
  'head_share',
  'entropy',
  'grad_norm',
  'covariance_norm',
  'mean_score_norm',
  'drift',
  'skipped',
  'flat',
)
_MAXIMA = (names.of_train(names.TAIL_RATIO_MAX), 'rollout/staleness_max_updates')


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
  """One run of a grid. `kind` is `fleet/arm/staleness`."""

  kind: str
  seed: int

  def __str__(self) -> str:
    return f'{self.kind}/{self.seed}'

  @property
  def slug(self) -> str:
    """The name as part of a file's."""
    return str(self).replace('/', '-')


def resolve(
  get_config: Callable[[str], config_dict.ConfigDict],
  cell: Cell,
  overrides: Mapping[str, Any] | None = None,
) -> schema.Experiment:
  """Returns the experiment of a cell, with the same overrides as every other cell.

  Raises ValueError for an override of a key that the cell does not have, and for what cannot be
  meant.
  """
  config, stated = get_config(cell.kind), dict(overrides or {})
  unknown = sorted({*stated} - {*schema.flat(schema.parse(config))})
  if unknown:
    raise ValueError(f'{cell} has no key {unknown[0]!r}; expected overrides that fit every cell')
  with config.unlocked():
    config.update_from_flattened_dict(stated)
    config.seed = cell.seed
  return schema.parse(config)


def rows(cell: Cell, metrics: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns one row per evaluation of a run: its scores, and means since the one before.

  Raises ValueError where the metrics hold no evaluation.
  """
  records = writers.read(metrics)
  scored = names.of_eval('heldout', 'pass@1')
  points = sorted({record['step'] for record in records if scored in record})
  if not points:
    raise ValueError(f'{metrics} holds no evaluation; expected those of a run')
  out = []
  fleet, arm, staleness = cell.kind.split('/')
  for before, point in zip([-1, *points], points, strict=False):
    labels = dict(zip(LABELS, (fleet, arm, staleness, cell.seed, point), strict=True))
    evaluations = [r for r in records if r['step'] == point and scored in r]
    since = [r for r in records if before < r['step'] <= point]
    scores = {n: v for r in evaluations for n, v in r.items() if n.startswith('eval/')}
    out.append(labels | scores | _summary(since))
  return out


def _summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
  """Returns means and maxima of what an update measures, over those updates that measured it."""
  found = {name for record in records for name in record}
  means = {*_MEANS, *map(names.of_train, _TRAIN)}
  for pool in names.sources(found):
    means |= {names.of_source(pool, name) for name in (*_OBJECTIVE, 'reward')}
  out = {}
  for name in sorted(found & {*means, *_MAXIMA}):
    values = [r[name] for r in records if _is_number(r.get(name))]
    if values:
      out[name] = max(values) if name in _MAXIMA else math.fsum(values) / len(values)
  return out


def _is_number(value: Any) -> bool:
  """Returns whether a record's value is a scalar that was measured; histograms share names."""
  return isinstance(value, int | float) and math.isfinite(value)
