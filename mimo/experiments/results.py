"""The results that are kept of a grid's cells, and how a cell finds its own.

A directory holds one CSV file per kind of cell and experiment, for all seeds, and cells.json, which
says what each file is of:

    revision   what a run does: raised when that changes with the experiment left as it is
    defaults   what a cell has where it does not say otherwise
    cells      by file: kind, policy, and what differs from the defaults

An experiment finds its rows where the kind, the policy and every value are the same. A key that the
schema has gained since is one that the kept cells have at its default.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mimo.experiments import base_policy, schema
from mimo.experiments.cells import LABELS, Cell

# Raised when what a cell does changes with its experiment left as it is.
REVISION = 2

# What says nothing of a result: where things are kept and computed, and how often.
_SAYS_NOTHING = (
  'seed',
  'policy',
  'checkpoints.every_updates',
  'wandb_project',
  'distributed.coordinator',
  'distributed.processes',
  'distributed.process',
  'trainer.mesh',
  'trainer.offload',
  'trainer.remat',
)
_INDEX = 'cells.json'
_UNSTATED = object()  # equal to no value


@dataclasses.dataclass(frozen=True)
class Kept:
  """What a file of results is of.

  Attributes:
    file: its name.
    kind: `fleet/arm/staleness`.
    policy: what `base_policy.identity` says of the policy that its runs began from.
    differs: values by dotted name, where they are not the defaults of the directory.
  """

  file: str
  kind: str
  policy: str
  differs: Mapping[str, Any]


def told(experiment: schema.Experiment) -> dict[str, Any]:
  """Returns the values that a result depends on, by dotted name."""
  values = schema.flat(experiment)
  return {name: value for name, value in values.items() if name not in _SAYS_NOTHING}


def digest(kind: str, experiment: schema.Experiment) -> str:
  """Returns a short hash of what a cell is: of one more key at its default, it is the same."""
  policy = base_policy.identity(experiment.policy)
  differs = _differing(experiment, _schema_defaults())
  text = json.dumps([REVISION, kind, policy, differs], sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:8]


class Results:
  """One directory of results.

  Attributes:
    directory: where it is; it may be none yet.
    revision: of the cells that it keeps; `REVISION` where it keeps none.
    kept: what its files are of.
  """

  def __init__(self, directory: pathlib.Path) -> None:
    """Reads what there is. Raises ValueError where that is no index of results."""
    self.directory = directory
    self.revision = REVISION
    self.kept: tuple[Kept, ...] = ()
    self._defaults = _schema_defaults()
    self._load()

  def find(self, kind: str, experiment: schema.Experiment) -> Kept | None:
    """Returns what is kept of a kind of cell run as this experiment, whatever the seed."""
    policy, values = base_policy.identity(experiment.policy), told(experiment)
    for kept in self.kept:
      if (kept.kind, kept.policy) == (kind, policy) and self._same(kept, values):
        return kept
    return None

  def read(self, cell: Cell, experiment: schema.Experiment) -> list[dict[str, Any]]:
    """Returns a cell's rows, none where it is not finished."""
    kept = self.find(cell.kind, experiment)
    return [] if kept is None else [r for r in self.rows(kept) if r['seed'] == cell.seed]

  def rows(self, kept: Kept) -> list[dict[str, Any]]:
    """Returns all rows of a file."""
    return read_csv(self.directory / kept.file)

  def add(
    self, cell: Cell, experiment: schema.Experiment, new: Sequence[Mapping[str, Any]]
  ) -> None:
    """Keeps a finished cell's rows; files are replaced whole.

    Raises ValueError where the directory keeps cells of another revision.
    """
    self._load()  # another grid may have added to it
    if self.revision != REVISION:
      raise ValueError(
        f'{self.directory} keeps cells of revision {self.revision}; expected a directory of '
        f'revision {REVISION}, or a new one'
      )
    kept = self.find(cell.kind, experiment)
    old = [] if kept is None else [r for r in self.rows(kept) if r['seed'] != cell.seed]
    if kept is None:
      policy = base_policy.identity(experiment.policy)
      differs = _differing(experiment, self._defaults)
      kept = Kept(self._free_name(cell.kind), cell.kind, policy, differs)
      self.kept = (*self.kept, kept)
    self.directory.mkdir(parents=True, exist_ok=True)
    rows: list[Mapping[str, Any]] = [*old, *new]
    rows.sort(key=lambda row: (row['seed'], row['update']))
    write_csv(self.directory / kept.file, rows)
    write_index(self.directory, self.revision, self._defaults, self.kept)

  def _load(self) -> None:
    path = self.directory / _INDEX
    if not path.exists():
      return
    try:
      stated = json.loads(path.read_text(encoding='utf-8'))
      self.revision = stated['revision']
      self._defaults = {**_schema_defaults(), **stated['defaults']}
      self.kept = tuple(Kept(file, **of) for file, of in stated['cells'].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise ValueError(f'{path} is no index of results ({error!r})') from None

  def _same(self, kept: Kept, values: Mapping[str, Any]) -> bool:
    if kept.differs.keys() - values.keys():
      return False
    return all(
      value == kept.differs.get(name, self._defaults.get(_leaf(name), _UNSTATED))
      for name, value in values.items()
    )

  def _free_name(self, kind: str) -> str:
    taken = {kept.file for kept in self.kept}
    stem, number = kind.replace('/', '-'), 1
    while (name := f'{stem}-{number}.csv' if number > 1 else f'{stem}.csv') in taken:
      number += 1
    return name


def write_index(
  directory: pathlib.Path, revision: int, defaults: Mapping[str, Any], kept: Iterable[Kept]
) -> None:
  """Writes cells.json, whole or not at all."""
  cells = {
    of.file: {'kind': of.kind, 'policy': of.policy, 'differs': dict(of.differs)}
    for of in sorted(kept, key=lambda of: of.file)
  }
  stated = {'revision': revision, 'defaults': dict(defaults), 'cells': cells}
  _write(directory / _INDEX, json.dumps(stated, indent=2) + '\n')


def _leaf(name: str) -> str:
  """Returns the name of a value's leaf in the schema: `pools.NAME.format` of any pool."""
  first, *rest = name.split('.')
  return '.'.join([first, schema.ANY, *rest[1:]]) if first == 'pools' else name


def _schema_defaults() -> dict[str, Any]:
  return {leaf.name: leaf.default for leaf in schema.leaves() if not leaf.required}


def _differing(experiment: schema.Experiment, defaults: Mapping[str, Any]) -> dict[str, Any]:
  return {
    name: value
    for name, value in told(experiment).items()
    if value != defaults.get(_leaf(name), _UNSTATED)
  }


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
  _write(path, text.getvalue())


def _write(path: pathlib.Path, text: str) -> None:
  partial = path.with_name(f'.{path.name}.partial')
  partial.write_text(text, encoding='utf-8')
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
