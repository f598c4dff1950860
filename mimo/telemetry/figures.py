"""The report's figures, drawn from a run's metric records. Nothing here needs a display or network.

Each function takes `Series` and returns a figure, or None where the run measured nothing of it. A
pool has one colour in every figure.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from mimo.telemetry import names

# Name of a scalar -> (steps [N] int64, values [N] float64), in order of steps.
Series = dict[str, tuple[np.ndarray, np.ndarray]]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9', '#8c6bb1', '#666666')
OVERALL = '#222222'
STYLE = {
  'axes.axisbelow': True,
  'axes.grid': True,
  'axes.spines.right': False,
  'axes.spines.top': False,
  'axes.titlesize': 11,
  'font.size': 9,
  'grid.color': '#e3e3e3',
  'legend.frameon': False,
  'lines.linewidth': 1.5,
  'svg.fonttype': 'none',
  'svg.hashsalt': 'mimo',
}


def to_series(records: Iterable[Mapping[str, Any]]) -> Series:
  """Gathers records of one step each into series; of one name and step the last record counts."""
  points: dict[str, dict[int, float]] = {}
  for record in records:
    for name, value in record.items():
      if name != 'step' and (value is None or isinstance(value, int | float)):
        points.setdefault(name, {})[record['step']] = np.nan if value is None else float(value)
  return {
    name: (np.array(sorted(at), np.int64), np.array([at[step] for step in sorted(at)]))
    for name, at in points.items()
  }


def svg(figure: Figure) -> str:
  """Returns the figure as an <svg> element, the same for the same figure."""
  buffer = io.StringIO()
  with matplotlib.rc_context(STYLE):
    figure.savefig(buffer, format='svg', metadata={'Date': None, 'Creator': None})
  text = buffer.getvalue()
  return text[text.index('<svg') :]


def values_at(series: Series, name: str, steps: np.ndarray) -> np.ndarray:
  """Returns a series' values at `steps`, NaN where it has none."""
  if name not in series:
    return np.full(len(steps), np.nan)
  known = dict(zip(*series[name], strict=True))
  return np.array([known.get(step, np.nan) for step in steps])


def eval_splits(series: Series) -> dict[str, list[int]]:
  """Returns, by split evaluated, the ks of its pass@k, the split with the most tasks first."""
  splits: dict[str, list[int]] = {}
  for name in series:
    parts = name.split('/')
    if len(parts) == 3 and parts[0] == 'eval' and parts[2].removeprefix('pass@').isdigit():
      splits.setdefault(parts[1], []).append(int(parts[2].removeprefix('pass@')))

  def tasks(split: str) -> float:
    count = names.of_eval(split, 'tasks')
    return -float(np.nanmax(series[count][1])) if count in series else 0.0

  return {split: sorted(splits[split]) for split in sorted(splits, key=lambda s: (tasks(s), s))}


def pass_at_k(series: Series) -> Figure | None:
  """pass@k of each evaluated split over updates; the base policy as a horizontal line."""
  splits = eval_splits(series)
  if not splits:
    return None
  with matplotlib.rc_context(STYLE):
    figure, axes = new_figure('', len(splits))
    for ax, (split, ks) in zip(axes, splits.items(), strict=True):
      for k, colour in zip(ks, COLOURS, strict=False):
        steps, means = series[names.of_eval(split, f'pass@{k}')]
        error_name = names.of_eval(split, f'pass@{k}_error')
        errors = values_at(series, error_name, steps)
        ax.errorbar(
          steps, means, errors, color=colour, marker='o', ms=3.5, capsize=2, label=f'pass@{k}'
        )
        if steps[0] == 0:
          ax.axhline(means[0], color=colour, ls='--', lw=1, alpha=0.7)
      ax.set_title(f'{split} tasks')
      ax.set_ylim(bottom=0.0)
      ax.set_ylabel('pass@k ± standard error')
      ax.plot([], [], color='#777777', ls='--', lw=1, label='base policy')
      ax.legend(ncols=2)
    return figure


def kl(series: Series) -> Figure | None:
  """KL from sampler to trainer by source, in nats per token."""
  return _by_source(
    series, names.KL, 'Sampler-trainer KL by source', 'KL(q || p), nats per token', log=True
  )


def masked(series: Series) -> Figure | None:
  """Share of tokens outside the masking range: by source, and overall low and high apart."""

  def finish(ax: Axes) -> None:
    for name, style in ((names.MASKED_LOW, ':'), (names.MASKED_HIGH, '--')):
      if names.of_train(name) in series:
        label = 'all, ratio too ' + name.removeprefix('masked_')
        ax.plot(*series[names.of_train(name)], color=OVERALL, ls=style, lw=1, label=label)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylim(bottom=0.0)

  return _by_source(
    series, names.MASKED_SHARE, 'Masked tokens', 'share of trained tokens', finish=finish
  )


