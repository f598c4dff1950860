"""What a view directory holds, read without its weights, and whether a server may load it.

A server was started for one architecture and layout. Whatever else is published must have the
same tensors, shapes, dtypes and config: this is found before any weight is touched.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

from mimo.weights.store import Blob, hash_file

CONFIG = 'config.json'
_HEADER = struct.Struct('<Q')
_MAX_HEADER_BYTES = 100_000_000
# Keys of config.json that say how it was written and nothing of the model.
_IDLE_KEYS = ('_name_or_path', 'transformers_version', 'dtype', 'torch_dtype')


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
  """A view without its numbers.

  Attributes:
    config: config.json, without what does not matter to a server.
    tensors: name -> (safetensors dtype, shape).
  """

  config: Mapping[str, Any]
  tensors: Mapping[str, tuple[str, tuple[int, ...]]]


def check_files(directory: str, files: Mapping[str, tuple[str, int]]) -> None:
  """Raises ValueError naming a file that is missing, left over, or not as published."""
  root = pathlib.Path(directory)
  if not root.is_dir():
    raise ValueError(f'{directory} is not a directory')
  held = {path.name for path in root.iterdir()}
  if missing := sorted(set(files) - held):
    raise ValueError(f'{root / missing[0]} is missing ({len(missing)} such)')
  if left_over := sorted(held - set(files)):
    raise ValueError(f'{root / left_over[0]} was not published ({len(left_over)} such)')
  for name, (sha256, size_bytes) in files.items():
    got = hash_file(root / name)
    if got != Blob(sha256, size_bytes):
      raise ValueError(
        f'{root / name} is corrupt: {got.size_bytes} bytes of sha256 {got.sha256[:12]}; expected '
        f'{size_bytes} bytes of {sha256[:12]}'
      )


def read_layout(directory: str) -> Layout:
  """Raises ValueError naming the file that is missing, cut short or unreadable."""
  root = pathlib.Path(directory)
  try:
    config = json.loads((root / CONFIG).read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'{root / CONFIG}: {error}') from None
  shards = sorted(root.glob('*.safetensors'))
  if not shards:
    raise ValueError(f'{root} holds no safetensors file')
  tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
  for shard in shards:
    for name, entry in _read_header(shard).items():
      if name in tensors:
        raise ValueError(f'{shard}: tensor {name} is in another shard too')
      tensors[name] = entry
  return Layout({key: config[key] for key in config if key not in _IDLE_KEYS}, tensors)


def check_layout(got: Layout, expected: Layout) -> None:
  """Raises ValueError naming what differs from the view that the server was started with."""
  for key in sorted(set(got.config) | set(expected.config)):
    theirs, ours = got.config.get(key), expected.config.get(key)
    if theirs != ours:
      raise ValueError(f'{CONFIG}: {key} is {_short(theirs)}; expected {_short(ours)}')
  if missing := sorted(set(expected.tensors) - set(got.tensors)):
    raise ValueError(f'tensor {missing[0]} is missing ({len(missing)} such)')
  if left_over := sorted(set(got.tensors) - set(expected.tensors)):
    raise ValueError(f'tensor {left_over[0]} is not one of this model ({len(left_over)} such)')
  for name, entry in got.tensors.items():
    if entry != expected.tensors[name]:
      raise ValueError(f'tensor {name} is {entry}; expected {expected.tensors[name]}')


def _read_header(path: pathlib.Path) -> dict[str, tuple[str, tuple[int, ...]]]:
  with open(path, 'rb') as file:
    head = file.read(_HEADER.size)
    size = _HEADER.unpack(head)[0] if len(head) == _HEADER.size else _MAX_HEADER_BYTES + 1
    header = file.read(size) if size <= _MAX_HEADER_BYTES else b''
  try:
    entries = {name: entry for name, entry in json.loads(header).items() if name != '__metadata__'}
    end = max((entry['data_offsets'][1] for entry in entries.values()), default=0)
    tensors = {name: (str(e['dtype']), tuple(map(int, e['shape']))) for name, e in entries.items()}
  except (ValueError, KeyError, TypeError, AttributeError, IndexError):
    raise ValueError(f'{path} is cut short or no safetensors file') from None
  expected = _HEADER.size + size + end
  if path.stat().st_size != expected:
    raise ValueError(f'{path} has {path.stat().st_size} bytes; expected {expected}')
  return tensors


def _short(value: Any) -> str:
  text = json.dumps(value)
  return text if len(text) <= 80 else f'{text[:77]}...'
