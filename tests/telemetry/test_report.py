import html.parser
import json
import math
import re

import numpy as np
import pytest

from mimo.telemetry import figures, report, writers

POOLS = ('a100_bf16', 'b200_nvfp4', 'h100_fp8')


def fake_run(path, *, updates=12, unknown=()):
  """Writes metrics such as a run writes."""
  writer = writers.JsonlWriter(path, keep_through=None)
  rng = np.random.default_rng(0)
  for step in range(updates + 1):
    if step % 4 == 0:
      for split, tasks, base in (('heldout', 128, 0.5), ('hard', 32, 0.1)):
        values = {f'eval/{split}/tasks': tasks}
        for k in (1, 2, 4):
          values[f'eval/{split}/pass@{k}'] = base + 0.01 * step + 0.05 * k
          values[f'eval/{split}/pass@{k}_error'] = 0.02
        writer.scalars(step, values)
    if not step:
      continue
    scalars = {
      'rollout/reward': 0.5 + 0.01 * step,
      'rollout/staleness_mean_updates': 1.2,
      'train/kl': 1e-3,
      'train/masked_share': 0.01,
      'train/masked_low': 0.004,
      'train/masked_high': 0.006,
      'train/rho': 1.1,
      'train/rho_max': 40.0,
    }
    totals = np.zeros(2)
    for i, pool in enumerate(POOLS):
      scalars |= {
        f'source/{pool}/tokens': 1000,
        f'source/{pool}/kl': 10.0 ** (-4 + i) * (1 + 0.2 * rng.random()),
        f'source/{pool}/masked_share': 0.004 * i,
        f'source/{pool}/rho': 0.0 if i == 0 else 1 + 0.1 * i,
        f'source/{pool}/reward': 0.5,
        f'source/{pool}/staleness_mean_updates': 1.0 + i / 10,
        f'cost/modelled_usd_total/{pool}': math.nan if pool in unknown else 0.01 * step * (i + 1),
        f'cost/billed_usd_total/{pool}': 0.02 * step,
      }
      totals += [scalars[f'cost/modelled_usd_total/{pool}'], 0.02 * step]
    scalars |= {'cost/modelled_usd_total': totals[0], 'cost/billed_usd_total': totals[1]}
    writer.scalars(step, scalars)
    writer.histograms(step, {'rollout/staleness_updates': writers.Histogram.of([1.0], [0, 1, 2])})
  writer.close()
  return path


class _Parser(html.parser.HTMLParser):
  def __init__(self):
    super().__init__()
    self.tags, self.links = [], []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.links += [value for name, value in attrs if name in ('src', 'href', 'xlink:href')]


def test_one_file_with_figures_tables_and_nothing_to_fetch(tmp_path):
  metrics = fake_run(tmp_path / 'metrics.jsonl')
  config = {'arm': 'sc_mis_topp', 'note': '<b>&'}
  out = report.write(tmp_path / 'report.html', metrics=metrics, config=config, title='A <run>')
  text = out.read_text()
  parser = _Parser()
  parser.feed(text)
  assert parser.tags.count('svg') == 7 and parser.tags.count('table') == 2
  assert all(link.startswith('#') for link in parser.links)
  assert not re.search(r'url\((?!#)|@import|<script|<link|<img', text)
  assert 'A &lt;run&gt;' in text and '&lt;b&gt;&amp;' in text
  # Base 0.5 + 0.05, last + 0.12; the table says both and their difference.
  assert '<td>heldout, pass@1</td><td>0.550 ± 0.020</td>' in text
  assert '0.670 ± 0.020 (update 12)' in text and '<td>+0.120</td>' in text
  # Means over the run: 12 updates of 1000 tokens; modelled 0.01 x 12 x 3.
  row = re.search(r'<tr><td>h100_fp8</td>(.*?)</tr>', text)[1]
  assert '<td>12,000</td>' in row and '<td>0.3600</td>' in row and '<td>0.2400</td>' in row
  assert not list(tmp_path.glob('*.partial'))
  again = report.write(tmp_path / 'b.html', metrics=metrics, config=config, title='A <run>')
  assert again.read_text() == text


def test_unknown_cost_is_said_and_not_drawn(tmp_path):
  metrics = fake_run(tmp_path / 'metrics.jsonl', unknown=('h100_fp8',))
  text = report.write(tmp_path / 'r.html', metrics=metrics, config={}, title='t').read_text()
  assert '<td>not known</td>' in text and 'its cost is not known' in text
  assert 'modelled sampling cost' not in text and 'billed sampling cost $0.72' in text


def test_a_run_with_an_evaluation_only(tmp_path):
  writer = writers.JsonlWriter(tmp_path / 'm', keep_through=None)
  writer.scalars(0, {'eval/heldout/pass@1': 0.5, 'eval/heldout/pass@1_error': math.nan})
  writer.close()
  text = report.write(tmp_path / 'r', metrics=tmp_path / 'm', config={}, title='t').read_text()
  assert text.count('<svg') == 1 and '0.500 ± nan' in text


def test_refuses_an_empty_run(tmp_path):
  with pytest.raises(ValueError, match='holds no record; expected the metrics of a run'):
    report.write(tmp_path / 'r.html', metrics=tmp_path / 'none', config={}, title='t')
  assert not (tmp_path / 'r.html').exists()


def test_series_take_the_last_record_of_a_step():
  records = [
    {'step': 2, 'a': 1.0},
    {'step': 1, 'a': 0.0, 'b': None},
    {'step': 2, 'a': 3.0, 'h': {'edges': []}},
  ]
  series = figures.to_series(records)
  np.testing.assert_array_equal(series['a'], [[1, 2], [0, 3]])
  assert math.isnan(series['b'][1][0]) and 'h' not in series


def test_figure_shows_the_base_as_a_line_and_every_pool(tmp_path):
  series = figures.to_series(writers.read(fake_run(tmp_path / 'm')))
  assert list(figures.eval_splits(series)) == ['heldout', 'hard']
  axes = figures.pass_at_k(series).axes
  base = [line for line in axes[0].lines if line.get_linestyle() == '--' and len(line.get_ydata())]
  np.testing.assert_allclose([line.get_ydata()[0] for line in base], [0.55, 0.6, 0.7])
  labels = [text.get_text() for text in figures.kl(series).axes[0].get_legend().get_texts()]
  assert labels == [*POOLS, 'all']
  assert figures.kl(series).axes[0].get_yscale() == 'log'
  assert figures.cost({}) is None and figures.pass_at_k({}) is None and figures.kl({}) is None


def test_all_zero_on_a_log_axis():
  series = figures.to_series([json.loads('{"step": 1, "train/kl": 0.0}')])
  # Drawn without a warning, on a linear one.
  assert figures.svg(figures.kl(series)).startswith('<svg')


def test_a_run_without_tails_says_so():
  series = figures.to_series([{'step': 1, 'train/rho': 0.0, 'source/a/rho': 0.0}])
  (text,) = figures.tail_ratio(series).axes[0].texts
  assert text.get_text() == 'every support was recorded whole:\nthere is no tail'
