"""Hugging Face checkpoint directories, in and out, without torch.

A checkpoint is config.json, one model.safetensors or several shards with an index, and tokenizer
files. Tensors are read one at a time and keep their bits: a bfloat16 checkpoint that is read and
written again holds the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

from mimo.models.config import ModelConfig
from mimo.models.table import (
  EMBEDDING,
  HEAD,
  Param,
  from_named_tensors,
  hf_params,
  named_tensors,
)

CONFIG = 'config.json'
INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'

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

SHARD_BYTES = 5 * 10**9

_MAX_HEADER_BYTES = 100 * 10**6  # the format's own limit

_DTYPES = {
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

# What the parameters of a model may be stored as.
_PLAIN = frozenset({'F64', 'F32', 'F16', 'BF16'})


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor is: its shard, safetensors dtype, shape and first byte in the file."""

  file: pathlib.Path
  dtype: str
  shape: tuple[int, ...]
  offset: int


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

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor in the dtype it is stored in. KeyError where the checkpoint lacks it."""
    info = self._infos[name]
    dtype = _DTYPES[info.dtype]
    size = math.prod(info.shape)
    raw = np.fromfile(info.file, np.uint8, size * dtype.itemsize, offset=info.offset)
    if raw.size != size * dtype.itemsize:
      raise ValueError(f'{info.file} ends inside tensor {name}')
    return raw.view(dtype).reshape(info.shape)


def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns config.json. Raises ValueError naming what is missing or malformed."""
  root = pathlib.Path(directory)
  if not root.is_dir():
    raise ValueError(f'{root} is not a directory; expected a Hugging Face checkpoint')
  config = _read_json(root / CONFIG)
  if not isinstance(config, dict):
    raise ValueError(f'{root / CONFIG} holds a {type(config).__name__}; expected an object')
  return config


def read_tokenizer_files(directory: str | os.PathLike[str]) -> dict[str, bytes]:
  """Returns the tokenizer files that the directory holds: name -> content."""
  root = pathlib.Path(directory)
  return {name: (root / name).read_bytes() for name in TOKENIZER_FILES if (root / name).is_file()}


def read_model(
  directory: str | os.PathLike[str],
  *,
  dtype: Any = np.float32,
  place: Callable[[Param, np.ndarray], Any] | None = None,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Reads an unquantised checkpoint.

  Where config.json ties the head to the embedding and the checkpoint holds another head, the
  tensors win, as in transformers: the config returned is untied. vLLM would take the config's
  word; a checkpoint that we write does not leave the choice.

  Args:
    directory: of the checkpoint.
    dtype: of the parameters; those of the file are cast to it one tensor at a time.
    place: puts one finished leaf where it shall live; see `from_named_tensors`.

  Returns:
    (config, parameters).

  Raises:
    ValueError: naming the file or tensor that is missing, corrupt or of the wrong shape or kind.
  """
  raw = read_config(directory)
  if 'quantization_config' in raw:
    raise ValueError(
      f'{pathlib.Path(directory) / CONFIG} has a quantization_config; expected plain weights'
    )
  with _named(pathlib.Path(directory) / CONFIG):
    config = ModelConfig.from_hf(raw)
  reader = TensorReader(directory)
  config, stored_as = resolve_tie(config, reader.names(), reader.read)

  def read(name: str) -> np.ndarray:
    info = reader.info(stored_as(name))
    if info.dtype not in _PLAIN:
      raise ValueError(f'tensor {name} is stored as {info.dtype}; expected one of {sorted(_PLAIN)}')
    return reader.read(stored_as(name))

  with _named(reader.directory):
    _refuse_unexpected(config, reader.names())
    return config, from_named_tensors(config, read, dtype, place=place)


def write_model(
  directory: str | os.PathLike[str],
  config: ModelConfig,
  params: Mapping[str, Any],
  tokenizer_files: Mapping[str, bytes],
  *,
  dtype: Any = ml_dtypes.bfloat16,
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
    dtype = np.dtype(dtype)
    tensors = ((name, x.astype(dtype)) for name, x in named_tensors(config, params))
    write_tensors(temporary, tensors, shard_bytes=shard_bytes)
    raw = config.to_hf()
    raw.pop('torch_dtype', None)
    write_config(temporary, raw | {'dtype': dtype.name})
    for name, content in tokenizer_files.items():
      (temporary / name).write_bytes(content)


def write_config(directory: pathlib.Path, config: Mapping[str, Any]) -> None:
  """Writes config.json."""
  text = json.dumps(config, indent=2, sort_keys=True)
  (directory / CONFIG).write_text(f'{text}\n', encoding='utf-8')


def write_tensors(
  directory: pathlib.Path,
  tensors: Iterable[tuple[str, np.ndarray]],
  *,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes model.safetensors, or shards and their index where one file would be too large.

  At most one shard is held in memory.
  """
  shards: list[tuple[pathlib.Path, list[str]]] = []
  total, held = 0, 0
  pending: dict[str, np.ndarray] = {}

  def flush() -> None:
    path = directory / f'{len(shards)}.partial'
    safetensors.numpy.save_file(pending, path, metadata={'format': 'pt'})
    shards.append((path, list(pending)))

  for name, x in tensors:
    if pending and held + x.nbytes > shard_bytes:
      flush()
      held, pending = 0, {}
    pending[name] = np.ascontiguousarray(x)
    held, total = held + x.nbytes, total + x.nbytes
  flush()
  if len(shards) == 1:
    shards[0][0].rename(directory / SINGLE)
    return
  weight_map: dict[str, str] = {}
  for i, (path, names) in enumerate(shards):
    file = f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors'
    path.rename(directory / file)
    weight_map |= dict.fromkeys(names, file)
  index = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(weight_map.items()))}
  (directory / INDEX).write_text(f'{json.dumps(index, indent=2)}\n', encoding='utf-8')


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
    temporary.chmod(0o777 & ~_umask())
    temporary.rename(target)  # replaces an empty directory, and only an empty one
  finally:
    shutil.rmtree(temporary, ignore_errors=True)


