"""The cells of a grid: what each changes, and the results that are kept of it.

A cell is `fleet/arm/staleness` with a seed. A kind of cell (all seeds) keeps one CSV file, named by
a hash of its resolved configuration: of another configuration, results are never mixed in.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

from mimo.experiments import base_policy
from mimo.telemetry import names, writers

# What says nothing of a result: where things are kept and computed, and how often.
_NOT_HASHED = (
  'seed',
  'policy',
  'checkpoints.every_updates',
  'wandb_project',
  'trainer.mesh',
  'trainer.offload',
  'trainer.remat',
)
# Raised when what a cell does changes with its configuration left as it is.
_REVISION = 1

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
) -> config_dict.ConfigDict:
  """Returns the configuration of a cell, with the same overrides as every other cell.

  Raises ValueError for an override of a key that the cell does not have.
  """
  config = get_config(cell.kind)
  unknown = sorted({*(overrides or {})} - {*_leaves(config.to_dict())})
  if unknown:
    raise ValueError(f'{cell} has no key {unknown[0]!r}; expected overrides that fit every cell')
  with config.unlocked():
    config.update_from_flattened_dict(dict(overrides or {}))
    config.seed = cell.seed
  return config


def key(config: config_dict.ConfigDict) -> str:
  """Returns the hash by which results of a configuration are kept; it is that of every seed."""
  leaves = _leaves(config.to_dict())
  tree = {name: value for name, value in leaves.items() if name not in _NOT_HASHED}
  policy = config.policy or base_policy.digest()
  text = json.dumps([_REVISION, policy, tree], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:12]


def _leaves(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """Returns the values of a nested mapping by dotted name."""
  out: dict[str, Any] = {}
  for name, value in tree.items():
    if isinstance(value, Mapping):
      out |= _leaves(value, f'{prefix}{name}.')
    else:
      out[f'{prefix}{name}'] = value
  return out


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


class Results:
  """The CSV files of a study, one per kind of cell and configuration."""

  def __init__(self, directory: pathlib.Path) -> None:
    self.directory = directory

  def path(self, cell: Cell, config_key: str) -> pathlib.Path:
    """Returns where a cell's rows are kept, with those of its other seeds."""
    return self.directory / f'{cell.kind.replace("/", "-")}-{config_key}.csv'

  def read(self, cell: Cell, config_key: str) -> list[dict[str, Any]]:
    """Returns a cell's rows, none where it is not finished."""
    path = self.path(cell, config_key)
    if not path.exists():
      return []
    return [row for row in read_csv(path) if row['seed'] == cell.seed]

  def add(self, cell: Cell, config_key: str, new: Sequence[Mapping[str, Any]]) -> None:
    """Keeps a finished cell's rows; the file is replaced whole."""
    path = self.path(cell, config_key)
    kept = read_csv(path) if path.exists() else []
    kept = [row for row in kept if row['seed'] != cell.seed]
    self.directory.mkdir(parents=True, exist_ok=True)
    write_csv(path, sorted([*kept, *new], key=lambda row: (row['seed'], row['update'])))


def write_csv(path: pathlib.Path, table: Iterable[Mapping[str, Any]]) -> None:
  """Writes rows under the union of their columns, labels first; what a row lacks is empty."""
  table = list(table)
  columns = sorted({name for row in table for name in row} - {*LABELS})
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow([*LABELS, *columns])
  for row in table:
    numbers = ['' if row.get(name) is None else f'{row[name]:.6g}' for name in columns]
    writer.writerow([*(row[name] for name in LABELS), *numbers])
  partial = path.with_name(f'.{path.name}.partial')
  partial.write_text(text.getvalue(), encoding='utf-8')
  os.replace(partial, path)


def read_csv(path: pathlib.Path) -> list[dict[str, Any]]:
  """Returns what `write_csv` wrote, empty fields left out."""
  with open(path, encoding='utf-8', newline='') as file:
    return [
      {name: _value(name, text) for name, text in row.items() if text != ''}
      for row in csv.DictReader(file)
    ]


def _value(name: str, text: str) -> Any:
  if name in ('seed', 'update'):
    return int(text)
  return text if name in LABELS else float(text)
