"""A feed-forward of experts: a router, the experts each token is sent to, and a shared one.

Dropless: every token goes to its k experts, however many others do. Assignments of tokens to
experts are sorted by expert, and each expert multiplies its rows (`grouped_matmul`), so that no
array has a row for each token and expert.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mimo.models import activations, layers, parallel_mixers
from mimo.models.config import ModelConfig
from mimo.models.grouped import grouped_matmul
from mimo.models.parallel import Parallel
from mimo.types import RouteShape

# Variable collections: the experts that each token was sent to, and where those that were given are
# not the router's own choice.
ROUTES = 'routes'
DIFFERENT = 'different'


def route_shape(config: ModelConfig) -> RouteShape | None:
  """Returns what there is to say of a token's routes; None of a model without experts."""
  c = config.moe
  if c is None:
    return None
  return RouteShape(config.num_layers, c.num_experts, c.experts_per_token)


class ExpertQuant(NamedTuple):
  """How what enters the experts' projections is rounded.

  Attributes:
    kind: of `activations.ActivationQuant`.
    gate: for nvfp4, [E] float32: each expert's `input_global_scale`; None for the others.
    up: the same.
    down: the same.
  """

  kind: str
  gate: jax.Array | None = None
  up: jax.Array | None = None
  down: jax.Array | None = None


class Dispatch(NamedTuple):
  """Assignments of N tokens to k experts each, sorted by expert; of an expert, by token.

  Attributes:
    order: [N k] int32, which assignment comes where; assignment i is of token i // k.
    inverse: [N k] int32, where each assignment went.
    expert: [N k] int32, in sorted order; E where an assignment is to none.
    sizes: [E] int32, how many each expert has.
  """

  order: jax.Array
  inverse: jax.Array
  expert: jax.Array
  sizes: jax.Array


def dispatch(ids: jax.Array, num_experts: int) -> Dispatch:
  """Sorts assignments [N, k] int32; ids outside 0 to E - 1 are to no expert, and come last."""
  flat = ids.reshape(-1)
  flat = jnp.where((flat >= 0) & (flat < num_experts), flat, num_experts)
  order = jnp.argsort(flat, stable=True).astype(jnp.int32)
  index = jnp.arange(len(flat), dtype=jnp.int32)
  inverse = jnp.zeros_like(index).at[order].set(index, unique_indices=True)
  expert = flat[order]
  ends = jnp.searchsorted(expert, jnp.arange(num_experts), side='right').astype(jnp.int32)
  return Dispatch(order, inverse, expert, jnp.diff(ends, prepend=0))


