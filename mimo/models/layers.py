"""What every decoder block is built from: projections, normalisation, rotary embedding, SwiGLU."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mimo.models import activations
from mimo.models.config import RopeConfig

# Variable collections beside 'params'.
INPUT_SCALES = 'input_scales'
INPUT_AMAX = 'input_amax'


class Projection(nn.Module):
  """y = x W, W in our layout: input dimensions first. Rounds its input as `quant_kind` says.

  Attributes:
    in_shape: the trailing dimensions of x that are contracted.
    out_shape: what they become.
    dtype: of the product.
    quant_kind: None, or a kind of `activations.ActivationQuant`; nvfp4 reads its global scale from
      the variable `input_scales/<path>/global_scale`.
    precision: of the product.
  """

  in_shape: tuple[int, ...]
  out_shape: tuple[int, ...]
  dtype: Any
  quant_kind: str | None
  precision: jax.lax.Precision | None = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    num_in, num_out = len(self.in_shape), len(self.out_shape)
    init = nn.initializers.variance_scaling(
      1.0,
      'fan_in',
      'normal',
      in_axis=tuple(range(num_in)),
      out_axis=tuple(range(num_in, num_in + num_out)),
    )
    kernel = self.param('kernel', init, (*self.in_shape, *self.out_shape), jnp.float32)
    features = math.prod(self.in_shape)
    x = x.reshape(*x.shape[: x.ndim - num_in], features)
    if self.is_mutable_collection(INPUT_AMAX):
      amax = jnp.max(jnp.abs(x)).astype(jnp.float32)
      self.variable(INPUT_AMAX, 'amax', jnp.zeros, (), jnp.float32).value = amax
    scale = self.get_variable(INPUT_SCALES, 'global_scale') if self.quant_kind == 'nvfp4' else None
    x = activations.rounded(x, self.quant_kind, scale)
    matrix = jnp.asarray(kernel, self.dtype).reshape(features, math.prod(self.out_shape))
    y = jnp.dot(x.astype(self.dtype), matrix, precision=self.precision)
    return y.reshape(*x.shape[:-1], *self.out_shape)


class RMSNorm(nn.Module):
  """x / sqrt(mean(x^2) + eps) * scale over the last dimension; the statistics in float32.

  Attributes:
    eps: added to the mean.
    dtype: of the result.
    centred: whether the parameter is scale - 1. Then the product is float32 too.
  """

  eps: float
  dtype: Any
  centred: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init = nn.initializers.zeros if self.centred else nn.initializers.ones
    scale = self.param('scale', init, (x.shape[-1],), jnp.float32)
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
    if self.centred:
      return (wide * (1.0 + scale)).astype(self.dtype)
    return jnp.asarray(scale, self.dtype) * wide.astype(self.dtype)


class SwiGLU(nn.Module):
  """down(silu(gate(x)) * up(x))."""

  hidden_size: int
  intermediate_size: int
  dtype: Any
  quant_kind: str | None

  def setup(self) -> None:
    wide = ((self.hidden_size,), (self.intermediate_size,), self.dtype, self.quant_kind)
    self.gate_proj = Projection(*wide)
    self.up_proj = Projection(*wide)
    self.down_proj = Projection(
      (self.intermediate_size,), (self.hidden_size,), self.dtype, self.quant_kind
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
  """Returns the angle per position of each pair of dimensions, [head_dim / 2] float32.

  theta^(-2i/d), divided by `factor` for 'linear'. 'llama3' divides long wavelengths by `factor`,
  keeps short ones and interpolates between (Llama 3.1). In float32, as transformers does: at
  large positions a better rounded frequency would be another model.
  """
  exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
  frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
  scaling = dict(rope.scaling)
  if rope.rope_type == 'linear':
    return frequencies / np.float32(scaling['factor'])
  if rope.rope_type == 'llama3':
    factor, length = scaling['factor'], scaling['original_max_position_embeddings']
    low, high = scaling['low_freq_factor'], scaling['high_freq_factor']
    turns = length * frequencies / np.float32(2 * math.pi)  # over the original context
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (((1 - smooth) / factor + smooth) * frequencies).astype(np.float32)
  return frequencies


def rope_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, ...]:
  """Returns (cos, sin) of positions [B, T] int32, each [B, T, head_dim / 2] float32."""
  angles = positions[..., None].astype(jnp.float32) * rope_frequencies(rope, head_dim)
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, ...]) -> jax.Array:
  """Rotates each head of x [B, T, H, Dh]: dimension i is paired with i + R / 2.

  R is twice the size of the angles; dimensions from R on stay as they are.
  """
  cos, sin = (a[:, :, None, :].astype(x.dtype) for a in angles)
  half = cos.shape[-1]
  first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
