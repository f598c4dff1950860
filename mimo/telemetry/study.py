"""The report of a study: figures and tables over its cells, drawn from their points.

report.html holds all of it, tables.md its tables, figures/ each figure as PNG, and points.csv every
point with its seed.
"""

from __future__ import annotations

import csv
import html
import io
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mimo.telemetry import figures, names, report
from mimo.telemetry import study_data as data
from mimo.telemetry.study_data import Condition, Point

_LABELS = ('fleet', 'arm', 'staleness', 'seed', 'update')
_USUAL = 'usual'

_Rows = tuple[list[str], list[list[str]]]  # the header, and the rest

# File name -> (heading, name of the number, axis label, logarithmic, a line to compare with).
_DIAGNOSTICS: Mapping[str, tuple[str, str, str, bool, float | None]] = {
  'kl': ('Sampler-trainer KL', 'train/kl', 'KL(q || p), nats per token', True, None),
  'masked': ('Masked share', 'train/masked_share', 'share of trained tokens', False, None),
  'tail_ratio': ('Tail ratio', 'train/rho', '(1 - Q) / (1 - P), mean', True, 1.0),
  'effective_sample': (
    'Effective sample size',
    'train/effective_sample',
    '(sum r)² / (N sum r²)',
    False,
    1.0,
  ),
  'drift': ('Drift', 'train/drift', 'norm of mean-score term / covariance term', True, 1.0),
  'entropy': ('Entropy', 'train/entropy', 'nats per token', False, None),
  'reward': ('Reward in training', names.REWARD, 'mean reward', False, None),
  'staleness': ('Staleness', names.STALENESS, 'updates, mean over tokens', False, None),
}

_NOTE = (
  'Lines are means over seeds, bands one standard deviation over seeds. The base policy is the '
  f'dashed line. A run has collapsed from the update on after which its held-out pass@1 stays '
  f'below the base less {data.COLLAPSE_ERRORS:g} standard errors. Cost is modelled: turns counted '
  'times list price over a stated throughput, not a measured one; staleness comes of a simulated '
  'fleet.'
)


class Table(NamedTuple):
  """A table of the report; its cells are text."""

  heading: str
  header: list[str]
  rows: list[list[str]]

  def markdown(self) -> str:
    """Returns it as Markdown, without its heading."""
    lines = [self.header, ['---'] * len(self.header), *self.rows]
    return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def write(directory: pathlib.Path, points: Sequence[Point]) -> pathlib.Path:
  """Draws the report of some points into a directory. Returns the HTML file."""
  drawn = draw(points)
  pictures = directory / 'figures'
  pictures.mkdir(parents=True, exist_ok=True)
  for name, (_, figure) in drawn.items():
    with matplotlib.rc_context(figures.STYLE):
      figure.savefig(pictures / f'{name}.png', dpi=120, metadata={'Software': None})
  _put(directory / 'points.csv', _csv(points))
  parts = [f'## {table.heading}\n\n{table.markdown()}\n' for table in tables(points)]
  _put(directory / 'tables.md', '\n'.join(parts))
  path = directory / 'report.html'
  _put(path, render(points, drawn))
  return path


def draw(points: Sequence[Point]) -> dict[str, tuple[str, Figure]]:
  """Returns (heading, figure) by file name."""
  points = data.with_tails(points)
  groups: dict[tuple[str, str], dict[Condition, list[Point]]] = {}
  for condition, own in data.conditions(points).items():
    groups.setdefault((condition.fleet, condition.staleness), {})[condition] = own
  arms = sorted({condition.arm for condition in data.conditions(points)})
  out = {}
  for (fleet, staleness), group in groups.items():
    where = f'{fleet} fleet' + ('' if staleness == _USUAL else f', staleness {staleness}')
    suffix = f'{fleet}_{staleness}'
    out[f'pass_{suffix}'] = (f'pass@k, {where}', _scores(points, group, arms))
    for name, (heading, number, label, log, line) in _DIAGNOSTICS.items():
      figure = _lines(group, arms, number, label, log=log, line=line)
      if figure is not None:
        out[f'{name}_{suffix}'] = (f'{heading}, {where}', figure)
    figure = _by_source(group)
    if figure is not None:
      out[f'kl_by_source_{suffix}'] = (f'KL by source, {where}', figure)
  return out


