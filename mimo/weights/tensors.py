"""Directories of safetensors files, read one tensor or part of one at a time, without torch."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import threading
from collections.abc import Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np

INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'

_MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit

DTYPES = {
  'F64': np.dtype(np.float64),
  'F32': np.dtype(np.float32),
  'F16': np.dtype(np.float16),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
  'I64': np.dtype(np.int64),
  'I32': np.dtype(np.int32),
  'I16': np.dtype(np.int16),
  'I8': np.dtype(np.int8),
  'U8': np.dtype(np.uint8),
  'BOOL': np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor is: its shard, safetensors dtype, shape and first byte in the file."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int


class Scratch(threading.local):
  """Memory that each thread keeps, which spares the cost of new pages."""

  def __init__(self) -> None:
    self._held = np.empty(0, np.uint8)

  def take(self, size: int) -> np.ndarray:
    """Returns `size` bytes; those that this thread took before are the same."""
    if self._held.size < size:
      self._held = np.empty(size, np.uint8)
    return self._held[:size]


class TensorReader:
  """Reads the tensors of a checkpoint directory by name, one at a time.

  Opening it reads only the headers of the shards, and checks that each is complete.

  Raises ValueError naming the directory or the shards that are missing or corrupt.
  """

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    self.directory = pathlib.Path(directory)
    weight_map = _weight_map(self.directory)
    faults: list[str] = []
    infos: dict[tuple[str, str], TensorInfo] = {}
    for file in sorted(set(weight_map.values()) if weight_map else {SINGLE}):
      try:
        infos |= {(file, name): info for name, info in _read_header(self.directory / file).items()}
      except ValueError as error:
        faults.append(str(error))
    if faults:
      raise ValueError('; '.join(faults))
    if weight_map is None:
      self._infos = {name: info for (_, name), info in infos.items()}
      return
    absent = sorted(name for name, file in weight_map.items() if (file, name) not in infos)
    if absent:
      raise ValueError(
        f'{self.directory / weight_map[absent[0]]} lacks tensor {absent[0]}, which {INDEX} places '
        f'there ({len(absent)} such)'
      )
    self._infos = {name: infos[file, name] for name, file in weight_map.items()}

  def __contains__(self, name: object) -> bool:
    return name in self._infos

  def names(self) -> tuple[str, ...]:
    """Returns every tensor's name, sorted."""
    return tuple(sorted(self._infos))

  def info(self, name: str) -> TensorInfo:
    """Returns where a tensor is. KeyError for a name that the checkpoint lacks."""
    return self._infos[name]

  def read(
    self,
    name: str,
    index: tuple[int, ...] = (),
    rows: slice | None = None,
    *,
    scratch: Scratch | None = None,
  ) -> np.ndarray:
    """Returns a tensor, or a part of one, in the dtype it is stored in; only that part is read.

    Args:
      name: of the tensor.
      index: which of its leading dimensions.
      rows: which of the dimension after those, without a step.
      scratch: memory to read it into, so that this thread's next read overwrites it; None: its own.

    Raises:
      KeyError: the checkpoint lacks it.
      ValueError: the file ends inside it.
      IndexError: it has no such part.
    """
    info = self._infos[name]
    dtype = DTYPES[info.dtype]
    shape = info.shape
    begin = 0
    for i in index:
      if not shape or not 0 <= i < shape[0]:
        raise IndexError(f'tensor {name} of shape {list(info.shape)} has no part {list(index)}')
      begin += i * math.prod(shape[1:])
      shape = shape[1:]
    if rows is not None:
      first, last, _ = rows.indices(shape[0])
      begin += first * math.prod(shape[1:])
      shape = (max(0, last - first), *shape[1:])
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size, np.uint8) if scratch is None else scratch.take(size)
    with open(info.file, 'rb', buffering=0) as file:
      file.seek(info.offset + begin * dtype.itemsize)
      if _read_all(file, raw) != size:
        raise ValueError(f'{info.file} ends inside tensor {name}')
    return raw.view(dtype).reshape(shape)


