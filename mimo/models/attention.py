"""The attention token mixer, over a packed row or over a cache of keys and values.

A token mixer takes (x [B, T, D], context, state) and returns (y [B, T, D], state). `context` is
what all layers share; `state` is what decoding carries from call to call, None in a full forward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mimo.models import activations, layers
from mimo.models.config import ModelConfig


class KVCache(NamedTuple):
  """Keys and values of every layer. An entry is defined once written.

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
    angles: (cos, sin), each [B, T, Dh / 2] float32.
    mask: [B, T, S] bool, whether query t sees key s.
    slots: [B, T] int32, where in the cache token t is written; beyond its end: nowhere. None in a
      full forward.
  """

  angles: tuple[jax.Array, ...]
  mask: jax.Array
  slots: jax.Array | None


class Attention(nn.Module):
  """Grouped-query attention with RoPE and, where the config says so, query and key norms."""

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  kv_quant: str | None

  def setup(self) -> None:
    c = self.config
    d, n = c.hidden_size, c.head_dim

    def make(in_shape: tuple[int, ...], out_shape: tuple[int, ...]) -> layers.Projection:
      return layers.Projection(in_shape, out_shape, self.dtype, self.quant_kind)

    self.q_proj = make((d,), (c.num_heads, n))
    self.k_proj = make((d,), (c.num_kv_heads, n))
    self.v_proj = make((d,), (c.num_kv_heads, n))
    self.o_proj = make((c.num_heads, n), (d,))
    if c.qk_norm:
      self.q_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype)
      self.k_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype)

  def __call__(
    self, x: jax.Array, context: Context, state: tuple[KVCache, jax.Array] | None
  ) -> tuple[jax.Array, KVCache | None]:
    """`state` is (the cache of all layers, this layer's index)."""
    q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
    if self.config.qk_norm:
      q, k = self.q_norm(q), self.k_norm(k)
    q, k = layers.rotate(q, context.angles), layers.rotate(k, context.angles)
    if state is None:
      cache, k, v = None, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    else:
      if self.kv_quant is not None:
        rounded = activations.fp8_static if self.kv_quant == 'fp8' else activations.bf16
        k, v = rounded(k), rounded(v)
      cache, layer = state
      assert context.slots is not None
      cache = write(cache, layer, context.slots, k, v)
      window = context.mask.shape[-1]
      k = cache.keys[layer, ..., :window].astype(self.dtype)
      v = cache.values[layer, :, :, :window].astype(self.dtype)
    return self.o_proj(attend(q, k, v, context.mask)), cache


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


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """softmax(q k^T / sqrt(Dh)) v, query head h reading key head h // (H / Hkv).

  Args:
    q: [B, T, H, Dh] float.
    k: [B, Hkv, Dh, S] float.
    v: [B, Hkv, S, Dh] float.
    mask: [B, T, S] bool; a query must see a key.

  Returns:
    [B, T, H, Dh], the dtype of `q`. Scores and their softmax are float32.
  """
  batch, length, heads, dim = q.shape
  kv_heads, slots = k.shape[1], k.shape[-1]
  split = (batch, kv_heads, heads // kv_heads, length)
  merged = (batch, kv_heads, -1)  # the queries of one key head are rows of one matrix
  q = q.transpose(0, 2, 1, 3).reshape(*merged, dim)
  scores = jnp.einsum('bkqd,bkds->bkqs', q, k, preferred_element_type=jnp.float32)
  scores = scores.reshape(*split, slots) * dim**-0.5
  scores = jnp.where(mask[:, None, None], scores, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(*merged, slots)
  y = jnp.einsum('bkqs,bksd->bkqd', weights, v)
  return y.reshape(batch, heads, length, dim).transpose(0, 2, 1, 3)
