"""The decoder as functions of a config and a plain parameter dict.

Layers are stacked and run under one scan, so that compilation does not grow with depth. A block
is a token mixer and a feed-forward, each behind a norm and a residual.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mimo.models import activations, layers, moe
from mimo.models.activations import ActivationQuant
from mimo.models.attention import Attention, Context, KVCache
from mimo.models.config import ATTENTION, DELTA, ModelConfig
from mimo.models.delta_net import DeltaCache, GatedDeltaNet
from mimo.models.moe import MoE
from mimo.models.parallel import Parallel, constrain, lookup
from mimo.models.table import nest

_EMBEDDING_STD = 0.02
_KV_QUANT = (None, 'bf16', 'fp8')
_BLOCK_INPUT = 'block_input'

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
    x = checkpoint_name(x, _BLOCK_INPUT)
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
      names_which_can_be_offloaded=[_BLOCK_INPUT],
      offload_src='device',
      offload_dst='pinned_host',
    )
    return nn.remat(_Block, prevent_cse=False, policy=policy)
  return nn.remat(_Block, prevent_cse=False) if remat else _Block


class _Decoder(nn.Module):
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
    collections = ('params', layers.INPUT_SCALES, layers.INPUT_AMAX, moe.ROUTES)
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


def _by_token(config: ModelConfig, state: Mapping[str, Any]) -> jax.Array:
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


def init(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Returns fresh float32 parameters: the embedding and head normal(0.02), kernels by fan-in."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  context = _full_context(config, tokens + 1, tokens)
  model = _Decoder(config)

  def run(key: jax.Array) -> dict[str, Any]:
    return model.init(key, tokens, context, None)['params']

  return jax.jit(run)(key)


def forward(
  config: ModelConfig,
  params: Mapping[str, Any],
  tokens: jax.Array,
  segment_ids: jax.Array,
  positions: jax.Array,
  *,
  dtype: Any = jnp.float32,
  remat: Remat = False,
  activation_quant: ActivationQuant | None = None,
  parallel: Parallel | None = None,
  routes: jax.Array | None = None,
) -> jax.Array:
  """Runs whole rows, each of which may hold several sequences.

  A token sees those of its own segment that are not after it in the row. Where `segment_ids` is 0
  there is no token, and the result is 0.

  Args:
    config: the model; static under jit.
    params: its parameters, cast to `dtype` where they are used.
    tokens: [B, T] int32.
    segment_ids: [B, T] int32, 0 for padding.
    positions: [B, T] int32, from 0 in each segment.
    dtype: of the computation; norms, scores and their softmax are float32.
    remat: whether the backward pass recomputes each block from its input; 'host' keeps the inputs
      there.
    activation_quant: how inputs of projections are rounded.
    parallel: the mesh that the arrays live on; static under jit. None is one device.
    routes: [B, T, L, k] int32, the experts that each layer is to send a token to, as a sampler
      chose them; -1 where it did not say, and the router chooses. Their weights are the router's
      here either way. None: it chooses everywhere.

  Returns:
    [B, T, D] `dtype`, after the final norm.
  """
  chex.assert_rank([tokens, segment_ids, positions], 2)
  chex.assert_equal_shape([tokens, segment_ids, positions])
  model = _Decoder(config, dtype, remat, _kind(activation_quant), parallel=parallel)
  context = _full_context(config, segment_ids, positions)
  variables = _variables(params, activation_quant)
  if routes is not None:
    _check_routes(config, tokens, routes)
  return model.apply(variables, tokens, context, None, routes)[0]


def input_amax(
  config: ModelConfig,
  params: Mapping[str, Any],
  tokens: jax.Array,
  segment_ids: jax.Array,
  positions: jax.Array,
) -> dict[tuple[str, ...], jax.Array]:
  """Returns the largest magnitude that enters each projection: its kernel's path -> float32.

  [L], and of experts [L, E], 0 for one that had no token. Arguments are those of `forward`; padding
  does not count.
  """
  context = _full_context(config, segment_ids, positions)
  _, state = _Decoder(config).apply(
    {'params': params}, tokens, context, None, mutable=[layers.INPUT_AMAX]
  )
  found = jax.tree_util.tree_leaves_with_path(state[layers.INPUT_AMAX])
  return {(*(key.key for key in path[:-1]), 'kernel'): amax for path, amax in found}


def chosen_experts(
  config: ModelConfig,
  params: Mapping[str, Any],
  tokens: jax.Array,
  segment_ids: jax.Array,
  positions: jax.Array,
) -> jax.Array:
  """Returns the experts that each layer's router chooses, [B, T, L, k] int32; -1 for padding.

  Arguments are those of `forward`, whose `routes` these may be.
  """
  if config.moe is None:
    raise ValueError(f'family {config.family!r} has no experts to choose')
  context = _full_context(config, segment_ids, positions)
  _, state = _Decoder(config).apply({'params': params}, tokens, context, None, mutable=[moe.ROUTES])
  return _by_token(config, state)


def head_matrix(config: ModelConfig, params: Mapping[str, Any]) -> jax.Array:
  """Returns [D, V]: logits are hidden states times this matrix."""
  return params['embed']['embedding'].T if config.tie_embeddings else params['head']['kernel']


def init_cache(config: ModelConfig, batch: int, length: int, dtype: Any) -> Cache:
  """Returns an empty cache for `batch` rows of `length` tokens. Leaves are [layers, batch, ...]."""
  layers, heads = config.layer_types.count(ATTENTION), config.num_kv_heads
  kv = KVCache(
    jnp.zeros((layers, batch, heads, config.head_dim, length), dtype),
    jnp.zeros((layers, batch, heads, length, config.head_dim), dtype),
  )
  c = config.delta
  if c is None:
    return Cache(kv, None)
  layers = config.layer_types.count(DELTA)
  tails = jnp.zeros((layers, batch, c.conv_size - 1, 2 * c.key_size + c.value_size), dtype)
  states = jnp.zeros(
    (layers, batch, c.num_value_heads, c.key_head_dim, c.value_head_dim), jnp.float32
  )
  return Cache(kv, DeltaCache(tails, states))


def extend(
  config: ModelConfig,
  params: Mapping[str, Any],
  cache: Cache,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
  *,
  dtype: Any = jnp.float32,
  activation_quant: ActivationQuant | None = None,
  kv_quant: str | None = None,
  window: int | None = None,
) -> tuple[jax.Array, Cache]:
  """Runs the next tokens of each row against its cache, and writes them there.

  Row b's token i sits at position start[b] + i and sees the cache up to and with itself. Donate
  the cache: it is then updated in place.

  Args:
    config: the model; static under jit.
    params: its parameters, cast to `dtype` where they are used.
    cache: what earlier calls returned; positions below `start` must have been written, and nothing
      else since: delta nets go on from what they hold, so a row can be extended or begun anew,
      with `start` 0, but not taken back.
    tokens: [B, C] int32.
    start: [B] int32, how many tokens each row holds already; start + count may not exceed the
      length of the cache.
    count: [B] int32, how many of the C are real: the rest are not written, and their results are
      0. A row of count 0 is idle.
    dtype: of the computation; norms, scores and their softmax are float32.
    activation_quant: how inputs of projections are rounded.
    kv_quant: 'bf16' rounds keys and values to bf16 as they are written, 'fp8' to e4m3 with
      scale 1; the cache keeps its dtype.
    window: reads only the first so many positions of the cache, so that short rows cost less; no
      real token may lie beyond it. Static under jit; None reads all.

  Returns:
    (hidden [B, C, D] `dtype` after the final norm, the cache).
  """
  model = _cached(config, dtype, activation_quant, kv_quant)
  context = _next_context(config, cache, tokens, start, count, window)
  hidden, cache = model.apply(_variables(params, activation_quant), tokens, context, cache)
  return jnp.where(context.present[..., None], hidden, 0), cache


def extend_routed(
  config: ModelConfig,
  params: Mapping[str, Any],
  cache: Cache,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
  *,
  dtype: Any = jnp.float32,
  activation_quant: ActivationQuant | None = None,
  kv_quant: str | None = None,
  window: int | None = None,
) -> tuple[jax.Array, Cache, jax.Array]:
  """`extend` of a model with experts, and those that each layer sent each token to.

  Returns:
    (hidden, the cache, [B, C, L, k] int32, -1 where there is no token).
  """
  model = _cached(config, dtype, activation_quant, kv_quant)
  context = _next_context(config, cache, tokens, start, count, window)
  (hidden, cache), state = model.apply(
    _variables(params, activation_quant), tokens, context, cache, mutable=[moe.ROUTES]
  )
  return jnp.where(context.present[..., None], hidden, 0), cache, _by_token(config, state)


def _cached(
  config: ModelConfig, dtype: Any, activation_quant: ActivationQuant | None, kv_quant: str | None
) -> _Decoder:
  if kv_quant not in _KV_QUANT:
    raise ValueError(f'kv_quant is {kv_quant!r}; expected one of {list(_KV_QUANT)}')
  return _Decoder(config, dtype, False, _kind(activation_quant), kv_quant)


def _next_context(
  config: ModelConfig,
  cache: Cache,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
  window: int | None,
) -> Context:
  chex.assert_rank([tokens, start, count], [2, 1, 1])
  window = cache.length if window is None else window
  steps = jnp.arange(tokens.shape[1])
  positions = start[:, None] + steps
  present = steps < count[:, None]
  return Context(
    angles=layers.rope_angles(config.rope, config.rotary_dim, positions),
    present=present,
    mask=jnp.arange(window) <= positions[..., None],
    slots=jnp.where(present, positions, cache.length),
    fresh=(start == 0) & (count > 0),
  )


def _full_context(config: ModelConfig, segment_ids: jax.Array, positions: jax.Array) -> Context:
  angles = layers.rope_angles(config.rope, config.rotary_dim, positions)
  return Context(angles, segment_ids > 0, segment_ids=segment_ids)


def _check_routes(config: ModelConfig, tokens: jax.Array, routes: jax.Array) -> None:
  count = 0 if config.moe is None else config.moe.experts_per_token
  expected = (*tokens.shape, config.num_layers, count)
  if config.moe is None or routes.shape != expected:
    raise ValueError(
      f'routes are {list(routes.shape)}; expected {list(expected)} of a model with experts'
    )


def _kind(quant: ActivationQuant | None) -> str | None:
  if quant is None:
    return None
  activations.check_activation_quant(quant)
  return quant.kind


def _variables(params: Mapping[str, Any], quant: ActivationQuant | None) -> dict[str, Any]:
  variables: dict[str, Any] = {'params': params}
  if quant is not None and quant.scales is not None:
    scales = {(*path[:-1], 'global_scale'): scale for path, scale in quant.scales.items()}
    variables[layers.INPUT_SCALES] = nest(scales)
  return variables
