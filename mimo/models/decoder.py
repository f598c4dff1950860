"""The decoder as functions of a config and a plain parameter dict.

Layers are stacked and run under one scan, so that compilation does not grow with depth. A block
is a token mixer and a feed-forward, each behind a norm and a residual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from mimo.models import activations, layers
from mimo.models.activations import ActivationQuant
from mimo.models.attention import Attention, Context, KVCache
from mimo.models.config import ModelConfig
from mimo.models.parallel import Parallel, constrain, lookup
from mimo.models.table import nest

_EMBEDDING_STD = 0.02
_KV_QUANT = (None, 'bf16', 'fp8')


class _Block(nn.Module):
  """x + mixer(norm(x)), then x + feed_forward(norm(x))."""

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  kv_quant: str | None
  parallel: Parallel | None

  def setup(self) -> None:
    c = self.config
    self.mixer_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype)
    self.attention = Attention(c, self.dtype, self.quant_kind, self.kv_quant)
    self.mlp_norm = layers.RMSNorm(c.rms_norm_eps, self.dtype)
    self.mlp = layers.SwiGLU(c.hidden_size, c.intermediate_size, self.dtype, self.quant_kind)

  def __call__(
    self, carry: tuple[jax.Array, KVCache | None], layer: jax.Array, context: Context
  ) -> tuple[tuple[jax.Array, KVCache | None], None]:
    x, cache = carry
    # The cache is carried and not scanned over: a scan would copy each layer's part twice.
    state = None if cache is None else (cache, layer)
    y, cache = self.attention(self.mixer_norm(x), context, state)
    x = constrain(self.parallel, x + y, 'rows', 'context', None)
    x = constrain(self.parallel, x + self.mlp(self.mlp_norm(x)), 'rows', 'context', None)
    return (x, cache), None


class _Decoder(nn.Module):
  config: ModelConfig
  dtype: Any = jnp.float32
  remat: bool = False
  quant_kind: str | None = None
  kv_quant: str | None = None
  parallel: Parallel | None = None

  @nn.compact
  def __call__(
    self, tokens: jax.Array, present: jax.Array, context: Context, cache: KVCache | None
  ) -> tuple[jax.Array, KVCache | None]:
    c = self.config
    init = nn.initializers.normal(_EMBEDDING_STD)
    shape = (c.vocab_size, c.hidden_size)
    embedding = _Leaf('embedding', init, shape, name='embed')()
    if not c.tie_embeddings:
      _Leaf('kernel', init, shape[::-1], name='head')()
    x = lookup(self.parallel, jnp.asarray(embedding), tokens).astype(self.dtype)
    x = constrain(self.parallel, x, 'rows', 'context', None)
    # A token that is absent enters as zeros, and without biases stays zero through every layer.
    x = jnp.where(present[..., None], x, 0)
    block = nn.remat(_Block, prevent_cse=False) if self.remat else _Block
    stack = nn.scan(
      block,
      variable_axes={'params': 0, layers.INPUT_SCALES: 0, layers.INPUT_AMAX: 0},
      split_rngs={'params': True},
      in_axes=(0, nn.broadcast),
      length=c.num_layers,
    )(c, self.dtype, self.quant_kind, self.kv_quant, self.parallel, name='layers')
    (x, cache), _ = stack((x, cache), jnp.arange(c.num_layers), context)
    return layers.RMSNorm(c.rms_norm_eps, self.dtype, name='final_norm')(x), cache


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
    return model.init(key, tokens, tokens == 0, context, None)['params']

  return jax.jit(run)(key)


def forward(
  config: ModelConfig,
  params: Mapping[str, Any],
  tokens: jax.Array,
  segment_ids: jax.Array,
  positions: jax.Array,
  *,
  dtype: Any = jnp.float32,
  remat: bool = False,
  activation_quant: ActivationQuant | None = None,
  parallel: Parallel | None = None,
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
    remat: whether the backward pass recomputes each block.
    activation_quant: how inputs of projections are rounded.
    parallel: the mesh that the arrays live on; static under jit. None is one device.

  Returns:
    [B, T, D] `dtype`, after the final norm.
  """
  chex.assert_rank([tokens, segment_ids, positions], 2)
  chex.assert_equal_shape([tokens, segment_ids, positions])
  model = _Decoder(config, dtype, remat, _kind(activation_quant), parallel=parallel)
  context = _full_context(config, segment_ids, positions)
  variables = _variables(params, activation_quant)
  return model.apply(variables, tokens, segment_ids > 0, context, None)[0]


def input_amax(
  config: ModelConfig,
  params: Mapping[str, Any],
  tokens: jax.Array,
  segment_ids: jax.Array,
  positions: jax.Array,
) -> dict[tuple[str, ...], jax.Array]:
  """Returns the largest magnitude that enters each projection: its kernel's path -> [L] float32.

  Arguments are those of `forward`; padding does not count.
  """
  context = _full_context(config, segment_ids, positions)
  _, state = _Decoder(config).apply(
    {'params': params}, tokens, segment_ids > 0, context, None, mutable=[layers.INPUT_AMAX]
  )
  found = jax.tree_util.tree_leaves_with_path(state[layers.INPUT_AMAX])
  return {(*(key.key for key in path[:-1]), 'kernel'): amax for path, amax in found}


def head_matrix(config: ModelConfig, params: Mapping[str, Any]) -> jax.Array:
  """Returns [D, V]: logits are hidden states times this matrix."""
  return params['embed']['embedding'].T if config.tie_embeddings else params['head']['kernel']


def init_cache(config: ModelConfig, batch: int, length: int, dtype: Any) -> KVCache:
  """Returns an empty cache for `batch` rows of `length` tokens."""
  lead = (config.num_layers, batch, config.num_kv_heads)
  return KVCache(
    jnp.zeros((*lead, config.head_dim, length), dtype),
    jnp.zeros((*lead, length, config.head_dim), dtype),
  )


def extend(
  config: ModelConfig,
  params: Mapping[str, Any],
  cache: KVCache,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
  *,
  dtype: Any = jnp.float32,
  activation_quant: ActivationQuant | None = None,
  kv_quant: str | None = None,
  window: int | None = None,
) -> tuple[jax.Array, KVCache]:
  """Runs the next tokens of each row against its cache, and writes them there.

  Row b's token i sits at position start[b] + i and sees the cache up to and with itself. Donate
  the cache: it is then updated in place.

  Args:
    config: the model; static under jit.
    params: its parameters, cast to `dtype` where they are used.
    cache: what earlier calls returned; positions below `start` must have been written.
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
  chex.assert_rank([tokens, start, count], [2, 1, 1])
  if kv_quant not in _KV_QUANT:
    raise ValueError(f'kv_quant is {kv_quant!r}; expected one of {list(_KV_QUANT)}')
  window = cache.length if window is None else window
  steps = jnp.arange(tokens.shape[1])
  positions = start[:, None] + steps
  present = steps < count[:, None]
  context = Context(
    angles=layers.rope_angles(config.rope, config.head_dim, positions),
    mask=jnp.arange(window) <= positions[..., None],
    slots=jnp.where(present, positions, cache.length),
  )
  model = _Decoder(config, dtype, False, _kind(activation_quant), kv_quant)
  variables = _variables(params, activation_quant)
  hidden, cache = model.apply(variables, tokens, present, context, cache)
  return jnp.where(present[..., None], hidden, 0), cache


def _full_context(config: ModelConfig, segment_ids: jax.Array, positions: jax.Array) -> Context:
  angles = layers.rope_angles(config.rope, config.head_dim, positions)
  return Context(angles, segment_ids=segment_ids)


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
