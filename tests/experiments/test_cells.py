"""What cells change, and the rows that are made of their metrics."""

import itertools
import json
import pathlib
import runpy

import pytest

from mimo.experiments import cells, schema
from mimo.experiments.cells import Cell, resolve
from mimo.experiments.workdir import differing_keys

_ROOT = pathlib.Path(__file__).parents[2]
_STATED = runpy.run_path(str(_ROOT / 'configs' / 'ablation.py'))
get_config, GRIDS = _STATED['get_config'], _STATED['GRIDS']


def _config(kind, seed=0, **overrides):
  return resolve(get_config, Cell(kind, seed), overrides)


def test_runs_share_everything_except_what_their_cell_changes():
  base = schema.plain(_config('mixed/sc_mis/usual'))
  for kind, seed in itertools.product(GRIDS['all'][0], (0, 1)):
    fleet, arm, staleness = kind.split('/')
    config = _config(kind, seed)
    allowed = set()
    if seed:
      allowed.add('seed')
    if arm != 'sc_mis':
      allowed.add('arm')
    if staleness != 'usual':
      allowed |= {f'rollouts.virtual.{name}' for name in ('update_secs', 'publication_secs')}
    if staleness == 'near0':
      allowed |= {'rollouts.in_flight_batches', 'rollouts.buffered_batches'}
    differing = set(differing_keys(base, schema.plain(config)))
    pools = {name for name in differing if name.startswith('pools.')}
    assert differing - pools <= allowed, kind
    assert bool(pools) == (fleet != 'mixed')
    assert bool(differing) == (kind != 'mixed/sc_mis/usual' or seed > 0)


def test_an_override_fits_every_cell_or_none():
  assert _config('mixed/grpo/usual', **{'pools.h100_fp8.sessions': 3}).fleet[2].sessions == 3
  with pytest.raises(ValueError, match=r"homogeneous/grpo/usual/0 has no key 'pools.h100_fp8"):
    _config('homogeneous/grpo/usual', **{'pools.h100_fp8.sessions': 3})


def test_every_fleet_is_as_large_and_as_fast():
  for fleet in ('homogeneous', 'mixed', 'nvfp4'):
    pools = _config(f'{fleet}/grpo/usual').pools.values()
    assert sum(pool.sessions for pool in pools) == 168
    assert sum(pool.turns_per_hour for pool in pools) == 60000.0
  shares = {p.format: p.sessions / 168 for p in _config('mixed/grpo/usual').pools.values()}
  assert shares == pytest.approx({'bf16': 0.26, 'fp8_block': 0.28, 'nvfp4_w4a16': 0.46}, abs=5e-3)


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
