"""Hugging Face checkpoint directories, in and out, without torch.

A checkpoint is config.json, one model.safetensors or several shards with an index, and tokenizer
files. Tensors are read one at a time and keep their bits: a bfloat16 checkpoint that is read and
written again holds the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.table import EMBEDDING, HEAD, Index, Param, hf_params, named_tensors
from mimo.weights.chunked import Where
from mimo.weights.encoder import Encoding, write_checkpoint
from mimo.weights.layouts import Carried, Layout, Origin, Place, is_carried
from mimo.weights.quantise import BF16
from mimo.weights.shards import SHARD_BYTES
from mimo.weights.shards import write_tensors as write_tensors
from mimo.weights.sources import Source
from mimo.weights.tensors import DTYPES, Scratch, TensorReader, contiguous, read_json
from mimo.weights.tensors import SINGLE as SINGLE

CONFIG = 'config.json'

# generation_config.json is not among them: servers take sampling defaults from it, and a
# repetition penalty that nobody asked for would change what is sampled.
TOKENIZER_FILES = (
  'added_tokens.json',
  'chat_template.jinja',
  'chat_template.json',
  'merges.txt',
  'special_tokens_map.json',
  'tokenizer.json',
  'tokenizer.model',
  'tokenizer_config.json',
  'vocab.json',
)

_STRIP_ROWS = 4096

# What the parameters of a model may be stored as.
_PLAIN = frozenset({'F64', 'F32', 'F16', 'BF16'})


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns config.json. Raises ValueError naming what is missing or malformed."""
  root = pathlib.Path(directory)
  if not root.is_dir():
    raise ValueError(f'{root} is not a directory; expected a Hugging Face checkpoint')
  config = read_json(root / CONFIG)
  if not isinstance(config, dict):
    raise ValueError(f'{root / CONFIG} holds a {type(config).__name__}; expected an object')
  return config


def read_tokenizer_files(directory: str | os.PathLike[str]) -> dict[str, bytes]:
  """Returns the tokenizer files that the directory holds: name -> content."""
  root = pathlib.Path(directory)
  return {name: (root / name).read_bytes() for name in TOKENIZER_FILES if (root / name).is_file()}


def open_model(directory: str | os.PathLike[str]) -> Source:
  """Opens an unquantised checkpoint: every parameter is there and has the right shape.

  Where config.json ties the head to the embedding and the checkpoint holds another head, the
  tensors win, as in transformers: the config returned is untied. vLLM would take the config's
  word; a checkpoint that we write does not leave the choice.

  Raises:
    ValueError: naming the file or tensor that is missing, corrupt, left over or of the wrong shape
      or kind.
  """
  root = pathlib.Path(directory)
  raw = read_config(root)
  if 'quantization_config' in raw:
    raise ValueError(f'{root / CONFIG} has a quantization_config; expected plain weights')
  with _named(root / CONFIG):
    config = ModelConfig.from_hf(raw)
  reader = TensorReader(root)
  layout = Layout.detect(config, reader.names())
  with _named(root):
    config, head_alone = resolve_tie(config, layout, reader)
    places = {
      (row.path, index): place_of(layout, row, index, head_alone=head_alone)
      for _, row, index in hf_params(config)
    }
    _refuse_unexpected(config, reader.names(), {place.name for place in places.values()})
    for place in places.values():
      _check_stored(reader, place)
  carried = tuple(name for name in reader.names() if is_carried(config, name))
  return Source(
    root,
    config,
    read_tokenizer_files(root),
    Origin(layout, Carried(reader, carried) if carried else None),
    _Weights(reader, places),
  )


def read_model(
  directory: str | os.PathLike[str],
  *,
  dtype: Any = np.float32,
  place: Callable[[Param, np.ndarray], Any] | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads an unquantised checkpoint whole: (config, parameters). See `open_model`.

  Args:
    directory: of the checkpoint.
    dtype: of the parameters; those of the file are cast to it one tensor at a time.
    place: puts one finished leaf where it shall live; None leaves it to jax.
  """
  source = open_model(directory)
  return source.config, source.params(dtype, place)


def write_model(
  directory: str | os.PathLike[str],
  config: ModelConfig,
  params: Mapping[str, Any],
  tokenizer_files: Mapping[str, bytes],
  *,
  dtype: Any = BF16,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes an unquantised checkpoint that transformers and vLLM load.

  The directory appears whole or not at all.

  Args:
    directory: to be made; it may exist if it is empty.
    config: the model.
    params: its parameters, rounded to `dtype` one tensor at a time.
    tokenizer_files: name -> content.
    dtype: of the tensors.
    shard_bytes: the most that one safetensors file holds, one tensor at least.

  Raises:
    ValueError: the directory exists and is not empty.
  """
  with new_directory(directory) as temporary:
    encoding = Encoding('bf16', dtype=np.dtype(dtype))
    tensors = ((name, x.astype(encoding.dtype)) for name, x in named_tensors(config, params))
    origin = Origin(Layout.published(config), None)
    write_checkpoint(temporary, config, tensors, encoding, origin, shard_bytes=shard_bytes)
    raw = config.to_hf()
    raw.pop('torch_dtype', None)
    write_config(temporary, raw | {'dtype': encoding.dtype.name})
    for name, content in tokenizer_files.items():
      (temporary / name).write_bytes(content)


def write_config(directory: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Writes config.json."""
  text = json.dumps(config, indent=2, sort_keys=True)
  (directory / CONFIG).write_text(f'{text}\n', encoding='utf-8')


@contextlib.contextmanager
def new_directory(directory: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Yields a temporary directory that becomes `directory` when the block ends without an error.

  Raises ValueError when `directory` exists and is not an empty directory.
  """
  target = pathlib.Path(directory)
  if target.exists() and not (target.is_dir() and not any(target.iterdir())):
    raise ValueError(f'{target} exists and is not empty; expected a new or empty directory')
  target.parent.mkdir(parents=True, exist_ok=True)
  temporary = pathlib.Path(tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent))
  try:
    yield temporary
    # safetensors makes private files; a server may run as someone else.
    for path in temporary.iterdir():
      path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())
    temporary.chmod(0o777 & ~_umask())
    temporary.rename(target)  # replaces an empty directory, and only an empty one
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def resolve_tie(
  config: ModelConfig, layout: Layout, reader: TensorReader
) -> tuple[ModelConfig, bool]:
  """Decides what a tied config means for the tensors at hand, as transformers does.

  Returns (config, whether the head is in the embedding's place): the config is untied where the
  head and the embedding are both there and differ.
  """
  embedding = layout.rename(EMBEDDING)
  if not config.tie_embeddings or HEAD not in reader:
    return config, False
  if embedding not in reader:
    return config, True
  if _same(reader, embedding, HEAD):
    return config, False
  return dataclasses.replace(config, tie_embeddings=False), False