def route(
  logits: jax.Array, count: int, *, normalise: bool, given: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
  """Chooses experts and weighs them.

  weights = softmax(logits)[ids], divided by their sum where `normalise`. The ids are those of the
  largest logits, the lower id first among equals, or those given.

  Args:
    logits: [..., E] float32.
    count: k.
    normalise: whether weights sum to 1.
    given: [..., k] int32, the ids that another run chose; -1 where it did not say. Weights are of
      these logits all the same.

  Returns:
    (ids [..., k] int32, weights [..., k] float32).
  """
  probs = jax.nn.softmax(logits, axis=-1)
  ids = jax.lax.top_k(jax.lax.stop_gradient(logits), count)[1]
  if given is not None:
    ids = jnp.where(jnp.all(given >= 0, axis=-1, keepdims=True), given, ids)
  weights = jnp.take_along_axis(probs, ids, axis=-1)
  if normalise:
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
  return ids, weights


def differs(logits: jax.Array, given: jax.Array) -> jax.Array:
  """Whether experts that were given, [..., k], are not those that the logits [..., E] choose. [...]

  In whatever order; where none are given (-1) nothing differs.
  """
  own = jax.lax.top_k(jax.lax.stop_gradient(logits), given.shape[-1])[1]
  held = jnp.any(given[..., :, None] == own[..., None, :], axis=-1)
  return jnp.any(~held & (given >= 0), axis=-1)


def experts(
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  gate: jax.Array,
  up: jax.Array,
  down: jax.Array,
  *,
  quant: ExpertQuant | None = None,
) -> jax.Array:
  """The weighted sum of what a token's experts make of it.

  y_n = sum_j weights[n, j] down_e(silu(gate_e(x_n)) * up_e(x_n)),  e = ids[n, j]

  Args:
    x: [N, D] float.
    ids: [N, k] int32; one outside 0 to E - 1 contributes 0.
    weights: [N, k] float32.
    gate: [E, D, F], the dtype of `x`.
    up: [E, D, F].
    down: [E, F, D].
    quant: how inputs of projections are rounded.

  Returns:
    [N, D], the dtype of `x`; the weighted sum is float32.
  """
  sent = dispatch(ids, len(gate))
  rows = spread(x, sent)
  hidden = _hidden(rows, sent, gate, up, quant)
  hidden = _rounded(hidden, sent, quant, quant and quant.down)
  out = collect(grouped_matmul(hidden, down, sent.sizes), sent).reshape(*ids.shape, -1)
  wide = out.astype(jnp.float32) * weights.astype(jnp.float32)[..., None]
  return jnp.sum(wide, axis=1).astype(x.dtype)


def expert_amax(
  x: jax.Array, ids: jax.Array, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The largest magnitudes that enter each expert's gate and up, and its down: [E] float32 each.

  0 for an expert that has no token. Arguments are those of `experts`.
  """
  sent = dispatch(ids, len(gate))
  rows = spread(x, sent)
  hidden = _hidden(rows, sent, gate, up, None)

  def largest(rows: jax.Array) -> jax.Array:
    amax = jnp.max(jnp.abs(rows), axis=-1).astype(jnp.float32)
    return jnp.zeros(len(gate), jnp.float32).at[sent.expert].max(amax, mode='drop')

  return largest(rows), largest(hidden)


def _hidden(
  rows: jax.Array, sent: Dispatch, gate: jax.Array, up: jax.Array, quant: ExpertQuant | None
) -> jax.Array:
  opened = grouped_matmul(_rounded(rows, sent, quant, quant and quant.gate), gate, sent.sizes)
  return nn.silu(opened) * grouped_matmul(
    _rounded(rows, sent, quant, quant and quant.up), up, sent.sizes
  )


def _rounded(
  rows: jax.Array, sent: Dispatch, quant: ExpertQuant | None, scales: jax.Array | None
) -> jax.Array:
  if quant is None:
    return rows
  scale = None if scales is None else scales[jnp.minimum(sent.expert, len(scales) - 1)]
  return activations.rounded(rows, quant.kind, scale)


@jax.custom_vjp
def spread(x: jax.Array, sent: Dispatch) -> jax.Array:
  """[N, D] -> [N k, D]: the token of each assignment, in sorted order."""
  return x[sent.order // (len(sent.order) // len(x))]


def _spread_forward(x: jax.Array, sent: Dispatch) -> tuple[jax.Array, Any]:
  return spread(x, sent), (sent, len(x))


def _spread_backward(saved: tuple[Dispatch, int], dy: jax.Array) -> tuple[Any, ...]:
  # A gather by the inverse: the scatter that the derivative of a gather is would add in no order.
  sent, num = saved
  dx = dy[sent.inverse].reshape(num, -1, dy.shape[-1])
  return jnp.sum(dx.astype(jnp.float32), axis=1).astype(dy.dtype), _no_gradient(sent)


spread.defvjp(_spread_forward, _spread_backward)


@jax.custom_vjp
def collect(rows: jax.Array, sent: Dispatch) -> jax.Array:
  """[N k, D] in sorted order -> the same, assignment by assignment."""
  return rows[sent.inverse]


def _collect_forward(rows: jax.Array, sent: Dispatch) -> tuple[jax.Array, Any]:
  return collect(rows, sent), sent


def _collect_backward(sent: Dispatch, dy: jax.Array) -> tuple[Any, ...]:
  return dy[sent.order], _no_gradient(sent)


collect.defvjp(_collect_forward, _collect_backward)


def _no_gradient(sent: Dispatch) -> Any:
  return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), sent)


class _Stack(nn.Module):
  """The kernels of one projection of every expert, and its input scales."""

  shape: tuple[int, ...]
  dtype: Any
  quant_kind: str | None

  @nn.compact
  def __call__(self) -> tuple[jax.Array, jax.Array | None]:
    init = nn.initializers.variance_scaling(
      1.0, 'fan_in', 'normal', in_axis=-2, out_axis=-1, batch_axis=0
    )
    kernel = self.param('kernel', init, self.shape, jnp.float32)
    nvfp4 = self.quant_kind == 'nvfp4'
    scales = self.get_variable(layers.INPUT_SCALES, 'global_scale') if nvfp4 else None
    return jnp.asarray(kernel, self.dtype), scales

  def record(self, amax: jax.Array) -> None:
    self.put_variable(layers.INPUT_AMAX, 'amax', amax)


class _Experts(nn.Module):
  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  parallel: Parallel | None

  def setup(self) -> None:
    c = self.config.moe
    assert c is not None
    wide = (c.num_experts, self.config.hidden_size, c.intermediate_size)
    narrow = (wide[0], wide[2], wide[1])
    self.gate_proj = _Stack(wide, self.dtype, self.quant_kind)
    self.up_proj = _Stack(wide, self.dtype, self.quant_kind)
    self.down_proj = _Stack(narrow, self.dtype, self.quant_kind)

  def __call__(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
    stacks = (self.gate_proj, self.up_proj, self.down_proj)
    kernels, scales = zip(*(stack() for stack in stacks), strict=True)
    if self.is_mutable_collection(layers.INPUT_AMAX):
      tokens = (x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1]))
      wide, narrow = expert_amax(*tokens, *kernels[:2])
      for stack, amax in zip(stacks, (wide, wide, narrow), strict=True):
        stack.record(amax)
    quant = None if self.quant_kind is None else ExpertQuant(self.quant_kind, *scales)
    run = functools.partial(experts, quant=quant)
    return parallel_mixers.experts(self.parallel, run, x, ids, weights, kernels)


class MoE(nn.Module):
  """Experts, weighed by a float32 router, and where the config says so a shared expert."""

  config: ModelConfig
  dtype: Any
  quant_kind: str | None
  parallel: Parallel | None = None

  def setup(self) -> None:
    c = self.config.moe
    assert c is not None
    d = self.config.hidden_size
    self.router = layers.Projection(
      (d,), (c.num_experts,), jnp.float32, None, precision=jax.lax.Precision.HIGHEST
    )
    self.experts = _Experts(self.config, self.dtype, self.quant_kind, self.parallel)
    if c.shared_intermediate_size:
      self.shared_expert = layers.SwiGLU(d, c.shared_intermediate_size, self.dtype, self.quant_kind)
      self.shared_expert_gate = layers.Projection((d,), (1,), self.dtype, None)

  def __call__(self, x: jax.Array, present: jax.Array, routes: jax.Array | None) -> jax.Array:
    """Runs x [B, T, D].

    Args:
      x: float; zero where no token is `present`.
      present: [B, T] bool. What is absent is sent to no expert.
      routes: [B, T, k] int32, experts chosen elsewhere; see `route`. None: none were.
    """
    c = self.config.moe
    assert c is not None
    logits = self.router(x.astype(jnp.float32))
    ids, weights = route(logits, c.experts_per_token, normalise=c.norm_topk_prob, given=routes)
    if routes is not None and self.is_mutable_collection(DIFFERENT):
      self.put_variable(DIFFERENT, 'tokens', differs(logits, routes))
    if self.is_mutable_collection(ROUTES):
      self.put_variable(ROUTES, 'ids', jnp.where(present[..., None], ids, -1))
    ids = jnp.where(present[..., None], ids, c.num_experts)
    y = self.experts(x, ids, weights)
    if c.shared_intermediate_size:
      y = y + nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
    return y
