"""Views: a model's weights in one format, as a directory that vLLM serves unchanged.

A view is encoded from a BF16 snapshot, never from another view. It holds config.json with its
quantization_config, safetensors shards, tokenizer files, and a note of ours that servers ignore.
Reading one back decodes each tensor as the compressed-tensors library does, rounded to bfloat16;
or, where asked for, as a server's kernels compute with it: they multiply quantised values and apply
the scales to the product, so nothing is rounded to bfloat16 between.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from mimo.models.activations import ActivationQuant
from mimo.models.config import ModelConfig
from mimo.models.table import HEAD, from_named_tensors, hf_params, table
from mimo.weights import formats, huggingface, quantise
from mimo.weights.encoder import Encoding, Tensor, write_checkpoint
from mimo.weights.layouts import Layout, Origin, Place, is_carried
from mimo.weights.shards import SHARD_BYTES
from mimo.weights.tensors import TensorReader

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
  tensors: Iterable[tuple[str, Tensor]],
  spec: ViewSpec,
  *,
  tokenizer_files: Mapping[str, bytes],
  origin: Origin | None = None,
  shard_bytes: int = SHARD_BYTES,
) -> None:
  """Writes a view. The directory appears whole or not at all.

  Tensors are read, encoded and written several at a time, and what is held of them is bounded;
  see `mimo.weights.pipeline`.

  Args:
    directory: to be made; it may exist if it is empty.
    config: the model.
    tensors: (Hugging Face name, bfloat16 tensor) of every tensor of the model, in any order.
    spec: what it is to be.
    tokenizer_files: name -> content.
    origin: how a bf16 view names tensors, and what is carried along; None: as the family's
      publisher does, and nothing.
    shard_bytes: the most that one safetensors file holds, one tensor at least.

  Raises:
    ValueError: the format can't hold the model, the tensors are not the model's, or the directory
      exists and is not empty.
  """
  check_format(config, spec.format)
  origin = origin or Origin(Layout.published(config), None)
  if spec.format != 'bf16':
    origin = dataclasses.replace(origin, layout=origin.layout.single())
  with huggingface.new_directory(directory) as temporary:
    encoding = Encoding(spec.format, spec.block_scale, spec.input_scales)
    write_checkpoint(temporary, config, tensors, encoding, origin, shard_bytes=shard_bytes)
    huggingface.write_config(temporary, view_config(config, spec.format, origin))
    note = {'format': spec.format, 'block_scale': spec.block_scale}
    (temporary / NOTE).write_text(json.dumps(note) + '\n', encoding='utf-8')
    for name, content in tokenizer_files.items():
      (temporary / name).write_bytes(content)


def view_config(config: ModelConfig, format: str, origin: Origin) -> dict[str, Any]:
  """Returns config.json's content for a view."""
  raw = config.to_hf()
  raw.pop('torch_dtype', None)
  raw['dtype'] = 'bfloat16'
  names = (origin.layout.rename(n) for n in formats.ignored_modules(table(config)))
  ignore = [*names, *(origin.carried.modules() if origin.carried else ())]
  stated = formats.quantization_config(format, ignore)
  return raw if stated is None else raw | {'quantization_config': stated}


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
  reader = TensorReader(path)
  layout = Layout.detect(config, reader.names())
  config, head_alone = huggingface.resolve_tie(config, layout, reader)
  decoder = _Decoder(reader, config, format, np.float32 if exact else quantise.BF16)
  places = {
    name: huggingface.place_of(layout, row, index, head_alone=head_alone)
    for name, row, index in hf_params(config)
  }
  try:
    params = from_named_tensors(config, lambda name: decoder.read(name, places[name]), np.float32)
    leftover = sorted(set(reader.names()) - decoder.used - {HEAD})
    leftover = [name for name in leftover if not is_carried(config, name)]
    if leftover:
      raise ValueError(
        f'tensor {leftover[0]} is not one of this model in {format} ({len(leftover)} such)'
      )
    quant = _activation_quant(config, format, decoder.input_scales)
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from None
  return View(config, params, format, quant)


class _Decoder:
  """Decodes tensors, and remembers which stored tensors that took."""

  def __init__(self, reader: TensorReader, config: ModelConfig, format: str, dtype: Any):
    self._reader = reader
    self._dtype = dtype
    self._format = formats.get_format(format)
    self._quantisable = {name for name, row, _ in hf_params(config) if row.quantisable}
    self.used: set[str] = set()
    self.input_scales: dict[str, np.float32] = {}

  def read(self, name: str, place: Place) -> np.ndarray:
    """Returns the tensor of that name. KeyError where it is missing."""
    if name not in self._quantisable or not self._format.quantised:
      return self._read_plain(place)
    module = place.name.removesuffix('.weight')
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

  def _read_plain(self, place: Place) -> np.ndarray:
    place.check_shape(self._reader)
    tensor = self._reader.read(place.name, place.index, place.rows)
    self.used.add(place.name)
    if tensor.dtype == quantise.BF16:
      return tensor
    if tensor.dtype not in (np.float32, np.float16):
      raise ValueError(f'tensor {place.name} is {tensor.dtype}; expected bfloat16')
    return tensor.astype(quantise.BF16)


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
    kind, {path: jax.device_put(x.reshape(shapes[path])) for path, x in stacked.items()}
  )
