"""Arrays of Orbax checkpoints, written and read one layer or one expert at a time.

A parameter that stacks layers (and experts) is stored with one chunk per layer (per expert), and
another large one, such as an embedding, with chunks of `CHUNK_BYTES`. So a part can be written
before the next is made, and read without the rest. The checkpoint is an ordinary one: Orbax lays it
out, and restores it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pathlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from mimo.weights import pipeline

Index = tuple[int, ...]
Where = tuple[Any, ...]  # an index of leading dimensions, or a slice for each dimension
Path = tuple[str, ...]

CHUNK_BYTES = 64 * 2**20

# Nothing waits for the disk before a save returns: what an import writes can be imported again.
_WRITE_CONTEXT = {
  'file_io_sync': False,
  'cache_pool#ocdbt': {'total_bytes_limit': 100_000_000},
}


@dataclasses.dataclass(frozen=True)
class ChunkedArray:
  """An array to be saved that is made part by part and never held.

  Attributes:
    shape: of the whole.
    dtype: of the whole.
    stacked: how many leading dimensions have a chunk for each index.
    parts: of the shape of chunks, gives (where, the array there) for parts that are whole chunks:
      an index of the stacked dimensions, or one slice for each dimension where there are none.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  stacked: int
  parts: Callable[[tuple[int, ...]], Iterable[tuple[Where, np.ndarray]]]


class _Handler(ocp.type_handlers.TypeHandler):
  """Saves a `ChunkedArray`; what it saves is restored as any array."""

  def typestr(self) -> str:
    return 'np.ndarray'

  async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
    raise NotImplementedError

  async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Sequence[Any]:
    raise NotImplementedError

  async def serialize(
    self, values: Sequence[ChunkedArray], infos: Sequence[Any], args: Any = None
  ) -> Sequence[Any]:
    context = ts.Context(_WRITE_CONTEXT)
    for value, info in zip(values, infos, strict=True):
      spec = ocp.type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=value.shape,
        local_shape=value.shape,
        dtype=value.dtype,
        process_index=0,
        arg=save_args(value.stacked),
      )
      array = await ts.open(ts.Spec(spec), create=True, open=True, context=context)
      _write(array, value)
    return []


def _write(array: Any, value: ChunkedArray) -> None:
  pending: collections.deque[tuple[Any, int]] = collections.deque()
  held = 0
  try:
    for where, part in value.parts(array.chunk_layout.write_chunk.shape):
      writing = array[where].write(part, can_reference_source_data_indefinitely=True)
      pending.append((writing, part.nbytes))
      held += part.nbytes
      while held > pipeline.BUDGET_BYTES and len(pending) > 1:
        done, size = pending.popleft()
        done.result()
        held -= size
    while pending:
      pending.popleft()[0].result()
  finally:
    # Whoever cleans up after an error must find nobody writing.
    for writing, _ in pending:
      with contextlib.suppress(Exception):
        writing.result()


def save_args(stacked: int) -> ocp.SaveArgs:
  """Returns how Orbax is to save an array whose first `stacked` dimensions stack others."""
  if not stacked:
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
  return ocp.SaveArgs(shard_axes=tuple(range(stacked)))


def handler() -> ocp.PyTreeCheckpointHandler:
  """Returns the handler of a tree whose leaves are all `ChunkedArray`s."""
  # Orbax warns where it can't save jax's arrays.
  registry = ocp.type_handlers.create_type_handler_registry(
    (ChunkedArray, _Handler()), (jax.Array, ocp.type_handlers.ArrayHandler())
  )
  return ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)


class ChunkReader:
  """Reads the arrays of one saved tree part by part. `read` may be called from several threads.

  Args:
    directory: of the tree.
  """

  def __init__(self, directory: str | os.PathLike[str]) -> None:
    self._directory = pathlib.Path(directory).absolute()
    self.tree: Mapping[str, Any] = ocp.PyTreeCheckpointHandler().metadata(self._directory).tree
    self._context = ocp.type_handlers.get_ts_context(use_ocdbt=True)
    self._arrays: dict[Path, Any] = {}
    self._blocks: dict[Path, tuple[Index, np.ndarray]] = {}
    self._lock = threading.Lock()

  def dtype(self, path: Path) -> np.dtype:
    """Returns what an array is stored as."""
    return self._open(path).dtype.numpy_dtype

  def read(self, path: Path, where: Where = ()) -> np.ndarray:
    """Returns a part of an array, as it is stored: at an index, or within slices.

    Only the chunks that hold it are read. Where a chunk holds several indices (a checkpoint that
    was saved in another way), what it holds is kept until the next chunk of this array is asked
    for.
    """
    array = self._open(path)
    chunk = array.chunk_layout.read_chunk.shape[: len(where)]
    if all(isinstance(i, slice) or size == 1 for i, size in zip(where, chunk, strict=True)):
      return array[where].read().result() if where else array.read().result()
    begin = tuple(i // size * size for i, size in zip(where, chunk, strict=True))
    with self._lock:
      held = self._blocks.get(path)
      if held is None or held[0] != begin:
        self._blocks.pop(path, None)
        block = tuple(
          slice(b, min(b + c, n)) for b, c, n in zip(begin, chunk, array.shape, strict=False)
        )
        held = (begin, array[block].read().result())
        self._blocks[path] = held
    return held[1][tuple(i - b for i, b in zip(where, begin, strict=True))]

  def _open(self, path: Path) -> Any:
    with self._lock:
      if path not in self._arrays:
        info = ocp.type_handlers.ParamInfo(
          name='.'.join(path),
          parent_dir=self._directory,
          is_ocdbt_checkpoint=ocp.type_handlers.is_ocdbt_checkpoint(self._directory),
          use_zarr3=False,
          ts_context=self._context,
        )
        spec = ocp.type_handlers.get_json_tspec_read(info, use_ocdbt=info.is_ocdbt_checkpoint)
        opened = ts.open(ts.Spec(spec), open=True, read=True, context=self._context)
        self._arrays[path] = opened.result()
      return self._arrays[path]