def tables(points: Sequence[Point]) -> list[Table]:
  """Returns the tables that have rows."""
  points = data.with_tails(points)
  early = data.early(points)
  first = f'the first {early[0]["update"]} updates' if early else ''
  every = [
    Table('Scores', *_scores_at_the_end(points)),
    Table('Effects', *_effects(points)),
    Table('Collapses', *_collapses(points)),
    Table('Mismatch', *_mismatch(points)),
    Table(f'Mismatch in {first}', *_mismatch(early)),
    Table('KL by source', *_sources(points)),
    Table('Mixed against homogeneous', *_fleets(points)),
    Table(f'Mixed against homogeneous in {first}', *_fleets(early)),
  ]
  return [table for table in every if table.rows]


def render(points: Sequence[Point], drawn: Mapping[str, tuple[str, Figure]]) -> str:
  """Returns the page."""
  parts = [f'<p class="note">{html.escape(_NOTE)}</p>']
  parts += [report.section(t.heading, report.table(t.header, t.rows)) for t in tables(points)]
  parts += [report.section(heading, figures.svg(figure)) for heading, figure in drawn.values()]
  seeds = {(p['fleet'], p['arm'], p['staleness'], p['seed']) for p in points}
  lead = f'{len(data.conditions(points))} conditions, {len(seeds)} runs'
  return report.PAGE.format(title='Ablation', lead=lead, body='\n'.join(filter(None, parts)))


def _scores(
  points: Sequence[Point], group: Mapping[Condition, Sequence[Point]], arms: Sequence[str]
) -> Figure:
  """pass@1 and pass@4 on both sets, one line by arm."""
  with matplotlib.rc_context(figures.STYLE):
    figure, axes = figures.new_figure('', 4)
    panels = [(split, k) for split in ('heldout', 'hard') for k in (1, 4)]
    for ax, (split, k) in zip(axes, panels, strict=True):
      name = names.of_eval(split, f'pass@{k}')
      for condition, own in group.items():
        _line(ax, own, name, condition.arm, arms)
      start, _ = data.base(points, name)
      if math.isfinite(start):
        ax.axhline(start, color='#777777', ls='--', lw=1, label='base')
      ax.set_title(f'pass@{k}, {"full" if split == "heldout" else split} set')
      ax.set_ylim(bottom=0.0)
    if axes[-1].get_legend_handles_labels()[0]:
      axes[-1].legend(loc='center left', bbox_to_anchor=(1.0, 0.5))
    return figure


def _lines(
  group: Mapping[Condition, Sequence[Point]],
  arms: Sequence[str],
  name: str,
  label: str,
  *,
  log: bool,
  line: float | None,
) -> Figure | None:
  """One number, one line by arm; None where nothing has it."""
  with matplotlib.rc_context(figures.STYLE):
    figure, (ax,) = figures.new_figure('', 1)
    anything = [_line(ax, own, name, c.arm, arms, log=log) for c, own in group.items()]
    if not any(anything):
      return None
    if line is not None:
      ax.axhline(line, color='#777777', ls='--', lw=1)
    if log:
      ax.set_yscale('log')
    ax.set_ylabel(label)
    ax.legend(loc='center left', bbox_to_anchor=(1.0, 0.5))
    return figure


def _line(
  ax: Axes, own: Sequence[Point], name: str, arm: str, arms: Sequence[str], *, log: bool = False
) -> bool:
  """Draws one condition's line and band. Returns whether there is one."""
  curve = data.curve(own, name)
  if curve is None or (log and not (curve.mean > 0).any()):
    return False
  colour = figures.COLOURS[arms.index(arm) % len(figures.COLOURS)]
  low = curve.low.clip(min=curve.mean / 10) if log else curve.low
  ax.plot(curve.updates, curve.mean, color=colour, label=arm, lw=1.3)
  ax.fill_between(curve.updates, low, curve.high, color=colour, alpha=0.15, lw=0)
  return True


def _by_source(group: Mapping[Condition, Sequence[Point]]) -> Figure | None:
  """KL of each source, over all arms; None where there is one source or none."""
  own = [point for points in group.values() for point in points]
  pools = names.sources({name for point in own for name in point})
  if len(pools) < 2:
    return None
  with matplotlib.rc_context(figures.STYLE):
    figure, (ax,) = figures.new_figure('', 1)
    for pool in pools:
      _line(ax, own, names.of_source(pool, names.KL), pool, pools, log=True)
    ax.set_yscale('log')
    ax.set_ylabel('KL(q || p), nats per token, all arms')
    ax.legend(loc='center left', bbox_to_anchor=(1.0, 0.5))
    return figure


def _scores_at_the_end(points: Sequence[Point]) -> _Rows:
  columns = [(s, k, names.of_eval(s, f'pass@{k}')) for s in ('heldout', 'hard') for k in (1, 4)]
  rows = [['base', '', *(f'{data.base(points, name)[0]:.3f}' for *_, name in columns)]]
  for condition, own in data.conditions(points).items():
    cells = [data.last(own, name).text() for *_, name in columns]
    rows.append([str(condition), str(len(data.runs(own))), *cells])
  header = [f'pass@{k}, {"full" if split == "heldout" else split}' for split, k, _ in columns]
  return ['at the end', 'seeds', *header], rows


