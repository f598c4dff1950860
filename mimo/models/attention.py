"""The attention token mixer, over a packed row or over a cache of keys and values.

A token mixer takes (x [B, T, D], context, state) and returns (y [B, T, D], state). `context` is
what all layers share; `state` is what decoding carries from call to call, None in a full forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mimo.models import activations, blockwise, layers, parallel_mixers
from mimo.models.config import ModelConfig
from mimo.models.parallel import Parallel


class KVCache(NamedTuple):
  """Keys and values of every layer that attends. An entry is defined once written.

  Heads come before positions, and the positions of keys last, because both products of a decoding
  step then read the cache as it lies: on CPU that is three times faster than [L, B, S, Hkv, Dh].

  Attributes:
    keys: [L, B, Hkv, Dh, S], rotated.
    values: [L, B, Hkv, S, Dh].
  """

  keys: jax.Array
  values: jax.Array

  @property
  def length(self) -> int:
    """How many positions a row holds, S."""
    return self.keys.shape[-1]


class Context(NamedTuple):
  """What all layers share.

  Attributes:
    angles: (cos, sin), each [B, T, R / 2] float32, R of a head's dimensions being rotated.
    present: [B, T] bool, whether there is a token.
    segment_ids: [B, T] int32, 0 for padding, of rows that are run whole; None over a cache.
    mask: [B, T, S] bool, whether query t sees position s of the cache; None without one.
    slots: [B, T] int32, where in the cache token t is written; beyond its end: nowhere. None
      without a cache.
    fresh: [B] bool, rows that hold no token before these; None without a cache.
  """

  angles: tuple[jax.Array, ...]
  present: jax.Array
  segment_ids: jax.Array | None = None
  mask: jax.Array | None = None
  slots: jax.Array | None = None
  fresh: jax.Array | None = None


class Attention(nn.Module):
  """Grouped-query attention with RoPE.

  Where the config says so queries and keys are normalised per head, and an output gate, made beside
  the queries, multiplies each head's result by its sigmoid.
  """

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  kv_quant: str | None
  parallel: Parallel | None = None

  def setup(self) -> None:
    c = self.config
    d, n = c.hidden_size, c.head_dim

    def make(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> layers.Projection:
      return layers.Projection(in_shape, out_shape, self.dtype, self.quant_kind)

    self.q_proj = make((d,), (c.num_heads, 2 * n if c.gated else n))
    self.k_proj = make((d,), (c.num_kv_heads, n))
    self.v_proj = make((d,), (c.num_kv_heads, n))
    self.o_proj = make((c.num_heads, n), (d,))
    if c.qk_norm:
      self.q_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype, c.gated)
      self.k_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype, c.gated)

  def __call__(
    self, x: jax.Array, context: Context, state: tuple[KVCache, jax.Array] | None
  ) -> tuple[jax.Array, KVCache | None]:
    """`state` is (the cache of all layers, this layer's index)."""
    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    gate = None
    if self.config.gated:
      q, gate = jnp.split(q, 2, axis=-1)
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = layers.rotate(q, context.angles), layers.rotate(k, context.angles)
    if state is None:
      assert context.segment_ids is not None
      y = parallel_mixers.attend(self.parallel, q, k, v, context.segment_ids)
      return self._output(y, gate), None
    if self.kv_quant is not None:
      rounded = activations.fp8_static if self.kv_quant == 'fp8' else activations.bf16
      k, v = rounded(k), rounded(v)
    cache, layer = state
    assert context.slots is not None and context.mask is not None
    cache = write(cache, layer, context.slots, k, v)
    window = context.mask.shape[-1]
    k = cache.keys[layer, ..., :window].astype(self.dtype)
    v = cache.values[layer, :, :, :window].astype(self.dtype)
    return self._output(blockwise.masked(q, k, v, context.mask), gate), cache

  def _output(self, y: jax.Array, gate: jax.Array | None) -> jax.Array:
    return self.o_proj(y if gate is None else y * jax.nn.sigmoid(gate))


def write(
  cache: KVCache, layer: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array
) -> KVCache:
  """Writes keys and values [B, T, Hkv, Dh] of one layer at `slots` [B, T], in place where it can.

  Slots beyond the cache's length are dropped.
  """
  rows, slots = jnp.arange(slots.shape[0])[:, None, None], slots[..., None]
  heads = jnp.arange(keys.shape[2])
  keys, values = keys.astype(cache.keys.dtype), values.astype(cache.values.dtype)
  return KVCache(
    cache.keys.at[layer, rows, heads, :, slots].set(keys, mode='drop'),
    cache.values.at[layer, rows, heads, slots].set(values, mode='drop'),
  )