def resolve_tie(
  config: ModelConfig, names: Iterable[str], read: Callable[[str], np.ndarray]
) -> tuple[ModelConfig, Callable[[str], str]]:
  """Decides what a tied config means for the tensors at hand, as transformers does.

  Returns (config, the name under which each tensor of it is stored): untied where the head and
  the embedding are both there and differ; the head in the embedding's place where only it is there.
  """
  present = set(names) & {EMBEDDING, HEAD}
  if not config.tie_embeddings or HEAD not in present:
    return config, lambda name: name
  if EMBEDDING not in present:
    return config, lambda name: HEAD if name == EMBEDDING else name
  if np.array_equal(read(EMBEDDING), read(HEAD)):
    return config, lambda name: name
  return dataclasses.replace(config, tie_embeddings=False), lambda name: name


def _refuse_unexpected(config: ModelConfig, names: Iterable[str]) -> None:
  # A tensor left over means another model than the config's: more layers, or biases. A tied head
  # is settled before, and old Llama checkpoints hold the rotary frequencies, which follow from
  # the config.
  expected = {name for name, _, _ in hf_params(config)} | {HEAD}
  left = [n for n in names if n not in expected and not n.endswith('.rotary_emb.inv_freq')]
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


def _read_json(path: pathlib.Path) -> Any:
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
  index = _read_json(directory / INDEX)
  weight_map = index['weight_map'] if isinstance(index, dict) and 'weight_map' in index else None
  if not isinstance(weight_map, dict) or not weight_map:
    raise ValueError(f'{directory / INDEX} lacks a weight_map of tensor names to shards')
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
  if entry['dtype'] not in _DTYPES:
    raise ValueError(f'unknown dtype {entry["dtype"]!r}')
  begin, end = entry['data_offsets']
  info = TensorInfo(path, entry['dtype'], tuple(entry['shape']), data + begin)
  if min(info.shape, default=0) < 0 or begin < 0 or _end(info) != data + end:
    raise ValueError(f'offsets {[begin, end]} for shape {entry["shape"]} of {entry["dtype"]}')
  return info


def _end(info: TensorInfo) -> int:
  return info.offset + math.prod(info.shape) * _DTYPES[info.dtype].itemsize