def _read_all(file: io.FileIO, target: np.ndarray) -> int:
  """Fills `target` from where the file is; returns how many bytes there were."""
  done = 0
  view: Any = target
  while done < target.size and (count := file.readinto(view[done:])):
    done += count
  return done


def read_json(path: pathlib.Path) -> Any:
  """Returns a JSON file's content. Raises ValueError where it is missing or malformed."""
  try:
    return json.loads(path.read_text(encoding='utf-8'))
  except FileNotFoundError:
    raise ValueError(f'{path} is missing') from None
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from None


def _weight_map(directory: pathlib.Path) -> dict[str, str] | None:
  """Returns tensor name -> shard, or None for a checkpoint of one file."""
  if not directory.is_dir():
    raise ValueError(f'{directory} is not a directory; expected a Hugging Face checkpoint')
  if not (directory / INDEX).is_file():
    if not (directory / SINGLE).is_file():
      raise ValueError(f'{directory} holds neither {SINGLE} nor {INDEX}')
    return None
  index = read_json(directory / INDEX)
  weight_map = index['weight_map'] if isinstance(index, dict) and 'weight_map' in index else None
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f'{directory / INDEX} lacks a weight_map of tensor names to shards')
  for name, file in weight_map.items():
    if not isinstance(file, str) or pathlib.PurePath(file).name != file:
      raise ValueError(f'{directory / INDEX} places {name} in {file!r}; expected a file name')
  return weight_map


def _read_header(path: pathlib.Path) -> dict[str, TensorInfo]:
  """Reads one shard's header: 8 bytes of length, then JSON. Raises ValueError naming the shard."""
  if not path.is_file():
    raise ValueError(f'{path} is missing')
  size = path.stat().st_size
  with path.open('rb') as file:
    length = int.from_bytes(file.read(8), 'little')
    if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
      raise ValueError(f'{path} is corrupt: its header of {length} bytes exceeds the file')
    try:
      header = json.loads(file.read(length))
      header.pop('__metadata__', None)
      infos = {name: _info(path, entry, 8 + length) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
      raise ValueError(f'{path} is corrupt: its header is no safetensors header: {error}') from None
  end = max((_end(info) for info in infos.values()), default=8 + length)
  if end != size:
    raise ValueError(f'{path} is corrupt: {size} bytes; expected {end}')
  return infos


def _info(path: pathlib.Path, entry: Mapping[str, Any], data: int) -> TensorInfo:
  if entry['dtype'] not in DTYPES:
    raise ValueError(f'unknown dtype {entry["dtype"]!r}')
  begin, end = entry['data_offsets']
  info = TensorInfo(path, entry['dtype'], tuple(entry['shape']), data + begin)
  if min(info.shape, default=0) < 0 or begin < 0 or _end(info) != data + end:
    raise ValueError(f'offsets {[begin, end]} for shape {entry["shape"]} of {entry["dtype"]}')
  return info


def _end(info: TensorInfo) -> int:
  return info.offset + math.prod(info.shape) * DTYPES[info.dtype].itemsize


def contiguous(x: np.ndarray) -> np.ndarray:
  """`np.ascontiguousarray`, several times faster for a transposed matrix; it may be read-only."""
  if x.ndim != 2 or x.flags.c_contiguous or not x.T.flags.c_contiguous:
    return np.ascontiguousarray(x)
  device = _cpu()
  if x.dtype.itemsize not in (1, 2, 4) or device is None:
    return np.ascontiguousarray(x)
  # jax lays arrays out in blocks that fit the cache and in parallel; numpy goes element by element.
  bits = x.view(f'u{x.dtype.itemsize}')
  return np.asarray(jax.device_put(bits, device)).view(x.dtype)


@functools.cache
def _cpu() -> jax.Device | None:
  try:
    return jax.local_devices(backend='cpu')[0]
  except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
    return None
