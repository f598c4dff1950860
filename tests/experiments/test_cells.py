"""What cells change, and what is kept of them."""

import itertools
import json
import pathlib
import runpy

import pytest

from mimo.experiments import cells, settings
from mimo.experiments.cells import Cell, Results, key, resolve
from mimo.experiments.workdir import differing_keys
from mimo.telemetry import study

_ROOT = pathlib.Path(__file__).parents[2]
_STATED = runpy.run_path(str(_ROOT / 'configs' / 'ablation.py'))
get_config, GRIDS = _STATED['get_config'], _STATED['GRIDS']


def _config(kind, seed=0, **overrides):
  return resolve(get_config, Cell(kind, seed), overrides)


def test_runs_share_everything_except_what_their_cell_changes():
  base = _config('mixed/sc_mis/usual').to_dict()
  for kind, seed in itertools.product(GRIDS['all'][0], (0, 1)):
    fleet, arm, staleness = kind.split('/')
    config = _config(kind, seed)
    settings.check(config)
    allowed = set()
    if seed:
      allowed.add('seed')
    if arm != 'sc_mis':
      allowed.add('arm')
    if staleness != 'usual':
      allowed |= {f'rollouts.virtual.{name}' for name in ('update_secs', 'publication_secs')}
    if staleness == 'near0':
      allowed |= {'rollouts.in_flight_batches', 'rollouts.buffered_batches'}
    differing = set(differing_keys(base, config.to_dict()))
    pools = {name for name in differing if name.startswith('pools.')}
    assert differing - pools <= allowed, kind
    assert bool(pools) == (fleet != 'mixed')
    assert bool(differing) == (kind != 'mixed/sc_mis/usual' or seed > 0)


def test_an_override_fits_every_cell_or_none():
  assert _config('mixed/grpo/usual', **{'pools.h100_fp8.sessions': 3}).pools.h100_fp8.sessions == 3
  with pytest.raises(ValueError, match=r"homogeneous/grpo/usual/0 has no key 'pools.h100_fp8"):
    _config('homogeneous/grpo/usual', **{'pools.h100_fp8.sessions': 3})


def test_every_fleet_is_as_large_and_as_fast():
  for fleet in ('homogeneous', 'mixed', 'nvfp4'):
    pools = _config(f'{fleet}/grpo/usual').pools.values()
    assert sum(pool.sessions for pool in pools) == 168
    assert sum(pool.turns_per_hour for pool in pools) == 60000.0
  shares = {p.format: p.sessions / 168 for p in _config('mixed/grpo/usual').pools.values()}
  assert shares == pytest.approx({'bf16': 0.26, 'fp8_block': 0.28, 'nvfp4_w4a16': 0.46}, abs=5e-3)


def test_the_key_is_of_the_configuration_and_of_every_seed():
  one = key(_config('mixed/grpo/usual'))
  assert one == key(_config('mixed/grpo/usual', 5))
  assert one == key(_config('mixed/grpo/usual', **{'checkpoints.every_updates': 7}))
  assert one == key(_config('mixed/grpo/usual', **{'wandb_project': 'mine'}))
  others = [
    _config('mixed/mis/usual'),
    _config('nvfp4/grpo/usual'),
    _config('mixed/grpo/near16'),
    _config('mixed/grpo/usual', **{'trainer.learning_rate': 2e-3}),
    _config('mixed/grpo/usual', **{'evaluation.samples': 8}),
  ]
  assert len({one, *map(key, others)}) == 6


def test_another_base_policy_is_another_key(monkeypatch):
  before = key(_config('mixed/grpo/usual'))
  monkeypatch.setattr(cells.base_policy, 'digest', lambda: 'another')
  assert key(_config('mixed/grpo/usual')) != before


def test_the_kept_results_are_of_the_configuration_as_it_is():
  """Else a grid would not go on from them: they are made again, or the change is not made."""
  kept = {path.name for path in (_ROOT / 'experiments' / 'results').glob('*.csv')}
  paths = {Results(_ROOT).path(Cell(kind, 0), key(_config(kind))).name for kind in GRIDS['all'][0]}
  assert kept <= paths
  results = Results(_ROOT / 'experiments' / 'results')
  for kind, seed in itertools.product(*GRIDS['main']):
    rows = results.read(Cell(kind, seed), key(_config(kind)))
    assert rows and rows[-1]['update'] == _config(kind).updates, (kind, seed)


