"""A study's points, sorted out: curves by condition, collapses, and means with their spread.

A point is one evaluation of one run: labels `fleet`, `arm`, `staleness`, `seed`, `update`, and
numbers by name. A condition is the first three labels; its runs differ in the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mimo.telemetry import names

Point = Mapping[str, Any]

PASS_1 = names.of_eval('heldout', 'pass@1')
# A run has collapsed once it stays this many standard errors below the base policy.
COLLAPSE_ERRORS = 3.0


class Condition(NamedTuple):
  """What the runs of a curve have in common."""

  fleet: str
  arm: str
  staleness: str

  def __str__(self) -> str:
    return '/'.join(self)


class Curve(NamedTuple):
  """A number over updates, over seeds: [N] each, NaN where no seed has it.

  Attributes:
    updates: int64.
    mean: float64.
    low, high: mean less and plus the standard deviation over seeds, or the mean for one seed.
  """

  updates: np.ndarray
  mean: np.ndarray
  low: np.ndarray
  high: np.ndarray


class Spread(NamedTuple):
  """A number over runs: mean, standard error of it (NaN for one run), and how many."""

  mean: float
  error: float
  runs: int

  def text(self, spec: str = '.3f') -> str:
    """Returns `mean ± error`, or a dash for nothing."""
    if not self.runs:
      return '-'
    error = f' ± {self.error:{spec.removeprefix("+")}}' if self.runs > 1 else ''
    return f'{self.mean:{spec}}{error}'


def conditions(points: Sequence[Point]) -> dict[Condition, list[Point]]:
  """Returns points by condition, in the order in which conditions come."""
  out: dict[Condition, list[Point]] = {}
  for point in points:
    out.setdefault(Condition(point['fleet'], point['arm'], point['staleness']), []).append(point)
  return out


def runs(points: Sequence[Point]) -> dict[int, list[Point]]:
  """Returns one condition's points by seed, in order of updates."""
  out: dict[int, list[Point]] = {}
  for point in sorted(points, key=lambda point: (point['seed'], point['update'])):
    out.setdefault(point['seed'], []).append(point)
  return out


def with_tails(points: Sequence[Point]) -> list[Point]:
  """Returns points without the tail ratio where supports are whole: no tail, and no such number."""
  tail = names.of_train(names.TAIL_RATIO)
  return [
    point
    if point.get('train/head_share', 1.0)
    else {name: value for name, value in point.items() if name != tail}
    for point in points
  ]


def early(points: Sequence[Point]) -> list[Point]:
  """Returns the first point of each run after its base: before what fails has failed."""
  out = []
  for own in conditions(points).values():
    for run in runs(own).values():
      out += [point for point in run if point['update'] > 0][:1]
  return out


def curve(points: Sequence[Point], name: str) -> Curve | None:
  """Returns a number of one condition over updates, None where no point has it."""
  at: dict[int, list[float]] = {}
  for point in points:
    if name in point and math.isfinite(point[name]):
      at.setdefault(point['update'], []).append(point[name])
  if not at:
    return None
  updates = sorted(at)
  mean = np.array([np.mean(at[u]) for u in updates])
  sd = np.array([np.std(at[u], ddof=1) if len(at[u]) > 1 else 0.0 for u in updates])
  return Curve(np.array(updates, np.int64), mean, mean - sd, mean + sd)


def base(points: Sequence[Point], name: str = PASS_1) -> tuple[float, float]:
  """Returns the base policy's score and its standard error over tasks, from all its evaluations.

  They differ in draws only, so the error is one evaluation's: that of other tasks of the kind.
  """
  scored = [point for point in points if point['update'] == 0 and name in point]
  if not scored:
    return math.nan, math.nan
  errors = [point[f'{name}_error'] for point in scored if f'{name}_error' in point]
  return float(np.mean([p[name] for p in scored])), float(np.mean(errors)) if errors else math.nan


def collapse(run: Sequence[Point], floor: float) -> int | None:
  """Returns the update from which on a run's held-out pass@1 stays below `floor`, None for never.

  Args:
    run: points of one run, in order.
    floor: such as the base's score less three standard errors.
  """
  since = None
  for point in run:
    if PASS_1 in point:
      since = (point['update'] if since is None else since) if point[PASS_1] < floor else None
  return since


def lowest(run: Sequence[Point]) -> float:
  """Returns the lowest held-out pass@1 of a run after its first update, NaN where it has none."""
  return min((p[PASS_1] for p in run if PASS_1 in p and p['update'] > 0), default=math.nan)


def floor_of(points: Sequence[Point]) -> float:
  """Returns the score below which a run of these has collapsed."""
  mean, error = base(points)
  return mean - COLLAPSE_ERRORS * error


def last(points: Sequence[Point], name: str) -> Spread:
  """Returns a number at the end of one condition's runs."""
  return spread([run[-1][name] for run in runs(points).values() if name in run[-1]])


def gain(points: Sequence[Point], name: str) -> Spread:
  """Returns how far a number rose from the start to the end of one condition's runs."""
  own = [run for run in runs(points).values() if name in run[0] and name in run[-1]]
  return spread([run[-1][name] - run[0][name] for run in own])


def against(points: Sequence[Point], other: Sequence[Point], name: str) -> Spread:
  """Returns by how much a number at the end exceeds another condition's, seed by seed.

  Runs of one seed share prompts, and what they share cancels.
  """
  theirs = runs(other)
  pairs = [(run[-1], theirs[seed][-1]) for seed, run in runs(points).items() if seed in theirs]
  return spread([a[name] - b[name] for a, b in pairs if name in a and name in b])


def whole(points: Sequence[Point], name: str) -> Spread:
  """Returns a number's mean over a whole run, over one condition's runs."""
  means = []
  for run in runs(points).values():
    values = [p[name] for p in run if name in p and math.isfinite(p[name])]
    if values:
      means.append(float(np.mean(values)))
  return spread(means)


def spread(values: Sequence[float]) -> Spread:
  """Returns the mean of some runs' numbers and its standard error."""
  values = [value for value in values if math.isfinite(value)]
  if not values:
    return Spread(math.nan, math.nan, 0)
  error = np.std(values, ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
  return Spread(float(np.mean(values)), float(error), len(values))
