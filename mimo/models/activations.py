"""Fake quantisation of what enters a projection, and of keys and values.

Values are rounded as a low-precision server rounds them and then computed with in the compute
dtype, so that a sampler on any hardware shows the error of its format. Scales are float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

E4M3_MAX = 448.0
E2M1_MAX = 6.0
NVFP4_BLOCK = 16
FP8_BLOCK = 128
_MIN_FP8_SCALE = 1.0 / (E4M3_MAX * 512.0)
KINDS = ('fp8_block', 'fp8_token', 'nvfp4')


@dataclasses.dataclass(frozen=True)
class ActivationQuant:
  """How activations are rounded before each quantisable projection.

  Attributes:
    kind: 'fp8_block' or 'fp8_token' (dynamic), or 'nvfp4' (calibrated).
    scales: for nvfp4, a projection's path in the parameter dict -> float32 of the leaf's leading
      shape, [L] or [L, E]: the `input_global_scale` of each layer, or of each expert of each;
      None for the others.
  """

  kind: str
  scales: Mapping[tuple[str, ...], jax.Array] | None = None


# The kind is part of the trace and the scales are data, so new scales do not compile again.
jax.tree_util.register_dataclass(ActivationQuant, data_fields=['scales'], meta_fields=['kind'])


def check_activation_quant(quant: ActivationQuant) -> None:
  """Raises ValueError for an unknown kind, or for scales that the kind has no use for or lacks."""
  if quant.kind not in KINDS:
    raise ValueError(f'activation quantisation is {quant.kind!r}; expected one of {list(KINDS)}')
  if (quant.kind == 'nvfp4') != (quant.scales is not None):
    got = 'none' if quant.scales is None else f'{len(quant.scales)}'
    expected = 'one per projection' if quant.kind == 'nvfp4' else 'none'
    raise ValueError(f'{quant.kind} got scales: {got}; expected {expected}')


def rounded(x: jax.Array, kind: str | None, global_scale: jax.Array | None = None) -> jax.Array:
  """Rounds what enters a projection as `kind`, or leaves it where that is None.

  Args:
    x: [..., D] float.
    kind: None or one of `KINDS`.
    global_scale: for nvfp4; see there.
  """
  if kind == 'fp8_token':
    return fp8_token(x)
  if kind == 'fp8_block':
    return fp8_block(x)
  if kind == 'nvfp4':
    assert global_scale is not None
    return nvfp4(x, global_scale)
  return x


def fp8_token(x: jax.Array) -> jax.Array:
  """Rounds each row to e4m3 with a scale of its own.

  scale = max(amax / 448, 1 / (448 * 512));  y = e4m3(x * (1 / scale)) * scale

  The floor and the reciprocal are vLLM's.

  Args:
    x: [..., D] float.

  Returns:
    [..., D], the dtype of `x`.
  """
  wide = x.astype(jnp.float32)
  scale = _fp8_scale(wide)
  return (_e4m3(wide * jnp.reciprocal(scale)) * scale).astype(x.dtype)


def fp8_block(x: jax.Array) -> jax.Array:
  """Rounds each run of 128 features to e4m3 with a scale of its own.

  scale = max(amax / 448, 1 / (448 * 512));  y = e4m3(x / scale) * scale

  The floor and the division are vLLM's.

  Args:
    x: [..., D] float; where D is no multiple of 128, the last run is shorter.

  Returns:
    [..., D], the dtype of `x`.
  """
  features = x.shape[-1]
  padding = [(0, 0)] * (x.ndim - 1) + [(0, -features % FP8_BLOCK)]
  wide = jnp.pad(x.astype(jnp.float32), padding).reshape(*x.shape[:-1], -1, FP8_BLOCK)
  scale = _fp8_scale(wide)
  rounded = _e4m3(wide / scale) * scale
  return rounded.reshape(*x.shape[:-1], -1)[..., :features].astype(x.dtype)


def nvfp4(x: jax.Array, global_scale: jax.Array) -> jax.Array:
  """Rounds blocks of 16 to e2m1 with e4m3 scales, under a calibrated global scale.

  s = e4m3(global * (amax_block * (1 / 6)));  y = e2m1(x * (1 / (s * (1 / global)))) * (s / global)

  Source: the NVFP4 layout of compressed-tensors, where `global` is a divisor, 448 * 6 / amax. The
  order of operations is that of vLLM's kernels, since a last bit can move a value across a tie.

  Args:
    x: [..., D] float, D a multiple of 16.
    global_scale: float32, [] or one for each row, [...].

  Returns:
    [..., D], the dtype of `x`.
  """
  if x.shape[-1] % NVFP4_BLOCK:
    raise ValueError(
      f'nvfp4 activations have {x.shape[-1]} features; expected a multiple of {NVFP4_BLOCK}'
    )
  if jnp.ndim(global_scale):
    chex.assert_shape(global_scale, x.shape[:-1])
    global_scale = global_scale[..., None, None]
  blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, NVFP4_BLOCK)
  amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
  scale = _e4m3(global_scale * (amax * jnp.float32(1.0 / E2M1_MAX)))
  inverse = jnp.reciprocal(jnp.where(scale > 0, scale * jnp.reciprocal(global_scale), 1.0))
  quotient = jnp.where(scale > 0, blocks * inverse, 0.0)
  return (_e2m1(quotient) * (scale / global_scale)).reshape(x.shape).astype(x.dtype)


def fp8_static(x: jax.Array) -> jax.Array:
  """Rounds to e4m3 with scale 1, as an fp8 key-value cache does. The dtype is kept."""
  return _e4m3(x.astype(jnp.float32)).astype(x.dtype)


def bf16(x: jax.Array) -> jax.Array:
  """Rounds to bf16, as a bf16 key-value cache does. The dtype is kept."""
  # Unlike a cast there and back, this is never simplified away.
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _fp8_scale(x: jax.Array) -> jax.Array:
  """[..., D] float32 -> [..., 1]."""
  amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
  # XLA multiplies by the inverse of a constant divisor, which is off by a last bit half the time,
  # so this one must not look like a constant.
  largest = E4M3_MAX + 0.0 * amax
  return jnp.maximum(amax / largest, _MIN_FP8_SCALE)


def _e4m3(x: jax.Array) -> jax.Array:
  return _round(jnp.clip(x, -E4M3_MAX, E4M3_MAX), mantissa_bits=3, smallest_normal=2.0**-6)


def _e2m1(x: jax.Array) -> jax.Array:
  return _round(jnp.clip(x, -E2M1_MAX, E2M1_MAX), mantissa_bits=1, smallest_normal=1.0)


def _round(x: jax.Array, *, mantissa_bits: int, smallest_normal: float) -> jax.Array:
  """Rounds float32 to the nearest value of a small float, ties to even.

  A cast there and back would say the same, but a compiler that may keep excess precision, as XLA
  may by default, is free to drop it.
  """
  normal = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=mantissa_bits)
  step = smallest_normal / 2**mantissa_bits  # between subnormals
  return jnp.where(jnp.abs(x) < smallest_normal, jnp.round(x / step) * step, normal)
