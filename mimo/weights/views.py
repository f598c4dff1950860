"""Views: a model's weights in one format, as a directory that vLLM serves unchanged.

A view is encoded from a BF16 snapshot, never from another view. It holds config.json with its
quantization_config, safetensors shards, tokenizer files, and a note of ours that servers ignore.
Reading one back decodes each tensor as the compressed-tensors library does, rounded to bfloat16;
or, where asked for, as a server's kernels compute with it: they multiply quantised values and apply
the scales to the product, so nothing is rounded to bfloat16 between.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mimo.models.activations import ActivationQuant
from mimo.models.config import ModelConfig
from mimo.models.table import HEAD, Param, from_named_tensors, fuse_key, hf_params, table
from mimo.weights import formats, huggingface, quantise

NOTE = 'mimo_view.json'  # how the view was made; nothing reads it to decode


@dataclasses.dataclass(frozen=True)
class View:
  """A view read back.

  Attributes:
    config: the model's.
    params: float32; every value one that bfloat16 holds, unless the view was read as exact.
    format: its name.
    activation_quant: how the format has a server round the inputs of projections; None where it
      leaves them.
  """

  config: ModelConfig
  params: dict[str, Any]
  format: str
  activation_quant: ActivationQuant | None


@dataclasses.dataclass(frozen=True)
class ViewSpec:
  """What a view is to be.

  Attributes:
    format: its name.
    block_scale: how nvfp4 block scales are chosen, 'amax' or 'four_over_six'.
    input_scales: for nvfp4_w4a4, weight name -> `input_global_scale`; see `calibrate`.
  """

  format: str
  block_scale: str = 'amax'
  input_scales: Mapping[str, float] | None = None

  def __post_init__(self) -> None:
    formats.get_format(self.format)
    formats.check_block_scale(self.block_scale)
    if 'input_global_scale' in formats.get_format(self.format).suffixes and not self.input_scales:
      raise ValueError(f'{self.format} needs calibrated input scales; got none')


def check_format(config: ModelConfig, format: str) -> None:
  """Raises ValueError naming the first tensor of the model that a format can't hold."""
  formats.get_format(format)
  for row in table(config):
    if not row.quantisable:
      continue
    rows, columns = row.hf_shape
    if format == 'fp8_block' and row.fuse_group is not None and rows % formats.BLOCK:
      raise ValueError(
        f'{row.hf_name} has {rows} rows; expected a multiple of {formats.BLOCK} for fp8_block, '
        'because servers fuse it with others (fp8_channel has no such rule)'
      )
    if format.startswith('nvfp4') and columns % formats.GROUP:
      raise ValueError(
        f'{row.hf_name} has {columns} columns; expected a multiple of {formats.GROUP} for {format}'
      )


def write_view(
  directory: str | os.PathLike[str],
  config: ModelConfig,
  tensors: Iterable[tuple[str, np.ndarray]],
  format: str,
  *,
  tokenizer_files: Mapping[str, bytes],
  block_scale: str = 'amax',
  input_scales: Mapping[str, float] | None = None,
  shard_bytes: int = huggingface.SHARD_BYTES,
) -> None:
  """Writes a view. The directory appears whole or not at all.

  Tensors are taken one at a time: what is held is one fuse group and one shard.

  Args:
    directory: to be made; it may exist if it is empty.
    config: the model.
    tensors: (Hugging Face name, bfloat16 tensor) of every tensor of the model, in any order.
    format: its name.
    tokenizer_files: name -> content.
    block_scale: see `ViewSpec`.
    input_scales: see `ViewSpec`.
    shard_bytes: the most that one safetensors file holds, one tensor at least.

  Raises:
    ValueError: the format can't hold the model, the tensors are not the model's, or the directory
      exists and is not empty.
  """
  spec = ViewSpec(format, block_scale, input_scales)
  check_format(config, format)
  with huggingface.new_directory(directory) as temporary:
    encoded = encode_tensors(config, tensors, spec)
    huggingface.write_tensors(temporary, encoded, shard_bytes=shard_bytes)
    huggingface.write_config(temporary, view_config(config, format))
    note = {'format': format, 'block_scale': block_scale}
    (temporary / NOTE).write_text(json.dumps(note) + '\n', encoding='utf-8')
    for name, content in tokenizer_files.items():
      (temporary / name).write_bytes(content)


def view_config(config: ModelConfig, format: str) -> dict[str, Any]:
  """Returns config.json's content for a view."""
  raw = config.to_hf()
  raw.pop('torch_dtype', None)
  raw['dtype'] = 'bfloat16'
  ignore = formats.ignored_modules(table(config))
  stated = formats.quantization_config(format, ignore)
  return raw if stated is None else raw | {'quantization_config': stated}


