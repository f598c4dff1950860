"""The decoder's layers: blocks of a token mixer and a feed-forward, stacked and scanned over.

Each is behind a norm and a residual. Layers run under one scan, so that compilation does not grow
with depth; where kinds of mixers alternate, it is over their pattern.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mimo.models import layers, moe
from mimo.models.attention import Attention, Context, KVCache
from mimo.models.config import DELTA, ModelConfig
from mimo.models.delta_net import DeltaCache, GatedDeltaNet
from mimo.models.moe import MoE
from mimo.models.parallel import Parallel, constrain, lookup

_EMBEDDING_STD = 0.02
BLOCK_INPUT = 'block_input'

Remat = bool | Literal['host']

# (x [B, T, D], the cache): what passes from layer to layer.
_Carry = tuple[jax.Array, 'Cache | None']
# (index in the stack, this layer's part of the routes).
_PerLayer = tuple[jax.Array, jax.Array | None]


class Cache(NamedTuple):
  """What decoding carries from call to call.

  Attributes:
    kv: of the layers that attend.
    delta: of the delta nets; None where there are none.
  """

  kv: KVCache
  delta: DeltaCache | None

  @property
  def length(self) -> int:
    """How many positions a row holds."""
    return self.kv.length


class _Block(nn.Module):
  """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  kv_quant: str | None
  parallel: Parallel | None
  position: int = 0  # in the config's pattern

  def setup(self) -> None:
    c = self.config
    self.mixer_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype, c.gated)
    if c.pattern[self.position] == DELTA:
      self.delta = GatedDeltaNet(c, self.dtype, self.quant_kind, self.parallel)
    else:
      self.attention = Attention(c, self.dtype, self.quant_kind, self.kv_quant, self.parallel)
    self.mlp_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype, c.gated)
    if c.moe is None:
      self.mlp = layers.SwiGLU(c.hidden_size, c.intermediate_size, self.dtype, self.quant_kind)
    else:
      self.moe = MoE(c, self.dtype, self.quant_kind, self.parallel)

  def __call__(self, carry: _Carry, xs: _PerLayer, context: Context) -> tuple[_Carry, None]:
    x, cache = carry
    x = checkpoint_name(x, BLOCK_INPUT)
    layer, routes = xs
    y, cache = self._mix(self.mixer_norm(x), context, cache, layer)
    x = constrain(self.parallel, x + y, 'rows', 'context', None)
    y = self.mlp_norm(x)
    y = self.mlp(y) if self.config.moe is None else self.moe(y, context.present, routes)
    return (constrain(self.parallel, x + y, 'rows', 'context', None), cache), None

  def _mix(
    self, x: jax.Array, context: Context, cache: Cache | None, layer: jax.Array
  ) -> tuple[jax.Array, Cache | None]:
    # The cache is carried and not scanned over: a scan would copy each layer's part twice.
    kinds, kind = self.config.pattern, self.config.pattern[self.position]
    index = layer * kinds.count(kind) + kinds[: self.position].count(kind)
    if cache is None:
      mixer = self.delta if kind == DELTA else self.attention
      return mixer(x, context, None)[0], None
    if kind == DELTA:
      assert cache.delta is not None
      y, delta = self.delta(x, context, (cache.delta, index))
      return y, cache._replace(delta=delta)
    y, kv = self.attention(x, context, (cache.kv, index))
    assert kv is not None
    return y, cache._replace(kv=kv)


class _Period(nn.Module):
  """One block for each position of the pattern."""

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  kv_quant: str | None
  parallel: Parallel | None
  remat: Remat

  @nn.compact
  def __call__(self, carry: _Carry, xs: _PerLayer, context: Context) -> tuple[_Carry, None]:
    layer, routes = xs
    for position in range(len(self.config.pattern)):
      block = _block(self.remat)(
        self.config,
        self.dtype,
        self.quant_kind,
        self.kv_quant,
        self.parallel,
        position,
        name=str(position),
      )
      part = None if routes is None else routes[position]
      carry, _ = block(carry, (layer, part), context)
    return carry, None


def _block(remat: Remat) -> Any:
  if remat == 'host':
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=[BLOCK_INPUT],
      offload_src='device',
      offload_dst='pinned_host',
    )
    return nn.remat(_Block, prevent_cse=False, policy=policy)
  return nn.remat(_Block, prevent_cse=False) if remat else _Block


class Decoder(nn.Module):
  """Tokens to hidden states after the final norm, over whole rows or a cache."""

  config: ModelConfig
  dtype: Any = jnp.float32
  remat: Remat = False
  quant_kind: str | None = None
  kv_quant: str | None = None
  parallel: Parallel | None = None

  @nn.compact
  def __call__(
    self,
    tokens: jax.Array,
    context: Context,
    cache: Cache | None,
    routes: jax.Array | None = None,
  ) -> tuple[jax.Array, Cache | None]:
    c = self.config
    init = nn.initializers.normal(_EMBEDDING_STD)
    shape = (c.vocab_size, c.hidden_size)
    embedding = _Leaf('embedding', init, shape, name='embed')()
    if not c.tie_embeddings:
      _Leaf('kernel', init, shape[::-1], name='head')()
    x = lookup(self.parallel, jnp.asarray(embedding), tokens).astype(self.dtype)
    x = constrain(self.parallel, x, 'rows', 'context', None)
    # A token that is absent enters as zeros, and without biases stays zero through every layer.
    x = jnp.where(context.present[..., None], x, 0)
    how = (c, self.dtype, self.quant_kind, self.kv_quant, self.parallel)
    period = len(c.pattern)
    collections = ('params', layers.INPUT_SCALES, layers.INPUT_AMAX, moe.ROUTES, moe.DIFFERENT)
    scan = functools.partial(
      nn.scan,
      variable_axes=dict.fromkeys(collections, 0),
      split_rngs={'params': True},
      in_axes=(0, nn.broadcast),
      length=c.num_layers // period,
    )
    if period == 1:
      stack = scan(_block(self.remat))(*how, name='layers')
    else:
      stack = scan(_Period)(*how, self.remat, name='layers')
    xs = (jnp.arange(c.num_layers // period), _by_stack(c, routes))
    (x, cache), _ = stack((x, cache), xs, context)
    return layers.RMSNorm(c.rms_norm_eps, self.dtype, c.gated, name='final_norm')(x), cache


def _by_stack(config: ModelConfig, routes: jax.Array | None) -> jax.Array | None:
  """[B, T, L, k] -> [L, B, T, k], or by the pattern [L / p, p, B, T, k]."""
  if routes is None:
    return None
  routes = jnp.moveaxis(routes, 2, 0)
  period = len(config.pattern)
  return routes if period == 1 else routes.reshape(-1, period, *routes.shape[1:])


def by_token(config: ModelConfig, state: Mapping[str, Any]) -> jax.Array:
  """The routes that the layers left in `state`, [B, T, L, k]."""
  layer = state[moe.ROUTES]['layers']
  period = len(config.pattern)
  parts = [layer] if period == 1 else [layer[str(position)] for position in range(period)]
  ids = jnp.stack([part['moe']['ids'] for part in parts], axis=1)  # [L / p, p, B, T, k]
  return jnp.moveaxis(ids.reshape(config.num_layers, *ids.shape[2:]), 0, 2)


class _Leaf(nn.Module):
  """A module that is one parameter."""

  leaf: str
  init_fn: Any
  shape: tuple[int, ...]

  @nn.compact
  def __call__(self) -> jax.Array:
    return self.param(self.leaf, self.init_fn, self.shape, jnp.float32)
