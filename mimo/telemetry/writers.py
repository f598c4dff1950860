"""Where scalars and histograms go: a JSON-lines file, TensorBoard, Weights & Biases, or several.

A step counts the updates applied: 0 is the base policy. After a resume the records of later steps
than the checkpoint's, which the run is about to make again, are dropped where the format allows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorboardX


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
  """Counts of values by bin: bin i is [edges[i], edges[i + 1]), the last one closed."""

  edges: tuple[float, ...]
  counts: tuple[int, ...]
  total: float  # sum of the values
  squares: float  # sum of their squares

  @staticmethod
  def of(values: np.ndarray, edges: Sequence[float]) -> Histogram:
    """Counts `values`; those outside the edges are counted in the outermost bins."""
    values = np.asarray(values, np.float64).ravel()
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), np.asarray(edges, np.float64))
    return Histogram(
      tuple(float(edge) for edge in edges),
      tuple(int(count) for count in counts),
      float(values.sum()),
      float(np.square(values).sum()),
    )


class Writer(Protocol):
  """Takes what one step measured. What is written is on disk, or handed on, at `flush`."""

  def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None: ...

  def flush(self) -> None: ...

  def close(self) -> None: ...


class JsonlWriter:
  """One JSON object a line: `step`, then the scalars by name; non-finite ones are null.

  A histogram is written as `{"edges": [...], "counts": [...]}`.
  """

  def __init__(self, path: str | os.PathLike[str], *, keep_through: int | None) -> None:
    """Opens `path` to append.

    Args:
      path: the file.
      keep_through: keep records of this step and earlier, dropping the rest and any torn last
        line; None keeps nothing and starts afresh.
    """
    self._path = pathlib.Path(path)
    old = [] if keep_through is None else read(self._path)
    kept = [record for record in old if record['step'] <= keep_through]
    partial = self._path.with_name(self._path.name + '.partial')
    partial.write_text(''.join(_line(record) for record in kept), encoding='utf-8')
    os.replace(partial, self._path)
    self._file = self._path.open('a', encoding='utf-8')

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    self._file.write(_line({'step': step} | {name: _finite(v) for name, v in values.items()}))

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    if values:
      record = {n: {'edges': h.edges, 'counts': h.counts} for n, h in values.items()}
      self._file.write(_line({'step': step} | record))

  def flush(self) -> None:
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    if not self._file.closed:
      self.flush()
      self._file.close()


class TensorBoardWriter:
  """TensorBoard event files in `directory`."""

  def __init__(self, directory: str | os.PathLike[str], *, keep_through: int | None) -> None:
    """Opens new event files.

    Args:
      directory: made where it is missing.
      keep_through: TensorBoard hides later steps' records of earlier files; None where the run
        is new.
    """
    purge = 0 if keep_through is None else keep_through + 1
    self._writer = tensorboardX.SummaryWriter(str(directory), purge_step=purge)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    for name, value in values.items():
      self._writer.add_scalar(name, float(value), step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    for name, h in values.items():
      if sum(h.counts):
        self._writer.add_histogram_raw(
          name,
          min=h.edges[0],
          max=h.edges[-1],
          num=sum(h.counts),
          sum=h.total,
          sum_squares=h.squares,
          bucket_limits=list(h.edges[1:]),
          bucket_counts=list(h.counts),
          global_step=step,
        )

  def flush(self) -> None:
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class WandbWriter:
  """Weights & Biases, with its own mode and credentials from its environment variables."""

  def __init__(
    self,
    *,
    project: str,
    name: str,
    run_id: str,
    directory: str | os.PathLike[str],
    config: Mapping[str, Any],
  ) -> None:
    """Opens, or goes on with, the run `run_id`. Raises ValueError where wandb isn't installed."""
    try:
      import wandb
    except ImportError as error:
      raise ValueError(
        "Weights & Biases was asked for, but wandb isn't installed; expected "
        "`pip install 'mimo[wandb]'`, or the writer turned off"
      ) from error
    self._wandb = wandb
    self._run = wandb.init(
      project=project,
      name=name,
      id=run_id,
      resume='allow',
      dir=str(directory),
      config=dict(config),
    )

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log(dict(values), step=step)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    made = {
      name: self._wandb.Histogram(np_histogram=(np.asarray(h.counts), np.asarray(h.edges)))
      for name, h in values.items()
    }
    self._run.log(made, step=step)

  def flush(self) -> None:
    """Weights & Biases sends in the background."""

  def close(self) -> None:
    self._run.finish()


class MultiWriter:
  """Hands everything to each of `writers`, in order."""

  def __init__(self, writers: Iterable[Writer]) -> None:
    self._writers = tuple(writers)

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    for writer in self._writers:
      writer.scalars(step, values)

  def histograms(self, step: int, values: Mapping[str, Histogram]) -> None:
    for writer in self._writers:
      writer.histograms(step, values)

  def flush(self) -> None:
    for writer in self._writers:
      writer.flush()

  def close(self) -> None:
    for writer in self._writers:
      writer.close()


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the records of a JSON-lines file in order; [] where there is no file.

  A last line without its newline was torn by a kill, and is left out. Raises ValueError naming
  any other line that isn't an object with a step.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  return list(_records(path))


def _records(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  with path.open(encoding='utf-8', errors='replace') as file:
    for number, line in enumerate(file, 1):
      if not line.endswith('\n'):
        return
      try:
        record = json.loads(line)
        int(record['step'])
      except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
          f'{path}, line {number}: got {line[:60].strip()!r}; expected a JSON object with a step'
        ) from error
      yield record


def _line(record: Mapping[str, Any]) -> str:
  return json.dumps(record, allow_nan=False) + '\n'


def _finite(value: float) -> float | None:
  value = float(value)
  return value if math.isfinite(value) else None