def encode_tensors(
  config: ModelConfig, tensors: Iterable[tuple[str, np.ndarray]], spec: ViewSpec
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (name, array) of a view's tensors, as soon as each fuse group is complete.

  Raises ValueError for a tensor that is not the model's, comes twice, is missing, or has the wrong
  dtype or shape.
  """
  expected = {name: (row, fuse_key(row, index)) for name, row, index in hf_params(config)}
  sizes = collections.Counter(key for _, key in expected.values())
  groups: dict[tuple[Any, ...], dict[str, np.ndarray]] = {}
  for name, tensor in tensors:
    if name not in expected:
      raise ValueError(f'tensor {name} is not one of this model, or came twice')
    row, key = expected.pop(name)
    _check_tensor(name, tensor, row)
    if not row.quantisable or spec.format == 'bf16':
      yield name, tensor
    elif key is None:
      yield from _encode_group({name: tensor}, spec)
    else:
      group = groups.setdefault(key, {})
      group[name] = tensor
      if len(group) == sizes[key]:
        yield from _encode_group(groups.pop(key), spec)
  if expected:
    raise ValueError(f'tensor {next(iter(expected))} is missing ({len(expected)} such)')


def read_view(directory: str | os.PathLike[str], *, exact: bool = False) -> View:
  """Reads a view, ours or another writer's in one of the five layouts.

  Args:
    directory: the view.
    exact: leaves quantised weights as value times scales in float32, as the kernels of servers
      do, instead of rounding them to bfloat16 as libraries that decode checkpoints do.

  Raises ValueError naming the file or tensor that is missing, corrupt, left over, or of the wrong
  dtype or shape for the model that config.json states.
  """
  path = pathlib.Path(directory)
  raw = huggingface.read_config(path)
  try:
    format = formats.detect_format(raw)
    config = ModelConfig.from_hf(raw)
  except ValueError as error:
    raise ValueError(f'{path / huggingface.CONFIG}: {error}') from None
  reader = huggingface.TensorReader(path)
  config, stored_as = huggingface.resolve_tie(config, reader.names(), reader.read)
  decoder = _Decoder(reader, config, format, np.float32 if exact else quantise.BF16)
  try:
    params = from_named_tensors(config, lambda name: decoder.read(stored_as(name)), np.float32)
    leftover = sorted(set(reader.names()) - decoder.used - {HEAD})
    if leftover:
      raise ValueError(
        f'tensor {leftover[0]} is not one of this model in {format} ({len(leftover)} such)'
      )
    quant = _activation_quant(config, format, decoder.input_scales)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None
  return View(config, params, format, quant)


class _Decoder:
  """Decodes tensors by name, and remembers which stored tensors that took."""

  def __init__(
    self, reader: huggingface.TensorReader, config: ModelConfig, format: str, dtype: Any
  ):
    self._reader = reader
    self._dtype = dtype
    self._format = formats.get_format(format)
    self._quantisable = {name for name, row, _ in hf_params(config) if row.quantisable}
    self.used: set[str] = set()
    self.input_scales: dict[str, np.float32] = {}

  def read(self, name: str) -> np.ndarray:
    """Returns the tensor. KeyError where it is missing."""
    if name not in self._quantisable or not self._format.quantised:
      return self._read_plain(name)
    module = name.removesuffix('.weight')
    stored = {suffix: f'{module}.{suffix}' for suffix in self._format.suffixes}
    absent = [tensor for tensor in stored.values() if tensor not in self._reader]
    if absent:
      raise ValueError(f'tensor {absent[0]} is missing; {self._format.name} needs it')
    parts = {suffix: self._reader.read(tensor) for suffix, tensor in stored.items()}
    self.used.update(stored.values())
    try:
      if 'input_global_scale' in parts:
        self.input_scales[name] = _input_scale(parts['input_global_scale'])
      return quantise.decode(self._format.name, parts, self._dtype)
    except ValueError as error:
      raise ValueError(f'{module}: {error}') from None

  def _read_plain(self, name: str) -> np.ndarray:
    tensor = self._reader.read(name)
    self.used.add(name)
    if tensor.dtype == quantise.BF16:
      return tensor
    if tensor.dtype not in (np.float32, np.float16):
      raise ValueError(f'tensor {name} is {tensor.dtype}; expected bfloat16')
    return tensor.astype(quantise.BF16)


def _encode_group(
  group: Mapping[str, np.ndarray], spec: ViewSpec
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the tensors that hold one fuse group, in the order of names."""
  names = sorted(group)
  input_scale = None
  if spec.input_scales is not None and spec.format == 'nvfp4_w4a4':
    absent = [name for name in names if name not in spec.input_scales]
    if absent:
      raise ValueError(f'{absent[0]} has no calibrated input scale')
    # A server has one input for the whole group: the smallest divisor covers every part.
    input_scale = min(float(spec.input_scales[name]) for name in names)
  try:
    encoded = quantise.encode(
      spec.format,
      [group[name] for name in names],
      block_scale=spec.block_scale,
      input_scale=input_scale,
    )
  except ValueError as error:
    raise ValueError(f'{names[0]}: {error}') from None
  for name, parts in zip(names, encoded, strict=True):
    for suffix, array in parts.items():
      yield f'{name.removesuffix(".weight")}.{suffix}', array


def _check_tensor(name: str, tensor: np.ndarray, row: Param) -> None:
  if tensor.dtype != quantise.BF16:
    raise ValueError(f'tensor {name} is {tensor.dtype}; expected bfloat16')
  if tensor.shape != row.hf_shape:
    raise ValueError(
      f'tensor {name} has shape {list(tensor.shape)}; expected {list(row.hf_shape)} for this config'
    )


def _input_scale(stored: np.ndarray) -> np.float32:
  if stored.dtype != np.float32 or stored.shape != (1,):
    raise ValueError(
      f'input_global_scale is {stored.dtype} {list(stored.shape)}; expected float32 [1]'
    )
  if not (np.isfinite(stored[0]) and stored[0] > 0):
    raise ValueError(f'input_global_scale is {stored[0]}; expected a positive finite number')
  return stored[0]


def _activation_quant(
  config: ModelConfig, format: str, input_scales: Mapping[str, np.float32]
) -> ActivationQuant | None:
  kind = formats.get_format(format).activations
  if kind == 'none':
    return None
  if kind != 'nvfp4':
    return ActivationQuant(kind)
  stacked = {
    row.path: np.array([input_scales[name] for name, _ in row.hf_names()], np.float32)
    for row in table(config)
    if row.quantisable
  }
  shapes = {row.path: row.lead_shape for row in table(config)}
  return ActivationQuant(
    kind, {path: jnp.asarray(x.reshape(shapes[path])) for path, x in stacked.items()}
  )
