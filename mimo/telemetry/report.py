"""The report of a run: one HTML file that holds its figures, tables and configuration.

It is drawn from metrics.jsonl, so it can be drawn again at any time, and it fetches nothing.
"""

from __future__ import annotations

import html
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mimo.telemetry import figures, names, writers

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; margin: 0 auto;
  max-width: 1040px; padding: 24px; }}
h1 {{ font-size: 24px; margin: 0 0 4px; }}
h2 {{ font-size: 18px; margin: 32px 0 8px; }}
.lead, .note {{ color: #555; }}
.note {{ font-size: 13px; }}
table {{ border-collapse: collapse; margin: 8px 0; }}
th, td {{ padding: 4px 12px; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ font-weight: 600; }}
svg {{ max-width: 100%; height: auto; }}
pre {{ background: #f6f6f6; padding: 12px; overflow-x: auto; font-size: 13px; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{body}
</body>
</html>
"""

_COST_NOTE = (
  'Modelled cost is the turns counted times a stated price per turn: what the fleet would cost at '
  'the throughput its configuration states, not what this machine cost. As-billed cost is the time '
  "that each pool's replicas were held times their list price, idle time included."
)


def write(
  path: str | os.PathLike[str],
  *,
  metrics: str | os.PathLike[str],
  config: Mapping[str, Any],
  title: str,
) -> pathlib.Path:
  """Draws the report and puts it in place whole.

  Args:
    path: the HTML file.
    metrics: a run's metrics.jsonl.
    config: the run's resolved configuration, JSON values.
    title: the heading.

  Returns:
    `path`.

  Raises:
    ValueError: the metrics hold no record.
  """
  records = writers.read(metrics)
  if not records:
    raise ValueError(f'{metrics} holds no record; expected the metrics of a run')
  series = figures.to_series(records)
  path = pathlib.Path(path)
  partial = path.with_name(path.name + '.partial')
  partial.write_text(render(series, config, title), encoding='utf-8')
  os.replace(partial, path)
  return path


def render(series: figures.Series, config: Mapping[str, Any], title: str) -> str:
  """Returns the page."""
  parts = [section('Result', _scores(series)), section('By source', _sources(series))]
  for heading, draw in figures.ALL.items():
    figure = draw(series)
    if figure is not None:
      note = f'<p class="note">{_COST_NOTE}</p>' if draw is figures.cost else ''
      parts.append(section(heading, figures.svg(figure) + note))
  dumped = html.escape(json.dumps(config, indent=2, sort_keys=True))
  parts.append(
    f'<h2>Configuration</h2><details><summary>Every value</summary><pre>{dumped}</pre></details>'
  )
  return PAGE.format(title=html.escape(title), lead=_lead(series), body='\n'.join(parts))


def _lead(series: figures.Series) -> str:
  steps = series[names.REWARD][0] if names.REWARD in series else np.zeros(1, np.int64)
  text = f'{steps[-1]} updates'
  for label, name in (('modelled', 'cost/modelled_usd_total'), ('billed', 'cost/billed_usd_total')):
    if name in series and np.isfinite(series[name][1][-1]):
      text += f', {label} sampling cost ${series[name][1][-1]:.4g}'
  return html.escape(text)


def _scores(series: figures.Series) -> str:
  """A row by split and k: the base, the best and the last evaluation."""
  rows = []
  for split, ks in figures.eval_splits(series).items():
    for k in ks:
      name = names.of_eval(split, f'pass@{k}')
      steps, means = series[name]
      errors = (
        series[f'{name}_error'][1] if f'{name}_error' in series else np.full(len(means), np.nan)
      )
      if len(errors) != len(means) or not np.isfinite(means).any():
        continue
      best = int(np.nanargmax(means))
      shown = [f'{means[i]:.3f} ± {errors[i]:.3f}' for i in (0, best, -1)]
      rows.append(
        [
          f'{split}, pass@{k}',
          shown[0] if steps[0] == 0 else '-',
          f'{shown[1]} (update {steps[best]})',
          f'{shown[2]} (update {steps[-1]})',
          f'{means[-1] - means[0]:+.3f}' if steps[0] == 0 else '-',
        ]
      )
  return table(['', 'base', 'best', 'last', 'last - base'], rows)


def _sources(series: figures.Series) -> str:
  """A row by pool: means over the run."""
  columns: dict[str, tuple[str, Callable[[np.ndarray], float], str]] = {
    'tokens trained': (names.TOKENS, np.nansum, '{:,.0f}'),
    'KL, nats': (names.KL, np.nanmean, '{:.2e}'),
    'masked': (names.MASKED_SHARE, np.nanmean, '{:.3%}'),
    'tail ratio': (names.TAIL_RATIO, np.nanmean, '{:.3f}'),
    'staleness, updates': ('staleness_mean_updates', np.nanmean, '{:.2f}'),
    'reward': ('reward', np.nanmean, '{:.3f}'),
  }
  rows = []
  for pool in names.sources(series):
    row = [pool]
    for name, reduce, spec in columns.values():
      key = names.of_source(pool, name)
      values = series[key][1] if key in series else np.array([np.nan])
      row.append(spec.format(reduce(values)) if np.isfinite(values).any() else '-')
    for book in ('modelled', 'billed'):
      key = f'cost/{book}_usd_total/{pool}'
      value = series[key][1][-1] if key in series else np.nan
      row.append(f'{value:.4f}' if np.isfinite(value) else 'not known')
    rows.append(row)
  return table(['pool', *columns, 'modelled $', 'billed $'], rows)


def section(heading: str, content: str) -> str:
  """Returns a part of the page; nothing where it has no content."""
  return f'<h2>{html.escape(heading)}</h2>\n{content}' if content else ''


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """Returns an HTML table; nothing where it has no row."""
  if not rows:
    return ''
  head = ''.join(f'<th>{html.escape(cell)}</th>' for cell in header)
  body = ''.join(
    '<tr>' + ''.join(f'<td>{html.escape(cell)}</td>' for cell in row) + '</tr>' for row in rows
  )
  return f'<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
