"""A study's numbers by hand, and a report that holds them and fetches nothing."""

import csv
import math
import re

import numpy as np
import pytest

from mimo.telemetry import study
from mimo.telemetry import study_data as data


def _run(scores, *, fleet='mixed', arm='grpo', seed=0, staleness='usual', kl=2e-3, usd=0.1):
  """Points at 0, 10, 20, ... with these held-out scores; an error of 0.02."""
  out = []
  for i, score in enumerate(scores):
    point = {'fleet': fleet, 'arm': arm, 'staleness': staleness, 'seed': seed, 'update': 10 * i}
    for split, shift in (('heldout', 0.0), ('hard', -0.2)):
      for k, more in ((1, 0.0), (4, 0.1)):
        point[f'eval/{split}/pass@{k}'] = score + shift + more
        point[f'eval/{split}/pass@{k}_error'] = 0.02
    if i:
      point |= {'train/kl': kl * i, 'train/rho': 1.0 + i, 'train/drift': 0.5, 'source/a/kl': kl}
      point |= {'source/b/kl': 2 * kl, 'cost/modelled_usd': usd, 'train/masked_share': 0.0}
    out.append(point)
  return out


def test_a_collapse_is_for_good():
  # The base is at 0.5, so the floor is at 0.44.
  fell = _run([0.5, 0.43, 0.5, 0.40, 0.3])
  assert data.floor_of(fell) == pytest.approx(0.44)
  assert data.collapse(fell, 0.44) == 30
  assert data.collapse(_run([0.5, 0.43, 0.45]), 0.44) is None
  # One that recovers has fallen all the same.
  assert data.lowest(_run([0.5, 0.43, 0.45])) == 0.43
  assert data.lowest(_run([0.5, 0.6, 0.7])) == 0.6
  assert math.isnan(data.lowest(_run([0.5])))
  assert data.collapse(_run([0.5, 0.3, 0.3]), 0.44) == 10


def test_a_curve_is_over_seeds():
  points = _run([0.5, 0.6], seed=0) + _run([0.4, 0.8, 0.9], seed=1)
  curve = data.curve(points, data.PASS_1)
  np.testing.assert_array_equal(curve.updates, [0, 10, 20])
  np.testing.assert_allclose(curve.mean, [0.45, 0.7, 0.9])
  half = math.sqrt(2) * 0.05
  np.testing.assert_allclose(curve.low, [0.45 - half, 0.7 - 2 * half, 0.9])
  assert data.curve(points, 'absent') is None


def test_spreads_are_of_runs():
  points = _run([0.5, 0.6, 0.7], seed=0, kl=1.0) + _run([0.5, 0.5, 0.5], seed=1, kl=3.0)
  end = data.last(points, data.PASS_1)
  assert end == (pytest.approx(0.6), pytest.approx(0.1), 2)
  assert end.text() == '0.600 ± 0.100'
  # KL is kl and 2 kl at the two points of each run.
  assert data.whole(points, 'train/kl').mean == pytest.approx((1.5 + 4.5) / 2)
  assert data.spread([]).text() == '-'
  assert data.spread([0.25]).text() == '0.250'


def test_effects_are_paired_by_seed():
  ours = _run([0.5, 0.7], seed=0) + _run([0.4, 0.5], seed=1) + _run([0.4, 0.9], seed=2)
  theirs = _run([0.5, 0.6], seed=0) + _run([0.4, 0.2], seed=1)
  assert data.gain(ours[:4], data.PASS_1) == (pytest.approx(0.15), pytest.approx(0.05), 2)
  assert data.against(ours, theirs, data.PASS_1) == (pytest.approx(0.2), pytest.approx(0.1), 2)


@pytest.fixture(scope='module')
def points():
  out = []
  for seed in (0, 1):
    out += _run([0.5, 0.6, 0.7], arm='sc_mis', seed=seed, kl=4e-3, usd=0.08)
    out += _run([0.5, 0.3, 0.2], arm='grpo', seed=seed)
    out += _run([0.5, 0.6, 0.7], arm='sc_mis', fleet='homogeneous', seed=seed, kl=1e-3)
  return out


