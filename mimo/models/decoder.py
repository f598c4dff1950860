"""The decoder as functions of a config and a plain parameter dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp

from mimo.models import activations, layers, moe
from mimo.models.activations import ActivationQuant
from mimo.models.attention import Context, KVCache
from mimo.models.config import ATTENTION, DELTA, ModelConfig
from mimo.models.delta_net import DeltaCache
from mimo.models.parallel import Parallel
from mimo.models.stack import Cache as Cache
from mimo.models.stack import Decoder, Remat, by_token
from mimo.models.table import nest

_KV_QUANT = (None, 'bf16', 'fp8')


def init(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Returns fresh float32 parameters: the embedding and head normal(0.02), kernels by fan-in."""
  tokens = jnp.zeros((1, 1), jnp.int32)
  context = _full_context(config, tokens + 1, tokens)
  model = Decoder(config)

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
  model = Decoder(config, dtype, remat, _kind(activation_quant), parallel=parallel)
  context = _full_context(config, segment_ids, positions)
  variables = _variables(params, activation_quant)
  if routes is not None:
    _check_routes(config, tokens, routes)
  return model.apply(variables, tokens, context, None, routes)[0]


def forward_replayed(
  config: ModelConfig,
  params: Mapping[str, Any],
  tokens: jax.Array,
  segment_ids: jax.Array,
  positions: jax.Array,
  routes: jax.Array,
  *,
  dtype: Any = jnp.float32,
  remat: Remat = False,
  parallel: Parallel | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`forward` with routes, and how many layers would have sent a token elsewhere.

  Returns:
    (hidden, [B, T] int32: of the layers, those whose router chooses others than the given ones).
  """
  chex.assert_equal_shape([tokens, segment_ids, positions])
  _check_routes(config, tokens, routes)
  model = Decoder(config, dtype, remat, parallel=parallel)
  context = _full_context(config, segment_ids, positions)
  (hidden, _), state = model.apply(
    _variables(params, None), tokens, context, None, routes, mutable=[moe.DIFFERENT]
  )
  layers_of = jax.tree.leaves(
    state[moe.DIFFERENT]
  )  # [L / p, B, T] for each position of the pattern
  return hidden, jnp.sum(jnp.concatenate(layers_of), axis=0, dtype=jnp.int32)


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
  _, state = Decoder(config).apply(
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
  _, state = Decoder(config).apply({'params': params}, tokens, context, None, mutable=[moe.ROUTES])
  return by_token(config, state)


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
  return jnp.where(context.present[..., None], hidden, 0), cache, by_token(config, state)


def _cached(
  config: ModelConfig, dtype: Any, activation_quant: ActivationQuant | None, kv_quant: str | None
) -> Decoder:
  if kv_quant not in _KV_QUANT:
    raise ValueError(f'kv_quant is {kv_quant!r}; expected one of {list(_KV_QUANT)}')
  return Decoder(config, dtype, False, _kind(activation_quant), kv_quant)


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
