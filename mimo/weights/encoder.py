"""From a model's tensors to those of a checkpoint: what will be written, and writing it."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.table import Index, Param, fuse_key, hf_params
from mimo.weights import quantise
from mimo.weights.layouts import Carried, Layout, Origin
from mimo.weights.pipeline import ordered
from mimo.weights.shards import SHARD_BYTES, TensorSpec, TensorWriter
from mimo.weights.sources import StoredTensor

Tensor = np.ndarray | StoredTensor

# A tensor that isn't quantised is copied in strips of about this size.
_STRIP_BYTES = 32 * 2**20


@dataclasses.dataclass(frozen=True)
class Encoding:
  """How the weights of a model are stored.

  Attributes:
    format: its name.
    block_scale: how nvfp4 block scales are chosen.
    input_scales: for nvfp4_w4a4, weight name -> `input_global_scale`.
    dtype: of what isn't quantised.
  """

  format: str
  block_scale: str = 'amax'
  input_scales: Mapping[str, float] | None = None
  dtype: np.dtype = quantise.BF16

  def keeps(self, row: Param) -> bool:
    """Whether the tensors of a row stay as they are."""
    return self.format == 'bf16' or not row.quantisable


@dataclasses.dataclass(frozen=True)
class _Member:
  """One tensor of a fuse group."""

  name: str
  row: Param
  index: Index
  tensor: Tensor


def write_checkpoint(
  directory: pathlib.Path,
  config: ModelConfig,
  tensors: Iterable[tuple[str, Tensor]],
  encoding: Encoding,
  origin: Origin,
  *,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes the shards of a checkpoint; several tensors at a time, and what is held is bounded.

  Args:
    directory: where to; it holds no shards yet.
    config: the model.
    tensors: (Hugging Face name, tensor of `encoding.dtype`) of every tensor, in any order.
    encoding: how they are stored.
    origin: how they are named, and what is carried along.
    shard_bytes: the most that one file holds, one tensor at least.

  Raises:
    ValueError: a tensor isn't the model's, comes twice, is missing, or has the wrong dtype or
      shape.
  """
  planned = _plan(config, encoding, origin)
  with TensorWriter(directory, planned, shard_bytes=shard_bytes) as writer:
    _write(writer, config, tensors, encoding, origin.layout)
    if origin.carried is not None:
      write_carried(writer, origin.carried)


def write_carried(writer: TensorWriter, carried: Carried) -> None:
  """Writes what is carried, as it is."""

  def work(name: str) -> None:
    writer.write(name, carried.reader.read(name))

  for _ in ordered(work, ((spec.name, spec.nbytes) for spec in carried.specs())):
    pass


def _plan(config: ModelConfig, encoding: Encoding, origin: Origin) -> Iterator[TensorSpec]:
  """Yields every tensor of the checkpoint, in table order, then what is carried."""
  planned: set[str] = set()
  for _, row, index in hf_params(config):
    place = origin.layout.place(row, index)
    if not encoding.keeps(row):
      module = place.name.removesuffix('.weight')
      for suffix, (dtype, shape) in quantise.parts_of(encoding.format, row.hf_shape).items():
        yield TensorSpec(f'{module}.{suffix}', dtype, shape)
    elif place.name not in planned:
      planned.add(place.name)
      yield TensorSpec(place.name, encoding.dtype, place.shape)
  if origin.carried is not None:
    yield from origin.carried.specs()


def _write(
  writer: TensorWriter,
  config: ModelConfig,
  tensors: Iterable[tuple[str, Tensor]],
  encoding: Encoding,
  layout: Layout,
) -> None:
  def work(job: tuple[list[_Member], slice | None]) -> None:
    group, rows = job
    if encoding.keeps(group[0].row):
      _copy(writer, layout, group[0], rows, encoding.dtype)
      return
    names = [layout.place(member.row, member.index).name for member in group]
    weights = [_whole(member, encoding.dtype) for member in group]
    for name, parts in zip(names, _encode(group, weights, encoding), strict=True):
      for suffix, array in parts.items():
        writer.write(f'{name.removesuffix(".weight")}.{suffix}', array)

  for _ in ordered(work, _jobs(config, tensors, encoding)):
    pass