def _effects(points: Sequence[Point]) -> _Rows:
  """What an arm gains over the base, and over no correction on the same seeds."""
  known = data.conditions(points)
  rows = []
  for condition, own in known.items():
    row = [str(condition)]
    for split in ('heldout', 'hard'):
      name = names.of_eval(split, 'pass@1')
      row.append(data.gain(own, name).text('+.3f'))
      plain = known.get(condition._replace(arm='grpo'))
      same = condition.arm == 'grpo' or plain is None
      row.append('-' if same else data.against(own, plain or (), name).text('+.3f'))
    rows.append(row)
  header = [f'{what}, {split}' for split in ('full', 'hard') for what in ('over base', 'over grpo')]
  return ['pass@1 at the end', *header], rows


def _collapses(points: Sequence[Point]) -> _Rows:
  floor = data.floor_of(points)
  rows = []
  for condition, own in data.conditions(points).items():
    runs = data.runs(own)
    found = {seed: data.collapse(run, floor) for seed, run in runs.items()}
    when = [f'seed {seed}: {update}' for seed, update in found.items() if update is not None]
    lows = [data.lowest(run) for run in runs.values()]
    fell = sum(low < floor for low in lows)
    many = f' of {len(runs)}'
    rows.append(
      [
        str(condition),
        f'{len(when)}{many}',
        ', '.join(when) or '-',
        f'{fell}{many}',
        data.spread(lows).text(),
      ]
    )
  header = [f'held-out pass@1 below {floor:.3f}', 'to the end', 'from update', 'ever', 'lowest']
  return header, rows


def _mismatch(points: Sequence[Point]) -> _Rows:
  columns = {
    'KL, nats': ('train/kl', '.2e'),
    'masked': ('train/masked_share', '.4f'),
    'tail ratio': ('train/rho', '.3f'),
    'effective sample': ('train/effective_sample', '.3f'),
    'mean-score norm': ('train/mean_score_norm', '.3f'),
    'covariance norm': ('train/covariance_norm', '.3f'),
    'drift': ('train/drift', '.3f'),
    'staleness': (names.STALENESS, '.2f'),
    'versions an episode': ('rollout/versions_per_episode', '.2f'),
  }
  rows = [
    [str(condition), *(data.whole(own, name).text(spec) for name, spec in columns.values())]
    for condition, own in data.conditions(points).items()
  ]
  return ['means over updates', *columns], rows


def _sources(points: Sequence[Point]) -> _Rows:
  rows = []
  for condition, own in data.conditions(points).items():
    for pool in names.sources({name for point in own for name in point}):
      cells = [data.whole(own, names.of_source(pool, n)) for n in (names.KL, names.MASKED_SHARE)]
      rows.append([str(condition), pool, cells[0].text('.2e'), cells[1].text('.4f')])
  return ['means over updates', 'source', 'KL, nats', 'masked'], rows


def _fleets(points: Sequence[Point]) -> _Rows:
  """Ratios of what the same arm measured on the two fleets."""
  known = data.conditions(points)
  rows = []
  for condition, own in known.items():
    other = known.get(condition._replace(fleet='homogeneous'))
    if condition.fleet == 'homogeneous' or other is None:
      continue
    row = [str(condition)]
    for name, spec in (('train/kl', '.2e'), (names.MODELLED_USD, '.5f')):
      ours, theirs = data.whole(own, name), data.whole(other, name)
      ratio = ours.mean / theirs.mean if theirs.runs and theirs.mean else math.nan
      row += [ours.text(spec), theirs.text(spec), f'{ratio:.2f}']
    rows.append(row)
  header = ['', 'KL', 'homogeneous', 'ratio', 'modelled $ an update', 'homogeneous', 'ratio']
  return header, rows


def _csv(points: Sequence[Point]) -> str:
  columns = sorted({name for point in points for name in point} - {*_LABELS})
  text = io.StringIO()
  writer = csv.writer(text, lineterminator='\n')
  writer.writerow([*_LABELS, *columns])
  for point in points:
    writer.writerow([*(point[name] for name in _LABELS), *(point.get(n, '') for n in columns)])
  return text.getvalue()


def _put(path: pathlib.Path, text: str) -> None:
  """Writes a file whole or not at all."""
  partial = path.with_name(path.name + '.partial')
  partial.write_text(text, encoding='utf-8')
  os.replace(partial, path)
