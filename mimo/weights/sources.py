"""Policies whose weights are read part by part, whatever kind of checkpoint holds them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.table import Index, Param, hf_params, leaf, nest, table
from mimo.weights.chunked import Where
from mimo.weights.layouts import Origin
from mimo.weights.pipeline import ordered
from mimo.weights.quantise import BF16


class Weights(Protocol):
  """The stored weights of a model, by part; the methods may be called from several threads."""

  def dtype(self, row: Param) -> np.dtype:
    """Returns what the tensors of a row are stored as."""

  def part(self, row: Param, where: Where) -> np.ndarray:
    """Returns a part of a row's leaf in our layout: at an index, or within slices."""

  def tensor(self, row: Param, index: Index, rows: slice | None) -> np.ndarray:
    """Returns the tensor at an index in Hugging Face's layout, or some rows of one not stacked."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor that is read, and cast, when it is asked for."""

  source: Source
  row: Param
  index: Index
  dtype: np.dtype

  def read(self, rows: slice | None = None) -> np.ndarray:
    """Returns it, or some of its rows, in Hugging Face's layout.

    Raises ValueError by name where it can't be read, or isn't finite in that dtype.
    """
    x = self.source.weights.tensor(self.row, self.index, rows).astype(self.dtype, copy=False)
    self.source.check_finite(self.row, self.index, x)
    return x


@dataclasses.dataclass(frozen=True)
class Source:
  """A policy whose weights are read when they are asked for.

  Attributes:
    root: the step or the directory.
    config: the model.
    tokenizer_files: name -> content.
    origin: how the checkpoint stores it, and what else it holds.
    weights: the stored weights.
  """

  root: pathlib.Path
  config: ModelConfig
  tokenizer_files: dict[str, bytes]
  origin: Origin
  weights: Weights

  def tensors(self, dtype: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Yields (Hugging Face name, tensor to be read and cast) in table order."""
    for name, row, index in hf_params(self.config):
      yield name, StoredTensor(self, row, index, np.dtype(dtype))

  def parts(self, row: Param, chunk: tuple[int, ...]) -> Iterator[tuple[Where, np.ndarray]]:
    """Yields (where, part of the row's leaf there) as they are stored, all finite.

    Args:
      row: of the leaf.
      chunk: the shape of the parts of a leaf that stacks nothing.
    """

    def read(where: Where) -> tuple[Where, np.ndarray]:
      x = self.weights.part(row, where)
      self.check_finite(row, where, x)
      return where, x

    size = 2 * math.prod(chunk) * self.weights.dtype(row).itemsize
    places = np.ndindex(*row.lead_shape) if row.lead_shape else _blocks(row.shape, chunk)
    return ordered(read, ((where, size) for where in places))

  def params(
    self, dtype: Any = np.float32, place: Callable[[Param, np.ndarray], Any] | None = None
  ) -> dict[str, Any]:
    """Reads the parameters, one leaf after the other.

    Args:
      dtype: of the parameters.
      place: puts one finished leaf where it shall live; None leaves it to jax.
    """
    leaves = {}
    for row in table(self.config):
      x = np.empty(row.leaf_shape, dtype)
      for where, part in self.parts(row, row.shape):
        x[where] = part
      leaves[row.path] = jax.device_put(x) if place is None else place(row, x)
    return nest(leaves)

  def placed(self, like: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the parameters onto devices; for each device the parts that it holds.

    Args:
      like: a `jax.ShapeDtypeStruct` with a sharding for each parameter.
    """
    leaves = {}
    for row in table(self.config):
      target = leaf(like, row.path)
      read = functools.partial(self._shard, row, target.dtype)
      leaves[row.path] = jax.make_array_from_callback(row.leaf_shape, target.sharding, read)
    return nest(leaves)

  def _shard(self, row: Param, dtype: Any, held: tuple[slice, ...]) -> np.ndarray:
    """Returns the block of a row's leaf that lies within slices."""
    lead = len(row.lead_shape)
    ranges = [range(*s.indices(size)) for s, size in zip(held, row.leaf_shape, strict=True)]
    if not lead:
      where = tuple(slice(r.start, r.stop) for r in ranges)
      x = self.weights.part(row, where)
      self.check_finite(row, (), x)
      return x.astype(dtype)
    out = np.empty([len(r) for r in ranges], dtype)
    for place in np.ndindex(out.shape[:lead]):
      index = tuple(r[i] for r, i in zip(ranges, place, strict=False))
      x = self.weights.part(row, index)
      self.check_finite(row, index, x)
      out[place] = x[held[lead:]]
    return out

  def check_finite(self, row: Param, where: Where, x: np.ndarray) -> None:
    """Raises ValueError where a part of a row's leaf isn't finite."""
    if not is_finite(x):
      name = row.hf_name_at(where) if row.lead_shape else row.hf_name
      raise ValueError(f'{self.root}: tensor {name} holds NaN or infinity; expected finite weights')


def is_finite(x: np.ndarray) -> bool:
  """Whether no element is NaN or infinity."""
  if x.dtype != BF16:
    return bool(np.isfinite(x).all())
  # By bits, some ten times faster than isfinite: NaN and infinity have the largest of their sign.
  return bool(x.size == 0 or (x.view(np.int16).max() < 0x7F80 and x.view(np.uint16).max() < 0xFF80))


def _blocks(shape: tuple[int, ...], chunk: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
  grid = [range(0, size, step) for size, step in zip(shape, chunk, strict=True)]
  for begin in itertools.product(*grid):
    yield tuple(slice(b, min(b + c, n)) for b, c, n in zip(begin, chunk, shape, strict=True))