def _jobs(
  config: ModelConfig, tensors: Iterable[tuple[str, Tensor]], encoding: Encoding
) -> Iterator[tuple[tuple[list[_Member], slice | None], int]]:
  """Yields ((the members of a complete fuse group, rows of a lone one), bytes that it takes)."""
  expected = {name: (row, index) for name, row, index in hf_params(config)}
  sizes = collections.Counter(fuse_key(row, index) for row, index in expected.values())
  groups: dict[tuple[Any, ...], list[_Member]] = {}
  for name, tensor in tensors:
    if name not in expected:
      raise ValueError(f'tensor {name} is not one of this model, or came twice')
    row, index = expected.pop(name)
    member = _Member(name, row, index, tensor)
    key = fuse_key(row, index)
    size = encoding.dtype.itemsize * math.prod(row.hf_shape)
    if encoding.keeps(row):
      for rows in _strips(row, size):
        part = size if rows is None else size * (rows.stop - rows.start) // row.hf_shape[0]
        yield ([member], rows), 2 * part
    elif key is None:
      yield ([member], None), 4 * size
    else:
      group = groups.setdefault(key, [])
      group.append(member)
      if len(group) == sizes[key]:
        held = 4 * encoding.dtype.itemsize * sum(math.prod(m.row.hf_shape) for m in group)
        yield (sorted(groups.pop(key), key=lambda member: member.name), None), held
  if expected:
    raise ValueError(f'tensor {next(iter(expected))} is missing ({len(expected)} such)')


def _strips(row: Param, size: int) -> Iterator[slice | None]:
  """Yields slices of the rows of a large tensor that stands alone; None: the whole of it."""
  if row.lead_shape or size <= _STRIP_BYTES:
    yield None
    return
  count = row.hf_shape[0]
  step = max(1, count * _STRIP_BYTES // size)
  for begin in range(0, count, step):
    yield slice(begin, min(begin + step, count))


def _copy(
  writer: TensorWriter,
  layout: Layout,
  member: _Member,
  rows: slice | None,
  dtype: np.dtype,
) -> None:
  place = layout.place(member.row, member.index)
  first = place.rows.start if place.rows else 0
  if rows is None:
    writer.write(place.name, _whole(member, dtype), place.index, first)
  elif isinstance(member.tensor, StoredTensor):
    writer.write(place.name, member.tensor.read(rows), place.index, rows.start)
  else:
    writer.write(place.name, _whole(member, dtype)[rows], place.index, rows.start)


def _whole(member: _Member, dtype: np.dtype) -> np.ndarray:
  """Returns the tensor of a member, after checking it."""
  tensor = member.tensor
  x = tensor.read() if isinstance(tensor, StoredTensor) else tensor
  if x.dtype != dtype:
    raise ValueError(f'tensor {member.name} is {x.dtype}; expected {dtype}')
  if x.shape != member.row.hf_shape:
    raise ValueError(
      f'tensor {member.name} has shape {list(x.shape)}; expected {list(member.row.hf_shape)} for '
      'this config'
    )
  return x


def _encode(
  group: Sequence[_Member], weights: list[np.ndarray], encoding: Encoding
) -> list[dict[str, np.ndarray]]:
  """Returns what holds each weight of a fuse group: suffix -> array."""
  input_scale = None
  if encoding.format == 'nvfp4_w4a4' and encoding.input_scales is not None:
    scales = encoding.input_scales
    absent = [member.name for member in group if member.name not in scales]
    if absent:
      raise ValueError(f'{absent[0]} has no calibrated input scale')
    # A server has one input for the whole group: the smallest divisor covers every part.
    input_scale = min(float(scales[member.name]) for member in group)
  try:
    return quantise.encode(
      encoding.format, weights, block_scale=encoding.block_scale, input_scale=input_scale
    )
  except ValueError as error:
    raise ValueError(f'{group[0].name}: {error}') from None
