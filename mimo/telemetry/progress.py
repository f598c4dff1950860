"""What a person sees while a run goes on: a progress bar and one line per update.

On a terminal the bar stays below the lines; elsewhere (a file, a CI log) only lines are written.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TextIO

import tqdm

from mimo.telemetry import console, names


class Progress:
  """A bar over updates."""

  def __init__(self, total: int, *, done: int, stream: TextIO | None) -> None:
    """Shows a bar at `done` of `total` updates on `stream` (None: standard output)."""
    self._screen = console.Screen(sys.stdout if stream is None else stream)
    self._total = total
    self._bar = (
      tqdm.tqdm(
        total=total, initial=done, unit='update', file=self._screen, dynamic_ncols=True, leave=False
      )
      if self._screen.isatty()
      else None
    )

  def update(self, step: int, scalars: Mapping[str, float]) -> None:
    """Writes the line of update `step` and moves the bar."""
    self.note(update_line(step, self._total, scalars))
    if self._bar is not None:
      self._bar.update(step - self._bar.n)

  def note(self, text: str) -> None:
    """Writes a line of its own."""
    if self._bar is None:
      self._screen.write(f'{text}\n')
      self._screen.flush()
    else:
      self._bar.write(text, file=self._screen)

  def close(self) -> None:
    """Takes the bar away. May be called twice."""
    if self._bar is not None:
      self._bar.close()
      self._bar = None


def update_line(step: int, total: int, scalars: Mapping[str, float]) -> str:
  """Returns one update as one line; what wasn't measured shows as a dash."""

  def show(name: str, spec: str, scale: float = 1.0) -> str:
    value = scalars.get(name, math.nan)
    return f'{value * scale:{spec}}' if math.isfinite(value) else '-'

  by_source = ' '.join(
    f'{pool} {show(names.of_source(pool, names.KL), ".1e")}' for pool in names.sources(scalars)
  )
  width = len(str(total))
  return '  '.join(
    [
      f'update {step:{width}d}/{total}',
      f'reward {show(names.REWARD, ".3f")}',
      f'pass@1 {show(names.PASS_1, ".3f")}',
      f'KL {by_source or "-"}',
      f'masked {show(names.of_train(names.MASKED_SHARE), ".2f", 100.0)}%',
      f'stale {show(names.STALENESS, ".1f")}',
      f'sampled {show(names.SAMPLER_SPEED, ".0f")} tok/s',
      f'trained {show(names.TRAINER_SPEED, ".0f")} tok/s',
      f'modelled ${show(names.MODELLED_USD, ".4f")}',
    ]
  )


def evaluation_line(of: str, summary: Mapping[str, Mapping[str, float]]) -> str:
  """Returns one evaluation as one line: pass@k by split with standard errors.

  Args:
    of: the policy evaluated.
    summary: numbers by split, `pass@k` and `pass@k_error`; an incomplete one has `missing` > 0.
  """
  parts = []
  for split, values in summary.items():
    scores = [
      f'{name} {value:.3f} ± {values[name + "_error"]:.3f}'
      for name, value in values.items()
      if name.startswith('pass@') and name.removeprefix('pass@').isdigit()
    ]
    if not scores:
      scores = [f'incomplete, {values["missing"]:.0f} samples are missing']
    parts.append(f'{split}: {", ".join(scores)}')
  return f'evaluation of {of}  {"  |  ".join(parts)}'
