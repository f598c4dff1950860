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
  """Keys (rotated) and values: [L, B, S, Hkv, Dh] each. An entry is defined once written."""

  keys: jax.Array
  values: jax.Array


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
    cache = None
    if state is not None:
      if self.kv_quant == 'fp8':
        k, v = activations.fp8_static(k), activations.fp8_static(v)
      cache, layer = state
      assert context.slots is not None
      cache = write(cache, layer, context.slots, k, v)
      k, v = (a[layer].astype(self.dtype) for a in cache)
    return self.o_proj(attend(q, k, v, context.mask)), cache


def write(
  cache: KVCache, layer: jax.Array, slots: jax.Array, keys: jax.Array, values: jax.Array
) -> KVCache:
  """Writes keys and values [B, T, Hkv, Dh] of one layer at `slots` [B, T], in place where it can.

  Slots beyond the cache's length are dropped.
  """
  rows = jnp.arange(slots.shape[0])[:, None]
  return KVCache(
    *(
      old.at[layer, rows, slots].set(new.astype(old.dtype), mode='drop')
      for old, new in zip(cache, (keys, values), strict=True)
    )
  )


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """softmax(q k^T / sqrt(Dh)) v, query head h reading key head h // (H / Hkv).

  Args:
    q: [B, T, H, Dh] float.
    k: [B, S, Hkv, Dh] float.
    v: [B, S, Hkv, Dh] float.
    mask: [B, T, S] bool; a query must see a key.

  Returns:
    [B, T, H, Dh], the dtype of `q`. Scores and their softmax are float32.
  """
  batch, length, heads, dim = q.shape
  q = q.reshape(batch, length, k.shape[2], heads // k.shape[2], dim)
  scores = jnp.einsum('btkgd,bskd->bkgts', q, k, preferred_element_type=jnp.float32)
  scores = jnp.where(mask[:, None, None], scores * dim**-0.5, jnp.finfo(jnp.float32).min)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
  return jnp.einsum('bkgts,bskd->btkgd', weights, v).reshape(batch, length, heads, dim)
