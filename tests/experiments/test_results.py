"""What is kept of cells: found by what a cell is, by whatever schema it was kept."""

import itertools
import json
import pathlib
import runpy

import pytest

from mimo.experiments import base_policy, cells, results
from mimo.experiments.cells import Cell, resolve
from mimo.experiments.results import Results
from mimo.telemetry import study

_ROOT = pathlib.Path(__file__).parents[2]
_STATED = runpy.run_path(str(_ROOT / 'configs' / 'ablation.py'))
get_config, GRIDS = _STATED['get_config'], _STATED['GRIDS']

# The results of revision 1, in the commit that added the last of them.
_OLD = _ROOT / 'experiments' / 'results' / 'ff4595f'

# What the regimes of the search change; see docs/study.md.
_STEEP = {
  'sampling.candidates': 16,
  'sampling.top_k': 8,
  'rollouts.virtual.update_secs': 20.0,
  'rollouts.virtual.publication_secs': 10.0,
}
_SEARCH = {
  'A': (0.0, {'trainer.learning_rate': 1e-3, **_STEEP}),
  'B': (0.0, {'trainer.learning_rate': 3e-3, **_STEEP}),
  'C': (1.75, {'trainer.learning_rate': 3e-4, **_STEEP}),
  'D': (1.75, {'trainer.learning_rate': 1e-3, **_STEEP}),
  'E': (1.75, {'trainer.learning_rate': 2e-4, 'updates': 160}),
  'F': (0.0, {'trainer.learning_rate': 3e-4, 'updates': 160}),
}


def _experiment(kind, seed=0, **overrides):
  return resolve(get_config, Cell(kind, seed), overrides)


def test_every_cell_of_the_main_comparison_is_kept():
  """Else the command would run it again: it is kept again, or the change is not made."""
  kept = Results(_OLD)
  for kind, seed in itertools.product(*GRIDS['main']):
    rows = kept.read(Cell(kind, seed), _experiment(kind, seed))
    assert rows and rows[-1]['update'] == 120, (kind, seed)


@pytest.mark.parametrize('name', ['ff4595f', *(f'ff4595f/search/{letter}' for letter in _SEARCH)])
def test_every_kept_cell_is_found_by_a_cell_of_today(name, tmp_path):
  kept = Results(_ROOT / 'experiments' / 'results' / name)
  assert kept.revision == 1 and kept.kept
  octaves, overrides = _SEARCH.get(name.rpartition('/')[2], (base_policy.OCTAVES, {}))
  policy = ''
  if octaves != base_policy.OCTAVES:
    (tmp_path / base_policy.NOTE).write_text(base_policy.digest(octaves) + '\n')
    policy = str(tmp_path)
  for of in kept.kept:
    assert kept.find(of.kind, _experiment(of.kind, **overrides, policy=policy)) is of
  listed = {of.file for of in kept.kept}
  assert {path.name for path in kept.directory.glob('*.csv')} == listed


def test_cells_of_this_revision_are_found_by_a_cell_of_today():
  kept = Results(_ROOT / 'experiments' / 'results')
  assert kept.revision == results.REVISION
  for of in kept.kept:
    assert kept.find(of.kind, _experiment(of.kind)) is of
  # The seeds of the main comparison that were run again are whole, and none is run once more.
  for kind, seed in itertools.product(GRIDS['main'][0], (100, 101, 102)):
    assert kept.read(Cell(kind, seed), _experiment(kind, seed))[-1]['update'] == 120


@pytest.mark.parametrize(
  ('grid', 'headings'), [('main', None), ('more', ('Scores', 'Collapses', 'Mismatch'))]
)
def test_the_study_states_what_the_kept_results_give(grid, headings):
  kinds, seeds = GRIDS[grid]
  kept = Results(_OLD)
  wanted = [Cell(kind, seed) for seed in seeds for kind in kinds]
  points = [row for cell in wanted for row in kept.read(cell, _experiment(cell.kind))]
  text = (_ROOT / 'docs' / 'study.md').read_text()
  tables = [t for t in study.tables(points) if headings is None or t.heading in headings]
  assert len(tables) == (8 if headings is None else len(headings))
  for table in tables:
    assert table.markdown() in text, table.heading


def _rows(cell, score=0.5):
  labels = zip(cells.LABELS, (*cell.kind.split('/'), cell.seed, 0), strict=True)
  return [{**dict(labels), 'eval/heldout/pass@1': score}]