def place_of(layout: Layout, row: Param, index: Index, *, head_alone: bool) -> Place:
  """Returns where a tensor is in a checkpoint; `head_alone`: see `resolve_tie`."""
  place = layout.place(row, index)
  if head_alone and row.hf_name == EMBEDDING:
    return dataclasses.replace(place, name=HEAD)
  return place


class _Weights:
  """The weights of a checkpoint, in its layout."""

  def __init__(
    self, reader: TensorReader, places: Mapping[tuple[tuple[str, ...], Index], Place]
  ) -> None:
    self._reader = reader
    self._places = places
    self._scratch = Scratch()

  def dtype(self, row: Param) -> np.dtype:
    names = {self._places[row.path, index].name for _, index in row.hf_names()}
    stored = {self._reader.info(name).dtype for name in names}
    if len(stored) > 1 or stored == {'F64'}:
      return np.dtype(np.float32)
    return DTYPES[stored.pop()]

  def tensor(self, row: Param, index: Index, rows: slice | None) -> np.ndarray:
    place = self._places[row.path, index]
    return self._reader.read(place.name, place.index, place.rows if rows is None else rows)

  def part(self, row: Param, where: Where) -> np.ndarray:
    if not row.in_dims:
      return self.tensor(row, where, None) if row.lead_shape else self._block(row, where)
    place = self._places[row.path, where if row.lead_shape else ()]
    if row.lead_shape:
      return self._transposed(place, place.rows).reshape(row.shape)
    if row.in_dims == 1 and len(row.shape) == 2:
      return self._transposed(place, where[1])[where[0]]
    return self._transposed(place, None).reshape(row.shape)[where]

  def _block(self, row: Param, where: Where) -> np.ndarray:
    return self.tensor(row, (), where[0])[(slice(None), *where[1:])]

  def _transposed(self, place: Place, rows: slice | None) -> np.ndarray:
    x = self._reader.read(place.name, place.index, rows, scratch=self._scratch).T
    copied = contiguous(x)
    return copied.copy() if np.may_share_memory(copied, x) else copied


def _check_stored(reader: TensorReader, place: Place) -> None:
  try:
    place.check_shape(reader)
  except KeyError:
    raise ValueError(
      f'tensor {place.name} is missing; expected shape {list(place.shape)}'
    ) from None
  stored = reader.info(place.name).dtype
  if stored not in _PLAIN:
    raise ValueError(f'tensor {place.name} is stored as {stored}; expected one of {sorted(_PLAIN)}')


def _same(reader: TensorReader, a: str, b: str) -> bool:
  """Whether two tensors are equal; strips of them are held."""
  first, second = reader.info(a), reader.info(b)
  if first.shape != second.shape:
    return False
  strips = (slice(i, i + _STRIP_ROWS) for i in range(0, first.shape[0], _STRIP_ROWS))
  return all(np.array_equal(reader.read(a, (), s), reader.read(b, (), s)) for s in strips)


def _refuse_unexpected(
  config: ModelConfig, names: Iterable[str], expected: Collection[str]
) -> None:
  # A tensor left over means another model than the config's: more layers, or biases. A tied head
  # is settled before, and old Llama checkpoints hold the rotary frequencies, which follow from
  # the config.
  left = [
    name
    for name in names
    if name not in expected
    and name != HEAD
    and not name.endswith('.rotary_emb.inv_freq')
    and not is_carried(config, name)
  ]
  if left:
    raise ValueError(
      f'tensor {left[0]} is not one that the config implies ({len(left)} such); expected '
      f'{len(expected)} of a {config.family} of {config.num_layers} layers'
    )


@contextlib.contextmanager
def _named(path: pathlib.Path) -> Iterator[None]:
  try:
    yield
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None


def _umask() -> int:
  # mkdtemp makes a private directory; the umask can only be read by setting it.
  mask = os.umask(0o022)
  os.umask(mask)
  return mask
