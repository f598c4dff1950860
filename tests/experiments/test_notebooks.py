"""The notebooks of experiments/ from top to bottom, in their short form."""

import os
import pathlib
import runpy
import subprocess
import sys

import pytest

from mimo.experiments import cells
from mimo.experiments.results import Results
from mimo.telemetry import writers

_ROOT = pathlib.Path(__file__).parents[2]


def _run(name, out, **environment):
  """Returns what a notebook prints."""
  env = os.environ | {'MIMO_NOTEBOOK_SHORT': '1', 'MIMO_NOTEBOOK_OUT': str(out)} | environment
  # One device, as a user has: of a flag given twice the last counts.
  env['XLA_FLAGS'] = f'{env["XLA_FLAGS"]} --xla_force_host_platform_device_count=1'
  ran = subprocess.run(
    [sys.executable, str(_ROOT / 'experiments' / f'{name}.py')],
    capture_output=True,
    text=True,
    cwd=out,
    env=env,
  )
  assert ran.returncode == 0, ran.stderr
  return ran.stdout


def _figures(out):
  return {path.stem for path in out.glob('*.png') if path.stat().st_size > 2000}


def test_objective(tmp_path):
  """The notebook itself compares every push with a float64 enumeration."""
  said = _run('1_objective', tmp_path)
  assert 'largest difference from the float64 enumeration' in said
  assert _figures(tmp_path) == {'push', 'error', 'walk', 'range', 'head'}


def test_training(tmp_path):
  said = _run('2_training', tmp_path)
  records = writers.read(tmp_path / 'training-sc_mis_topp' / 'metrics.jsonl')
  assert [r['step'] for r in records if 'rollout/reward' in r] == [1, 2]
  assert [r['step'] for r in records if 'eval/heldout/pass@1' in r] == [0, 2]
  scores = [r['eval/heldout/pass@1'] for r in records if 'eval/heldout/pass@1' in r]
  assert f'{scores[0]:.3f} at the start, {scores[1]:.3f} after 2 updates' in said
  assert {'training-sc_mis_topp', 'training-sc_mis_topp-kl'} <= _figures(tmp_path)


def _point(seed, update, score, kl):
  fleet, arm, staleness = 'mixed', 'grpo', 'usual'
  return {
    **dict(zip(cells.LABELS, (fleet, arm, staleness, seed, update), strict=True)),
    'eval/heldout/pass@1': score,
    'eval/heldout/pass@1_error': 0.05,
    'train/kl': kl,
  }


def test_grid(tmp_path):
  """Two runs of today's configuration, of which one collapses; older ones; another fleet."""
  get_config = runpy.run_path(str(_ROOT / 'configs' / 'ablation.py'))['get_config']
  cell, other = cells.Cell('mixed/grpo/usual', 0), cells.Cell('homogeneous/grpo/usual', 0)
  now = [
    _point(0, 0, 0.5, 0.01),
    _point(0, 20, 0.1, 0.03),
    _point(1, 0, 0.5, 0.01),
    _point(1, 20, 0.7, 0.03),
  ]
  older = [_point(seed, update, 0.9, 0.5) for seed in range(5) for update in (0, 20)]
  results = Results(tmp_path / 'results')
  results.add(cell, cells.resolve(get_config, cell, {'updates': 7}), older)
  results.add(cell, cells.resolve(get_config, cell), now)
  elsewhere = [point | {'fleet': 'homogeneous'} for point in now]
  results.add(other, cells.resolve(get_config, other, {'updates': 7}), elsewhere)

  said = _run('3_grid', tmp_path, MIMO_NOTEBOOK_RESULTS=str(results.directory)).splitlines()
  assert 'mixed/grpo/usual: 4 points' in said
  assert any(line.startswith('homogeneous/grpo/usual: 4 points, of other values') for line in said)
  # By hand: (0.1 + 0.7) / 2, a standard error of 0.6 / 2; means of 0.01 and 0.03.
  row = next(line for line in said if line.startswith('mixed/grpo/usual  '))
  expected = 'mixed/grpo/usual 0.400 ± 0.300 - 1 of 2 2.00e-02 ± 0.00e+00 - -'
  assert row.split() == expected.split()
  assert {'grid-gains', 'grid-pass_mixed_usual', 'grid-kl_mixed_usual'} <= _figures(tmp_path)


def test_grid_without_results(tmp_path):
  said = _run('3_grid', tmp_path, MIMO_NOTEBOOK_RESULTS=str(tmp_path / 'none'))
  assert 'holds no finished cell' in said and 'mimo ablate' in said
  assert not _figures(tmp_path)


def test_precision(tmp_path):
  rows = [line.split() for line in _run('4_precision', tmp_path).splitlines()]
  kl = {tuple(row[:2]): float(row[3]) for row in rows if len(row) == 8 and row[4] == '±'}
  assert len(kl) == 10 and _figures(tmp_path) == {'precision'}
  # A bf16 view is the trainer's policy up to the rounding of its cache; four bits are the furthest.
  assert 0 < kl['bf16', 'bf16'] < 1e-5 < kl['fp8_block', 'bf16'] < kl['nvfp4_w4a4', 'bf16'] < 0.1
  assert kl['bf16', 'fp8'] > 10 * kl['bf16', 'bf16']


def test_scripts_are_notebooks():
  jupytext = pytest.importorskip('jupytext', reason="needs jupytext: install the extra 'notebook'")
  scripts = sorted((_ROOT / 'experiments').glob('[0-9]_*.py'))
  assert len(scripts) == 4
  for script in scripts:
    notebook = jupytext.read(script)
    assert notebook.cells[0].cell_type == 'markdown'
    assert notebook.cells[0].source.startswith('# ')
    assert {cell.cell_type for cell in notebook.cells} == {'code', 'markdown'}
