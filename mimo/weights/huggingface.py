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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.table import (
  EMBEDDING,
  HEAD,
  Param,
  from_named_tensors,
  hf_params,
  named_tensors,
)
from mimo.weights.shards import SHARD_BYTES, write_tensors
from mimo.weights.tensors import SINGLE as SINGLE
from mimo.weights.tensors import TensorReader, read_json

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
      path.chmod(0o666 & ~_umask())
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