@pytest.mark.parametrize(
  ('grid', 'headings'), [('main', None), ('more', ('Scores', 'Collapses', 'Mismatch'))]
)
def test_the_study_states_what_the_kept_results_give(grid, headings):
  kinds, seeds = GRIDS[grid]
  results = Results(_ROOT / 'experiments' / 'results')
  wanted = [Cell(kind, seed) for seed in seeds for kind in kinds]
  points = [row for cell in wanted for row in results.read(cell, key(_config(cell.kind)))]
  text = (_ROOT / 'docs' / 'study.md').read_text()
  tables = [t for t in study.tables(points) if headings is None or t.heading in headings]
  assert len(tables) == (8 if headings is None else len(headings))
  for table in tables:
    assert table.markdown() in text, table.heading


def _metrics(path, updates=4):
  """Evaluations at 0, 2 and 4; KL rises by one with each update, drift is measured in odd ones."""
  records = [{'step': 0, 'eval/heldout/pass@1': 0.5, 'eval/heldout/pass@1_error': 0.02}]
  for step in range(1, updates + 1):
    record = {'step': step, 'train/kl': float(step), 'train/rho_max': 10.0 * step, 'other': 1.0}
    record['source/a/kl'] = 2.0 * step
    if step % 2:
      record['train/drift'] = 0.25 * step
    records.append(record)
    # Histograms are records of their own, and one has a scalar's name.
    records.append({'step': step, 'train/kl': {'edges': [0, 1], 'counts': [3]}})
    if step % 2 == 0:
      records.append({'step': step, 'eval/heldout/pass@1': 0.5 + step / 10})
  path.write_text('\n'.join(map(json.dumps, records)) + '\n')
  return path


def test_a_row_is_an_evaluation_and_the_updates_before_it(tmp_path):
  cell = Cell('mixed/grpo/usual', 3)
  first, second, third = cells.rows(cell, _metrics(tmp_path / 'metrics.jsonl'))
  labels = {'fleet': 'mixed', 'arm': 'grpo', 'staleness': 'usual', 'seed': 3}
  assert first == labels | {
    'update': 0,
    'eval/heldout/pass@1': 0.5,
    'eval/heldout/pass@1_error': 0.02,
  }
  assert second == labels | {
    'update': 2,
    'eval/heldout/pass@1': 0.7,
    'train/kl': 1.5,
    'source/a/kl': 3.0,
    'train/drift': 0.25,
    'train/rho_max': 20.0,
  }
  assert (third['update'], third['train/kl'], third['train/drift']) == (4, 3.5, 0.75)
  (tmp_path / 'empty.jsonl').write_text('{"step": 1}\n')
  with pytest.raises(ValueError, match='no evaluation'):
    cells.rows(cell, tmp_path / 'empty.jsonl')


def test_results_are_kept_by_cell_and_configuration(tmp_path):
  results = Results(tmp_path / 'results')
  cell, other = Cell('mixed/grpo/usual', 3), Cell('mixed/grpo/usual', 1)
  found = cells.rows(cell, _metrics(tmp_path / 'metrics.jsonl'))
  assert results.read(cell, 'abc') == []
  results.add(cell, 'abc', found)
  results.add(other, 'abc', cells.rows(other, tmp_path / 'metrics.jsonl'))
  assert results.read(cell, 'abc') == found
  assert results.read(cell, 'abd') == []
  text = (tmp_path / 'results' / 'mixed-grpo-usual-abc.csv').read_text().splitlines()
  assert text[0].startswith('fleet,arm,staleness,seed,update,eval/heldout/pass@1,')
  assert [line.split(',')[3:5] for line in text[1:]] == [
    [seed, update] for seed in '13' for update in '024'
  ]
  # Written again, a cell's rows take the place of its old ones.
  results.add(cell, 'abc', found[:1])
  assert results.read(cell, 'abc') == found[:1]
  assert len(results.read(other, 'abc')) == 3
