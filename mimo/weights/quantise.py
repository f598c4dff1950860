"""Encoders and decoders of quantised weights, on numpy arrays.

A weight is a matrix [out, in] in bfloat16, as Hugging Face checkpoints hold it; its encoding is a
dict from tensor suffix (`weight_packed`, `weight_scale`, ...) to array. Arithmetic is float32, and
decoding takes the steps of the compressed-tensors library in its order, so that both give the same
bits.

Largest magnitudes are 448 (e4m3) and 6 (e2m1). A cast above 448 gives NaN, so values are clipped
first. Formats and conventions: `mimo.weights.formats`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from mimo.weights import formats

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# The smallest block scale. A smaller one would round to zero, and the block with it.
E4M3_TINY = float(ml_dtypes.finfo(E4M3).smallest_subnormal)
F32_TINY = float(np.finfo(np.float32).tiny)

_E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
_E2M1_VALUES = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float32)
# A bfloat16's bits -> the code of its nearest value, saturated.
_EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16).view(BF16).astype(np.float32)
with np.errstate(invalid='ignore'):  # among them are NaNs, which e2m1 lacks
  _E4M3_CODES = np.clip(_EVERY_BF16, -E4M3_MAX, E4M3_MAX).astype(E4M3).view(np.uint8)
  _E2M1_CODES = np.clip(_EVERY_BF16, -E2M1_MAX, E2M1_MAX).astype(E2M1).view(np.uint8) & 0xF
_STRIP_ELEMENTS = 1 << 17
# Byte -> the pair of values it packs.
_E2M1_PAIRS = np.stack(
  [_E2M1_VALUES[np.arange(256) & 15], _E2M1_VALUES[np.arange(256) >> 4]], axis=1
)


def encode(
  name: str,
  weights: Sequence[np.ndarray],
  *,
  block_scale: str = 'amax',
  input_scale: float | None = None,
) -> list[dict[str, np.ndarray]]:
  """Encodes the weights of one fuse group, which share their nvfp4 global scale.

  Args:
    name: the format.
    weights: each [out, in] bfloat16; one alone where a weight is not fused.
    block_scale: how nvfp4 block scales are chosen, 'amax' or 'four_over_six'.
    input_scale: the calibrated `input_global_scale` of nvfp4_w4a4.

  Returns:
    One dict of suffix -> array per weight.

  Raises:
    ValueError: an unknown format or rule, a shape that the format can't hold, or a missing
      input scale.
  """
  form = formats.get_format(name)
  formats.check_block_scale(block_scale)
  for weight in weights:
    _check_weight(weight)
  if name == 'bf16':
    return [{'weight': weight} for weight in weights]
  if name == 'fp8_channel':
    return [encode_fp8_channel(weight) for weight in weights]
  if name == 'fp8_block':
    return [encode_fp8_block(weight, fused=len(weights) > 1) for weight in weights]
  encoded = encode_nvfp4(weights, block_scale=block_scale)
  if 'input_global_scale' in form.suffixes:
    if input_scale is None:
      raise ValueError(f'{name} needs a calibrated input_global_scale; got none')
    if not (np.isfinite(input_scale) and input_scale > 0):
      raise ValueError(f'input_global_scale is {input_scale}; expected a positive finite number')
    for parts in encoded:
      parts['input_global_scale'] = np.array([input_scale], np.float32)
  return encoded


def parts_of(name: str, shape: tuple[int, ...]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
  """Returns what `encode` gives for a weight [out, in] of that shape: suffix -> (dtype, shape)."""
  rows, columns = shape
  grid = (-(-rows // formats.BLOCK), -(-columns // formats.BLOCK))
  single = (np.dtype(np.float32), (1,))
  nvfp4 = {
    'weight_packed': (np.dtype(np.uint8), (rows, columns // 2)),
    'weight_scale': (E4M3, (rows, columns // formats.GROUP)),
    'weight_global_scale': single,
  }
  parts: dict[str, dict[str, tuple[np.dtype, tuple[int, ...]]]] = {
    'bf16': {'weight': (BF16, shape)},
    'fp8_channel': {'weight': (E4M3, shape), 'weight_scale': (np.dtype(np.float32), (rows, 1))},
    'fp8_block': {'weight': (E4M3, shape), 'weight_scale_inv': (np.dtype(np.float32), grid)},
    'nvfp4_w4a16': nvfp4,
    'nvfp4_w4a4': nvfp4 | {'input_global_scale': single},
  }
  return parts[formats.get_format(name).name]


def decode(name: str, parts: Mapping[str, np.ndarray], dtype: Any = BF16) -> np.ndarray:
  """Returns the weight [out, in] that `parts` (suffix -> array) holds.

  Args:
    name: the format.
    parts: see above.
    dtype: BF16, as libraries decode checkpoints, or float32, which leaves the product of value and
      scales as it is; bf16 weights are bfloat16 always.

  Raises ValueError where a part's dtype or shape is not the format's.
  """
  formats.get_format(name)
  if name == 'bf16':
    _expect(parts, 'weight', BF16)
    return parts['weight']
  if name == 'fp8_channel':
    return decode_fp8_channel(parts, dtype)
  if name == 'fp8_block':
    return decode_fp8_block(parts, dtype)
  return decode_nvfp4(parts, dtype)


def encode_fp8_channel(weight: np.ndarray) -> dict[str, np.ndarray]:
  """w ~ e4m3 * weight_scale, weight_scale = amax of the row / 448."""
  scale = _fp8_scale(_amax(weight, axis=1)[:, None])
  encoded = np.empty(weight.shape, E4M3)
  for rows in _strips(weight):
    encoded[rows] = _to_e4m3(weight[rows].astype(np.float32) / scale[rows])
  return {'weight': encoded, 'weight_scale': scale}


def decode_fp8_channel(parts: Mapping[str, np.ndarray], dtype: Any = BF16) -> np.ndarray:
  """Inverse of `encode_fp8_channel`, see `decode`."""
  weight = _expect(parts, 'weight', E4M3)
  scale = _expect(parts, 'weight_scale', None, (weight.shape[0], 1))
  return (_from_e4m3(weight) * scale.astype(np.float32)).astype(dtype)


def encode_fp8_block(weight: np.ndarray, *, fused: bool = False) -> dict[str, np.ndarray]:
  """w ~ e4m3 * weight_scale_inv, weight_scale_inv = amax of the 128 x 128 block / 448.

  Raises ValueError for a fused part whose rows are no multiple of 128: a server that lays the
  parts on top of each other could not tell which rows a block's scale covers.
  """
  rows, columns = weight.shape
  if fused and rows % formats.BLOCK:
    raise ValueError(
      f'fp8_block needs the rows of fused parts to be multiples of {formats.BLOCK}; got {rows} '
      '(fp8_channel has no such rule)'
    )
  grid = (-(-rows // formats.BLOCK), -(-columns // formats.BLOCK))
  encoded, scales = np.empty(weight.shape, E4M3), np.empty(grid, np.float32)
  for i in range(grid[0]):
    strip = slice(i * formats.BLOCK, (i + 1) * formats.BLOCK)
    part = weight[strip]
    blocks = _blocks(part)
    # Rows first: the other order reads memory in small steps.
    scales[i] = _fp8_scale(_amax(_amax(blocks[0], axis=0, keep_bits=True), axis=1))
    scaled = blocks.astype(np.float32) / scales[i][None, None, :, None]
    encoded[strip] = _to_e4m3(scaled.reshape(formats.BLOCK, -1)[: part.shape[0], :columns])
  return {'weight': encoded, 'weight_scale_inv': scales}


def decode_fp8_block(parts: Mapping[str, np.ndarray], dtype: Any = BF16) -> np.ndarray:
  """Inverse of `encode_fp8_block`, see `decode`."""
  weight = _expect(parts, 'weight', E4M3)
  rows, columns = weight.shape
  grid = (-(-rows // formats.BLOCK), -(-columns // formats.BLOCK))
  scale = _expect(parts, 'weight_scale_inv', None, grid).astype(np.float32)
  blocks = _blocks(_from_e4m3(weight)) * scale[:, None, :, None]
  full = blocks.reshape(blocks.shape[0] * formats.BLOCK, -1)
  return full[:rows, :columns].astype(dtype)


def global_scale(amax: float) -> np.float32:
  """448 * 6 / amax, the divisor that lets block scales use all of e4m3's range.

  1 where that is not a finite number, so that tensors of zeros stay zeros.
  """
  with np.errstate(divide='ignore', over='ignore'):
    scale = np.float32(E4M3_MAX * E2M1_MAX) / np.float32(amax)
  return scale if np.isfinite(scale) else np.float32(1.0)


def encode_nvfp4(
  weights: Sequence[np.ndarray], *, block_scale: str = 'amax'
) -> list[dict[str, np.ndarray]]:
  """w ~ e2m1 * weight_scale / weight_global_scale, for weights that share the global scale.

  The block scale maps the largest magnitude of 16 elements to 6 ('amax'), or to whichever of 6
  and 4 gives the smaller squared error ('four_over_six': at 4, the values between are spaced more
  evenly). The global scale is 448 * 6 / amax under both rules, so blocks within a third of the
  group's largest value have no room to map to 4 exactly: their scale saturates at 448.

  Raises ValueError where the columns are no multiple of 16.
  """
  for weight in weights:
    if weight.shape[1] % formats.GROUP:
      raise ValueError(
        f'nvfp4 needs the columns to be a multiple of {formats.GROUP}; got {weight.shape[1]}'
      )
  shared = global_scale(max(float(_amax(weight, axis=None)) for weight in weights))
  return [_encode_nvfp4(weight, shared, block_scale) for weight in weights]


def decode_nvfp4(parts: Mapping[str, np.ndarray], dtype: Any = BF16) -> np.ndarray:
  """Inverse of `encode_nvfp4`, see `decode`."""
  packed = _expect(parts, 'weight_packed', np.dtype(np.uint8))
  rows, columns = packed.shape[0], packed.shape[1] * 2
  stored = _expect(parts, 'weight_scale', E4M3, (rows, columns // formats.GROUP))
  shared = _expect(parts, 'weight_global_scale', np.dtype(np.float32), (1,))
  if not (np.isfinite(shared[0]) and shared[0] > 0):
    raise ValueError(f'weight_global_scale is {shared[0]}; expected a positive finite number')
  scale = _from_e4m3(stored) / shared
  values = _unpack(packed).reshape(rows, -1, formats.GROUP) * scale[:, :, None]
  return values.reshape(rows, columns).astype(dtype)


def _encode_nvfp4(weight: np.ndarray, shared: np.float32, rule: str) -> dict[str, np.ndarray]:
  rows, columns = weight.shape
  packed = np.empty((rows, columns // 2), np.uint8)
  scales = np.empty((rows, columns // formats.GROUP), E4M3)
  for strip in _strips(weight):
    packed[strip], scales[strip] = _encode_nvfp4_rows(weight[strip], shared, rule)
  return {
    'weight_packed': packed,
    'weight_scale': scales,
    'weight_global_scale': np.array([shared], np.float32),
  }


def _encode_nvfp4_rows(
  weight: np.ndarray, shared: np.float32, rule: str
) -> tuple[np.ndarray, np.ndarray]:
  rows, columns = weight.shape
  amax = _amax(weight.reshape(rows, -1, formats.GROUP), axis=2)
  blocks = weight.astype(np.float32).reshape(rows, -1, formats.GROUP)
  stored = _block_scale(amax / np.float32(E2M1_MAX) * shared)
  codes = _to_e2m1(blocks, stored, shared)
  if rule == 'four_over_six':
    other = _block_scale(amax / np.float32(4.0) * shared)
    other_codes = _to_e2m1(blocks, other, shared)
    better = _block_error(blocks, other_codes, other, shared) < _block_error(
      blocks, codes, stored, shared
    )
    stored = np.where(better, other, stored)
    codes = np.where(better[:, :, None], other_codes, codes)
  pairs = codes.reshape(rows, columns // 2, 2)
  return pairs[:, :, 0] | (pairs[:, :, 1] << 4), stored


def _block_scale(scale: np.ndarray) -> np.ndarray:
  return np.clip(scale, E4M3_TINY, E4M3_MAX).astype(E4M3)


def _to_e2m1(blocks: np.ndarray, stored: np.ndarray, shared: np.float32) -> np.ndarray:
  """Returns the e2m1 codes of blocks [out, G, 16] under scales [out, G] e4m3, uint8."""
  scaled = blocks / (_from_e4m3(stored) / shared)[:, :, None]
  return np.take(_E2M1_CODES, _keys(scaled))


def _block_error(
  blocks: np.ndarray, codes: np.ndarray, stored: np.ndarray, shared: np.float32
) -> np.ndarray:
  """Returns the squared error of each block [out, G]."""
  decoded = _E2M1_VALUES[codes] * (_from_e4m3(stored) / shared)[:, :, None]
  return np.square(decoded - blocks).sum(axis=2)


def _unpack(packed: np.ndarray) -> np.ndarray:
  """Returns the e2m1 values [out, in] float32 of bytes [out, in / 2], low nibble first."""
  return np.take(_E2M1_PAIRS, packed, axis=0).reshape(packed.shape[0], -1)


def _fp8_scale(amax: np.ndarray) -> np.ndarray:
  """amax / 448, and 1 where there is nothing to scale."""
  scale = np.maximum(amax / np.float32(E4M3_MAX), np.float32(F32_TINY))
  return np.where(amax > 0, scale, np.float32(1.0))


def _to_e4m3(values: np.ndarray) -> np.ndarray:
  return np.take(_E4M3_CODES, _keys(values)).view(E4M3)


def _keys(values: np.ndarray) -> np.ndarray:
  """Returns what float32 values round to in 16 bits, where that isn't exact to the odd neighbour.

  Rounding such a key once more, to a format of at least two mantissa bits fewer, gives what
  rounding the value to nearest at once gives: a key that isn't exact is never halfway.
  """
  halves = np.ascontiguousarray(values).view(np.uint16).reshape(*values.shape, 2)
  return halves[..., 1] | np.minimum(halves[..., 0], 1)


def _amax(weight: np.ndarray, axis: int | None, *, keep_bits: bool = False) -> np.ndarray:
  """Returns the largest magnitude of bfloat16 values along an axis, in float32.

  By bits, which order magnitudes as their values do. `keep_bits` returns bfloat16.
  """
  bits = weight.view(np.uint16) & np.uint16(0x7FFF)
  if axis is not None and bits.shape[axis] == formats.GROUP and axis == bits.ndim - 1:
    while bits.shape[-1] > 1:  # numpy reduces short rows slowly
      half = bits.shape[-1] // 2
      bits = np.maximum(bits[..., :half], bits[..., half:])
    largest = bits[..., 0].view(BF16)
  else:
    largest = np.asarray(bits.max(axis=axis)).view(BF16)
  return largest if keep_bits else largest.astype(np.float32)


def _strips(weight: np.ndarray) -> Iterator[slice]:
  """Yields slices of rows whose values and what is made of them fit a core's cache."""
  step = max(1, _STRIP_ELEMENTS // weight.shape[1])
  for begin in range(0, weight.shape[0], step):
    yield slice(begin, begin + step)


def _from_e4m3(values: np.ndarray) -> np.ndarray:
  return np.take(_E4M3_VALUES, values.view(np.uint8))


def _blocks(values: np.ndarray) -> np.ndarray:
  """Returns [rows / 128, 128, columns / 128, 128], padded with zeros."""
  rows, columns = values.shape
  pad = (-rows % formats.BLOCK, -columns % formats.BLOCK)
  if any(pad):
    values = np.pad(values, ((0, pad[0]), (0, pad[1])))
  return values.reshape(-1, formats.BLOCK, values.shape[1] // formats.BLOCK, formats.BLOCK)


def _check_weight(weight: np.ndarray) -> None:
  if weight.dtype != BF16 or weight.ndim != 2 or not weight.size:
    raise ValueError(
      f'weight is {weight.dtype} {list(weight.shape)}; expected a bfloat16 matrix [out, in]'
    )


def _expect(
  parts: Mapping[str, np.ndarray],
  suffix: str,
  dtype: np.dtype | None,
  shape: tuple[int, ...] | None = None,
) -> np.ndarray:
  """Returns the part of that suffix, of that dtype (None: any float) and shape (None: a matrix)."""
  if suffix not in parts:
    raise ValueError(f'{suffix} is missing; got {sorted(parts)}')
  array = parts[suffix]
  allowed = (np.dtype(np.float32), BF16) if dtype is None else (dtype,)
  if array.dtype not in allowed:
    raise ValueError(f'{suffix} is {array.dtype}; expected {" or ".join(map(str, allowed))}')
  if shape is None and array.ndim != 2:
    raise ValueError(f'{suffix} has shape {list(array.shape)}; expected a matrix')
  if shape is not None and array.shape != shape:
    raise ValueError(f'{suffix} has shape {list(array.shape)}; expected {list(shape)}')
  return array