def test_results_are_found_by_cell_and_values(tmp_path):
  kept = Results(tmp_path / 'results')
  cell, other = Cell('mixed/grpo/usual', 3), Cell('mixed/grpo/usual', 1)
  experiment = _experiment(cell.kind, 3)
  assert kept.read(cell, experiment) == []
  kept.add(cell, experiment, _rows(cell))
  kept.add(other, _experiment(cell.kind, 1), _rows(other))
  assert Results(tmp_path / 'results').read(cell, experiment) == _rows(cell)
  changes = ({'trainer.learning_rate': 2e-3}, {'evaluation.samples': 8}, {'policy': 'elsewhere'})
  for change in changes:
    assert kept.read(cell, _experiment(cell.kind, 3, **change)) == []
  assert kept.read(Cell('mixed/mis/usual', 3), experiment) == []
  # What says nothing of a result is not looked at.
  for change in (
    {'checkpoints.every_updates': 7},
    {'wandb_project': 'mine'},
    {'trainer.remat': True},
  ):
    assert kept.read(cell, _experiment(cell.kind, 3, **change)) == _rows(cell)
  # Written again, a cell's rows take the place of its old ones; other values go to another file.
  kept.add(cell, experiment, _rows(cell, 0.25))
  kept.add(cell, _experiment(cell.kind, 3, updates=7), _rows(cell, 0.75))
  assert kept.read(cell, experiment) == _rows(cell, 0.25)
  assert kept.read(other, experiment) == _rows(other)
  files = {path.name for path in (tmp_path / 'results').iterdir()}
  assert files == {'cells.json', 'mixed-grpo-usual.csv', 'mixed-grpo-usual-2.csv'}
  text = (tmp_path / 'results' / 'mixed-grpo-usual.csv').read_text().splitlines()
  assert text[0] == 'fleet,arm,staleness,seed,update,eval/heldout/pass@1'
  assert [line.split(',')[3] for line in text[1:]] == ['1', '3']


def _index(directory):
  return json.loads((directory / 'cells.json').read_text())


def test_a_new_key_loses_nothing_and_a_new_default_is_another_cell(tmp_path):
  cell = Cell('mixed/grpo/usual', 0)
  kept = Results(tmp_path)
  kept.add(cell, _experiment(cell.kind), _rows(cell))
  stated = _index(tmp_path)
  # Kept before there were these keys: a pool's and one of the trainer.
  for name in ('trainer.b1', 'pools.NAME.usd_per_gpu_hour'):
    del stated['defaults'][name]
  (tmp_path / 'cells.json').write_text(json.dumps(stated))
  assert Results(tmp_path).read(cell, _experiment(cell.kind))
  for change in ({'trainer.b1': 0.8}, {'pools.h100_fp8.usd_per_gpu_hour': 1.0}):
    assert not Results(tmp_path).read(cell, _experiment(cell.kind, **change))
  # Kept while a default was another: today's is another value, and that one still finds it.
  stated['defaults']['trainer.b2'] = 0.9
  (tmp_path / 'cells.json').write_text(json.dumps(stated))
  assert not Results(tmp_path).read(cell, _experiment(cell.kind))
  assert Results(tmp_path).read(cell, _experiment(cell.kind, **{'trainer.b2': 0.9}))
  # It had a value of a key that there is no longer.
  stated = _index(tmp_path)
  stated['cells']['mixed-grpo-usual.csv']['differs']['trainer.momentum'] = 0.5
  (tmp_path / 'cells.json').write_text(json.dumps(stated))
  assert not Results(tmp_path).read(cell, _experiment(cell.kind, **{'trainer.b2': 0.9}))


def test_results_of_an_earlier_revision_gain_none(tmp_path):
  cell = Cell('mixed/grpo/usual', 0)
  results.write_index(tmp_path, 1, {}, ())
  with pytest.raises(ValueError, match='keeps cells of revision 1; expected a directory of revis'):
    Results(tmp_path).add(cell, _experiment(cell.kind), _rows(cell))
  assert not list(tmp_path.glob('*.csv'))


def test_an_index_that_is_none_is_refused(tmp_path):
  for text in ('{', '[]', '{"revision": 2}', '{"revision": 2, "defaults": {}, "cells": {"a": {}}}'):
    (tmp_path / 'cells.json').write_text(text)
    with pytest.raises(ValueError, match=r'cells\.json is no index of results'):
      Results(tmp_path)


def test_another_base_policy_is_another_cell(tmp_path, monkeypatch):
  cell = Cell('mixed/grpo/usual', 0)
  Results(tmp_path).add(cell, _experiment(cell.kind), _rows(cell))
  monkeypatch.setattr(base_policy, 'digest', lambda: 'another')
  assert not Results(tmp_path).read(cell, _experiment(cell.kind))


def test_a_digest_is_of_what_a_cell_is_for_every_seed(monkeypatch):
  kind = 'mixed/grpo/usual'
  one = results.digest(kind, _experiment(kind))
  assert one == results.digest(kind, _experiment(kind, 5))
  assert one == results.digest(kind, _experiment(kind, wandb_project='mine'))
  changed = ({'updates': 7}, {'arm': 'sc'}, {'sampling.top_k': 8})
  others = {results.digest(kind, _experiment(kind, **change)) for change in changed}
  assert len({one, *others}) == 4
  monkeypatch.setattr(results, 'REVISION', 3)
  assert results.digest(kind, _experiment(kind)) != one
