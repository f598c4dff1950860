"""The gated delta net token mixer: a short convolution, the gated delta rule, a gated norm.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464), as Qwen3-Next has it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mimo.models import delta, layers, parallel_mixers
from mimo.models.attention import Context
from mimo.models.config import ModelConfig
from mimo.models.parallel import Parallel


class DeltaCache(NamedTuple):
  """What every delta net keeps of the tokens before. There is no going back to fewer of them.

  Attributes:
    tails: [L, B, K - 1, C], what entered the convolution last.
    states: [L, B, Hv, Dk, Dv] float32.
  """

  tails: jax.Array
  states: jax.Array


class GatedDeltaNet(nn.Module):
  """Linear attention by the gated delta rule.

  q, k, v = silu(conv(in_proj_qkv(x)));  log_decay = -exp(A_log) softplus(in_proj_a(x) + dt_bias)
  y = out_proj(norm(rule(unit(q) / sqrt(Dk), unit(k), v, sigmoid(in_proj_b(x)))) silu(in_proj_z(x)))

  Decays, the rule's state and the norm are float32.
  """

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  parallel: Parallel | None = None

  def setup(self) -> None:
    c = self.config.delta
    assert c is not None
    d = (self.config.hidden_size,)

    def make(
      in_shape: tuple[int, ...], out_shape: tuple[int, ...], quantised: bool = True
    ) -> layers.Projection:
      return layers.Projection(
        in_shape, out_shape, self.dtype, self.quant_kind if quantised else None
      )

    channels = 2 * c.key_size + c.value_size
    if self.config.fused_delta:
      group = c.num_value_heads // c.num_key_heads
      wide = 2 * c.key_head_dim + 2 * group * c.value_head_dim
      self.in_proj_qkvz = make(d, (c.num_key_heads, wide))
      self.in_proj_ba = make(d, (c.num_key_heads, 2 * group), quantised=False)
    else:
      self.in_proj_qkv = make(d, (channels,))
      self.in_proj_z = make(d, (c.num_value_heads, c.value_head_dim))
      self.in_proj_b = make(d, (c.num_value_heads,), quantised=False)
      self.in_proj_a = make(d, (c.num_value_heads,), quantised=False)
    self.conv = _Conv((channels, 1, c.conv_size))
    self.dt_bias = self.param('dt_bias', nn.initializers.ones, (c.num_value_heads,), jnp.float32)
    self.A_log = self.param('A_log', _init_a_log, (c.num_value_heads,))
    self.norm = layers.RMSNorm(self.config.rms_norm_eps, self.dtype)
    self.out_proj = make((c.num_value_heads, c.value_head_dim), d)

  def __call__(
    self, x: jax.Array, context: Context, state: tuple[DeltaCache, jax.Array] | None
  ) -> tuple[jax.Array, DeltaCache | None]:
    """`state` is (the cache of all delta nets, this one's index)."""
    qkv, z, b, a = self._project(x)
    decay = jax.nn.softplus(a.astype(jnp.float32) + self.dt_bias)
    log_decay = -jnp.exp(self.A_log) * decay
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    kernel = self.conv()[:, 0]
    if state is None:
      assert context.segment_ids is not None
      ids = context.segment_ids
      qkv = parallel_mixers.conv(self.parallel, qkv, kernel, ids)
      heads = self._heads(qkv)
      out = parallel_mixers.chunked(self.parallel, *heads, log_decay, beta, ids)
      cache = None
    else:
      cache, index = state
      out, cache = self._extend(qkv, kernel, log_decay, beta, context, cache, index)
    gate = jax.nn.silu(z.astype(jnp.float32))
    out = (self.norm(out) * gate).astype(self.dtype)
    return self.out_proj(out), cache

  def _project(self, x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns (q, k and v end to end [B, T, C], z [B, T, Hv, Dv], b [B, T, Hv], a [B, T, Hv])."""
    if not self.config.fused_delta:
      return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
    c = self.config.delta
    assert c is not None
    rows = x.shape[:2]
    group = c.num_value_heads // c.num_key_heads
    ends = (c.key_head_dim, 2 * c.key_head_dim, 2 * c.key_head_dim + group * c.value_head_dim)
    q, k, v, z = jnp.split(self.in_proj_qkvz(x), ends, axis=-1)
    b, a = jnp.split(self.in_proj_ba(x), 2, axis=-1)
    qkv = jnp.concatenate([part.reshape(*rows, -1) for part in (q, k, v)], axis=-1)
    z = z.reshape(*rows, c.num_value_heads, c.value_head_dim)
    return qkv, z, b.reshape(*rows, -1), a.reshape(*rows, -1)

  def _heads(self, qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What leaves the convolution -> unit queries over sqrt(Dk), unit keys, values, by head."""
    c = self.config.delta
    assert c is not None
    rows = qkv.shape[:2]
    q, k, v = jnp.split(jax.nn.silu(qkv), (c.key_size, 2 * c.key_size), axis=-1)
    q, k = (delta.unit(part.reshape(*rows, c.num_key_heads, -1)) for part in (q, k))
    return q * c.key_head_dim**-0.5, k, v.reshape(*rows, c.num_value_heads, -1)

  def _extend(
    self,
    qkv: jax.Array,
    kernel: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    context: Context,
    cache: DeltaCache,
    index: jax.Array,
  ) -> tuple[jax.Array, DeltaCache]:
    """Goes on from the cache; rows that start anew from zeros. Absent tokens change nothing."""
    assert context.fresh is not None
    present = context.present
    tail = jnp.where(context.fresh[:, None, None], 0, cache.tails[index])
    state = jnp.where(context.fresh[:, None, None, None], 0, cache.states[index])
    qkv, tail = delta.conv(qkv, kernel, present.astype(jnp.int32), tail)
    q, k, v = self._heads(qkv)
    if present.shape[1] == 1:
      log_decay, beta = (jnp.where(present[..., None], a, 0)[:, 0] for a in (log_decay, beta))
      out, state = delta.step(q[:, 0], k[:, 0], v[:, 0], log_decay, beta, state)
      out = out[:, None]
    else:
      ids = present.astype(jnp.int32)
      out, state = delta.chunked(q, k, v, log_decay, beta, ids, state)
    return out, DeltaCache(
      cache.tails.at[index].set(tail.astype(cache.tails.dtype)), cache.states.at[index].set(state)
    )


class _Conv(nn.Module):
  """The kernel of a depthwise convolution, [C, 1, K]."""

  shape: tuple[int, ...]

  @nn.compact
  def __call__(self) -> jax.Array:
    init = nn.initializers.variance_scaling(
      1.0, 'fan_in', 'normal', in_axis=-1, out_axis=-2, batch_axis=0
    )
    return self.param('kernel', init, self.shape, jnp.float32)


def _init_a_log(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """log of uniform(0.01, 16)."""
  return jnp.log(jax.random.uniform(key, shape, jnp.float32, 0.01, 16.0))