def tail_ratio(series: Series) -> Figure | None:
  """Mean tail ratio rho by source, and the largest one."""

  def finish(ax: Axes) -> None:
    largest = names.of_train(names.TAIL_RATIO_MAX)
    if largest in series:
      steps, values = series[largest]
      ax.plot(steps, _positive(values), color=OVERALL, ls=':', lw=1, label='all, maximum')
    ax.axhline(1.0, color='#777777', lw=1, ls='--')

  # A source that always recorded its whole support has no tail, and reads 0.
  return _by_source(
    series,
    names.TAIL_RATIO,
    'Tail ratio',
    '(1 - Q) / (1 - P)',
    log=True,
    nothing='every support was recorded whole:\nthere is no tail',
    finish=finish,
  )


def reward(series: Series) -> Figure | None:
  """Reward of the episodes trained on, by source."""
  return _by_source(
    series, 'reward', 'Reward in training', 'mean reward', overall=names.REWARD, finish=_from_zero
  )


def staleness(series: Series) -> Figure | None:
  """Staleness of the tokens trained on, in updates, by source."""
  return _by_source(
    series,
    names.STALENESS.removeprefix('rollout/'),
    'Staleness',
    'updates behind the trainer, mean',
    overall=names.STALENESS,
    finish=_from_zero,
  )


def cost(series: Series) -> Figure | None:
  """Cumulative cost by pool, stacked: modelled on the left, as billed on the right."""
  books = {
    'Modelled: turns x stated price per turn': 'cost/modelled_usd_total',
    'As billed: time held x list price': 'cost/billed_usd_total',
  }
  pools = _cost_pools(series)
  if not pools:
    return None
  with matplotlib.rc_context(STYLE):
    figure, axes = new_figure('', len(books))
    for ax, (title, prefix) in zip(axes, books.items(), strict=True):
      steps = series[prefix][0]
      parts = np.array([values_at(series, f'{prefix}/{pool}', steps) for pool in pools])
      if np.isfinite(parts).all():
        ax.stackplot(
          steps, parts, labels=pools, colors=[_colour(pools, pool) for pool in pools], alpha=0.85
        )
        ax.set_ylim(bottom=0.0)
        ax.legend(loc='upper left')
      else:
        text = 'a pool states no throughput:\nits cost is not known'
        ax.text(0.5, 0.5, text, ha='center', va='center', transform=ax.transAxes)
      ax.set_title(title)
      ax.set_ylabel('US dollars since the start')
    return figure


ALL: Mapping[str, Callable[[Series], Figure | None]] = {
  'pass@k on tasks never trained on': pass_at_k,
  'Sampler-trainer KL': kl,
  'Masked share': masked,
  'Tail ratio': tail_ratio,
  'Cumulative cost': cost,
  'Reward': reward,
  'Staleness': staleness,
}


def _by_source(
  series: Series,
  name: str,
  title: str,
  label: str,
  *,
  overall: str = '',
  log: bool = False,
  nothing: str = '',
  finish: Callable[[Axes], None] | None = None,
) -> Figure | None:
  """One line by source and one over all; the text `nothing` where a log axis has no point."""
  overall = overall or names.of_train(name)
  pools = names.sources(series)
  drawn = [pool for pool in pools if names.of_source(pool, name) in series]
  if not drawn and overall not in series:
    return None
  with matplotlib.rc_context(STYLE):
    figure, (ax,) = new_figure(title, 1)
    lines = {pool: (names.of_source(pool, name), _colour(pools, pool)) for pool in drawn}
    if overall in series:
      lines['all'] = (overall, OVERALL)
    anything = False
    for shown, (key, colour) in lines.items():
      steps, values = series[key]
      values = _positive(values) if log else values
      anything |= bool(np.isfinite(values).any())
      ax.plot(steps, values, color=colour, label=shown, lw=2 if shown == 'all' else 1.3)
    ax.set_ylabel(label)
    if log and not anything:
      ax.text(0.5, 0.5, nothing, ha='center', va='center', transform=ax.transAxes)
      return figure
    if log:
      ax.set_yscale('log')
    if finish is not None:
      finish(ax)
    ax.legend(loc='center left', bbox_to_anchor=(1.0, 0.5))
    return figure


def new_figure(title: str, columns: int) -> tuple[Figure, list[Axes]]:
  """Returns a figure of some panels in a row over updates."""
  figure = Figure(figsize=(9.6 if columns == 1 else 4.8 * columns, 3.2), layout='constrained')
  FigureCanvasAgg(figure)
  axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
  for ax in axes:
    ax.set_xlabel('updates')
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
  if title:
    axes[0].set_title(title)
  return figure, axes


def _cost_pools(series: Series) -> list[str]:
  prefix = 'cost/billed_usd_total/'
  return sorted(name.removeprefix(prefix) for name in series if name.startswith(prefix))


def _colour(pools: list[str], pool: str) -> str:
  return COLOURS[pools.index(pool) % len(COLOURS)]


def _positive(values: np.ndarray) -> np.ndarray:
  return np.where(values > 0, values, np.nan)


def _from_zero(ax: Axes) -> None:
  ax.set_ylim(bottom=0.0)
