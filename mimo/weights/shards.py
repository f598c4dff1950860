"""Writing safetensors shards without holding them: planned first, then filled in any order.

The files are byte for byte those of the safetensors library for the same tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mimo.weights.tensors import DTYPES, INDEX, SINGLE

SHARD_BYTES = 5 * 10**9

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# How the library orders the tensors of a file, so that each starts at a multiple of its item size:
# by this, backwards, and then by name.
_ORDER = (
  'BOOL',
  'U8',
  'I8',
  'F8_E5M2',
  'F8_E4M3',
  'I16',
  'F16',
  'BF16',
  'I32',
  'F32',
  'F64',
  'I64',
)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
  """A tensor that is going to be written."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass
class _Place:
  spec: TensorSpec
  file: int
  offset: int
  left: int


class TensorWriter:
  """The shards of a checkpoint, with a place for each tensor of a plan.

  `write` may be called from several threads. Used as a context manager, it raises on leaving when
  something planned was not written.

  Args:
    directory: where to; it holds no shards yet.
    plan: every tensor, in the order in which they fill shards.
    shard_bytes: the most that one file holds, one tensor at least.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    plan: Iterable[TensorSpec],
    *,
    shard_bytes: int = SHARD_BYTES,
  ) -> None:
    shards = _into_shards(plan, shard_bytes)
    self._lock = threading.Lock()
    self._places: dict[str, _Place] = {}
    self._files: list[int] = []
    self._open = contextlib.ExitStack()
    names = [SINGLE]
    if len(shards) > 1:
      names = [f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors' for i in range(len(shards))]
    with contextlib.ExitStack() as opened:
      for name, shard in zip(names, shards, strict=True):
        self._files.append(self._create(directory / name, shard, opened))
      self._open = opened.pop_all()
    if len(shards) > 1:
      weight_map = {spec.name: names[i] for i, shard in enumerate(shards) for spec in shard}
      total = sum(spec.nbytes for shard in shards for spec in shard)
      index = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))}
      (directory / INDEX).write_text(f'{json.dumps(index, indent=2)}\n', encoding='utf-8')

  def __enter__(self) -> TensorWriter:
    return self

  def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
    self._open.close()
    if kind is None:
      self._check_complete()

  def write(self, name: str, tensor: np.ndarray, index: tuple[int, ...] = (), row: int = 0) -> None:
    """Writes a tensor, or a part of one.

    Args:
      name: one of the plan.
      tensor: of the planned dtype and shape; or what lies at `index`, from its row `row` on.
      index: which of the leading dimensions.
      row: where the part begins in the dimension after those.

    Raises:
      ValueError: the tensor is not planned, not of its dtype or shape, or comes twice.
    """
    if name not in self._places:
      raise ValueError(f'tensor {name} is not one of the plan')
    place = self._places[name]
    spec = place.spec
    part = spec.shape[len(index) :]
    fits = tensor.ndim == len(part) and tensor.shape[1:] == part[1:]
    fits = fits and (row + tensor.shape[0] <= part[0] if part else row == 0)
    if tensor.dtype != spec.dtype or not fits:
      raise ValueError(
        f'tensor {name} is {tensor.dtype} {list(tensor.shape)} at {[*index, row]}; expected '
        f'{spec.dtype} within {list(spec.shape)}'
      )
    with self._lock:
      place.left -= tensor.nbytes
      if place.left < 0:
        raise ValueError(f'tensor {name} came twice')
    offset = 0
    for i, size in zip(index, spec.shape, strict=False):
      offset = offset * size + i
    begin = offset * math.prod(part) + row * math.prod(part[1:])
    _write_all(self._files[place.file], tensor, place.offset + begin * spec.dtype.itemsize)

  def _check_complete(self) -> None:
    absent = [place.spec.name for place in self._places.values() if place.left]
    if absent:
      raise ValueError(f'tensor {absent[0]} was not written whole ({len(absent)} such)')

  def _create(
    self, path: pathlib.Path, shard: Sequence[TensorSpec], opened: contextlib.ExitStack
  ) -> int:
    """Writes the header, keeps every tensor's place, and returns the open file."""
    header: dict[str, object] = {'__metadata__': {'format': 'pt'}}
    begin = 0
    places = []
    for spec in sorted(shard, key=lambda spec: (-_ORDER.index(_NAMES[spec.dtype]), spec.name)):
      if spec.name in self._places:
        raise ValueError(f'tensor {spec.name} came twice')
      header[spec.name] = {
        'dtype': _NAMES[spec.dtype],
        'shape': list(spec.shape),
        'data_offsets': [begin, begin + spec.nbytes],
      }
      places.append(_Place(spec, len(self._files), begin, spec.nbytes))
      self._places[spec.name] = places[-1]
      begin += spec.nbytes
    text = json.dumps(header, separators=(',', ':'), ensure_ascii=False).encode()
    text += b' ' * (-len(text) % 8)
    for place in places:
      place.offset += 8 + len(text)
    handle = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
    opened.callback(os.close, handle)
    _write_all(handle, np.frombuffer(len(text).to_bytes(8, 'little') + text, np.uint8), 0)
    os.truncate(handle, 8 + len(text) + begin)
    return handle


def write_tensors(
  directory: pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes tensors that are all in memory: model.safetensors, or shards and their index."""
  tensors = list(tensors)
  plan = [TensorSpec(name, x.dtype, x.shape) for name, x in tensors]
  with TensorWriter(directory, plan, shard_bytes=shard_bytes) as writer:
    for name, x in tensors:
      writer.write(name, x)


def _into_shards(plan: Iterable[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
  shards: list[list[TensorSpec]] = [[]]
  held = 0
  for spec in plan:
    if shards[-1] and held + spec.nbytes > shard_bytes:
      shards.append([])
      held = 0
    shards[-1].append(spec)
    held += spec.nbytes
  return shards


def _write_all(handle: int, array: np.ndarray, offset: int) -> None:
  """Writes an array's bytes; the operating system takes 2 GB at most at a time."""
  flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
  view = memoryview(flat)
  while view:
    written = os.pwrite(handle, view, offset)
    view, offset = view[written:], offset + written