def test_the_report_holds_tables_and_figures(points, tmp_path):
  path = study.write(tmp_path, points)
  page = path.read_text()
  assert not re.search(r'(src|href)="https?:|url\(http|@import|<script', page)
  rows = re.findall(r'<tr>(.*?)</tr>', page)
  cells = [re.findall(r'<t[dh]>(.*?)</t[dh]>', row) for row in rows]
  assert ['base', '', '0.500', '0.600', '0.300', '0.400'] in cells
  assert ['mixed/sc_mis/usual', '2', *(f'{x:.3f} ± 0.000' for x in (0.7, 0.8, 0.5, 0.6))] in cells
  fell = ['mixed/grpo/usual', '2 of 2', 'seed 0: 10, seed 1: 10', '2 of 2', '0.200 ± 0.000']
  assert fell in cells
  gains = ['+0.200 ± 0.000', '+0.500 ± 0.000', '+0.200 ± 0.000', '+0.500 ± 0.000']
  assert ['mixed/sc_mis/usual', *gains] in cells
  assert ['mixed/grpo/usual', '-0.300 ± 0.000', '-', '-0.300 ± 0.000', '-'] in cells
  assert ['mixed/sc_mis/usual', '0 of 2', '-', '0 of 2', '0.600 ± 0.000'] in cells
  ratios = [row for row in cells if row[0] == 'mixed/sc_mis/usual' and len(row) == 7]
  assert [(row[3], row[6]) for row in ratios] == [('4.00', '0.80')] * 2  # of all, and at first
  text = (tmp_path / 'tables.md').read_text()
  assert '| base |  | 0.500 | 0.600 | 0.300 | 0.400 |' in text.splitlines()
  assert f'| {" | ".join(fell)} |' in text.splitlines()
  assert re.findall(r'^## (.*)$', text, re.M) == re.findall(r'<h2>(.*?)</h2>', page)[:8]
  pictures = {p.name for p in (tmp_path / 'figures').iterdir()}
  assert {
    'pass_mixed_usual.png',
    'kl_by_source_mixed_usual.png',
    'drift_mixed_usual.png',
  } <= pictures
  assert page.count('<svg') == len(pictures)
  with open(tmp_path / 'points.csv', newline='') as file:
    table = list(csv.DictReader(file))
  assert len(table) == len(points)
  assert [float(row['eval/heldout/pass@1']) for row in table[:3]] == [0.5, 0.6, 0.7]
  assert {row['seed'] for row in table} == {'0', '1'}


def test_a_nucleus_has_no_tail():
  points = _run([0.5, 0.6], arm='sc_mis') + _run([0.5, 0.6], arm='sc_mis_topp')
  for point in points:
    if point['update']:
      point['train/head_share'] = float(point['arm'] == 'sc_mis')
  (table,) = [table for table in study.tables(points) if table.heading == 'Mismatch']
  assert [row[table.header.index('tail ratio')] for row in table.rows] == ['2.000', '-']
  assert data.with_tails(points) != points
  (_, figure) = study.draw(points)['tail_ratio_mixed_usual']
  assert {line.get_label() for line in figure.axes[0].get_lines()} >= {'sc_mis'}
  assert 'sc_mis_topp' not in {line.get_label() for line in figure.axes[0].get_lines()}


def test_the_start_is_before_anything_fails():
  points = _run([0.5, 0.6, 0.0], seed=0, kl=1.0) + _run([0.5, 0.6, 0.0], seed=1, kl=3.0)
  assert [(p['seed'], p['update']) for p in data.early(points)] == [(0, 10), (1, 10)]
  (table,) = [t for t in study.tables(points) if t.heading == 'Mismatch in the first 10 updates']
  assert table.rows[0][1] == '2.00e+00 ± 1.00e+00'


def test_the_base_is_a_line(points):
  (_, figure) = study.draw(points)['pass_mixed_usual']
  lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
  assert {'grpo', 'sc_mis', 'base'} == set(lines)
  np.testing.assert_allclose(lines['base'].get_ydata(), 0.5)
  np.testing.assert_allclose(lines['sc_mis'].get_ydata(), [0.5, 0.6, 0.7])
