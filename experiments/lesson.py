"""What the notebooks share: where things go, how figures are shown, and the short form.

MIMO_NOTEBOOK_SHORT=1      runs every notebook in seconds, as the tests do
MIMO_NOTEBOOK_OUT=DIR      where figures and runs go, in place of runs/notebooks
MIMO_NOTEBOOK_RESULTS=DIR  finished cells of a grid, in place of experiments/results/ff4595f
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import pathlib
import sys
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import matplotlib
from matplotlib.figure import Figure

from mimo.telemetry import figures

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHORT = os.environ.get('MIMO_NOTEBOOK_SHORT') == '1'
OUT = pathlib.Path(os.environ.get('MIMO_NOTEBOOK_OUT', ROOT / 'runs' / 'notebooks')).resolve()
RESULTS = pathlib.Path(
  os.environ.get('MIMO_NOTEBOOK_RESULTS', ROOT / 'experiments' / 'results' / 'ff4595f')
)

_T = TypeVar('_T')


def new_figure(rows: int, columns: int, *, width: float = 4.2, height: float = 3.0) -> Figure:
  """Returns an empty figure with room for so many panels of a size in inches."""
  return Figure(figsize=(width * columns, height * rows), layout='constrained')


def show(figure: Figure, name: str, *, again: bool = False) -> None:
  """Saves a figure as NAME.png under `OUT`, and shows it where this is a notebook.

  Args:
    figure: what to show.
    name: of the file.
    again: replaces what the cell has shown before: a figure that is redrawn.
  """
  OUT.mkdir(parents=True, exist_ok=True)
  path = OUT / f'{name}.png'
  with matplotlib.rc_context(figures.STYLE):
    figure.savefig(path, dpi=110)
  if 'ipykernel' not in sys.modules:
    print(path)
    return
  from IPython import display

  if again:
    display.clear_output(wait=True)
  display.display(display.Image(filename=str(path)))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
  """Prints rows under a header, numbers to three significant digits."""
  shown = [[f'{x:.3g}' if isinstance(x, float) else str(x) for x in row] for row in rows]
  widths = [max(map(len, column)) for column in zip(header, *shown, strict=True)]
  for row in (header, *shown):
    print('  '.join(f'{text:<{width}}' for text, width in zip(row, widths, strict=True)).rstrip())


def wait(work: Coroutine[Any, Any, _T]) -> _T:
  """Returns what a coroutine returns. In a thread: a notebook's own event loop already runs."""
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    return thread.submit(asyncio.run, work).result()
