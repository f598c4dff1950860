"""The gated delta rule in chunks, token by token, and the short convolution before it.

A head's state S [Dk, Dv] maps keys to values. Token t decays it, moves what it holds for key k_t
towards v_t, and reads it with q_t:

    S <- exp(log_decay_t) S
    S <- S + k_t (beta_t (v_t - S^T k_t))^T
    out_t = S^T q_t

Keys and queries enter as they are: normalising them, and scaling queries by 1 / sqrt(Dk), belongs
to the mixer (`unit`). Every value head has its own state, decay and beta; key head h serves value
heads h G to h G + G - 1, G = Hv / Hk.

Source: Yang et al., "Gated Delta Networks" (arXiv 2412.06464) and "Parallelizing Linear
Transformers with the Delta Rule over Sequence Length" (arXiv 2406.06484).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from mimo.models.varying import vary

_HIGHEST = jax.lax.Precision.HIGHEST
_UNIT_EPS = 1e-6
# Chunks whose intermediates exist at once; the backward pass keeps one state per so many chunks.
_GROUP = 8
# Below this size powers of a triangle with entries up to 1 are small integers, and a product of
# powers inverts it without cancelling.
_SERIES = 8


def unit(x: jax.Array) -> jax.Array:
  """x / sqrt(sum(x^2) + 1e-6) over the last dimension, in float32; the dtype is kept."""
  wide = x.astype(jnp.float32)
  norm = jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _UNIT_EPS)
  return (wide * norm).astype(x.dtype)


def starts(segment_ids: jax.Array) -> jax.Array:
  """Returns [B, T] bool: whether a token begins another segment than the last token before it.

  Padding (segment 0) is no token: it begins nothing, and a segment continues across it. Nor does
  the first token of a row begin one: what comes before the row is of its segment.
  """
  index = jnp.arange(segment_ids.shape[1])
  present = segment_ids > 0
  latest = jax.lax.cummax(jnp.where(present, index, -1), axis=1)
  before = jnp.pad(latest[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
  previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
  return present & (before >= 0) & (previous != segment_ids)


def step(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Runs one token. A row with log_decay = beta = 0 keeps its state.

  Args:
    q: [B, Hk, Dk] float.
    k: [B, Hk, Dk] float.
    v: [B, Hv, Dv] float.
    log_decay: [B, Hv] float, at most 0.
    beta: [B, Hv] float, in [0, 1].
    state: [B, Hv, Dk, Dv] float32.

  Returns:
    (out [B, Hv, Dv], the dtype of `v`; the state after the token, float32).
  """
  dtype, group = v.dtype, v.shape[1] // k.shape[1]
  q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
  q, k = jnp.repeat(q, group, axis=1), jnp.repeat(k, group, axis=1)
  dot = functools.partial(jnp.einsum, precision=_HIGHEST)
  state = state * jnp.exp(log_decay)[..., None, None]
  added = beta[..., None] * (v - dot('bhde,bhd->bhe', state, k))
  state = state + k[..., None] * added[..., None, :]
  return dot('bhde,bhd->bhe', state, q).astype(dtype), state


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  segment_ids: jax.Array,
  initial_state: jax.Array | None = None,
  chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
  """Runs rows of tokens, `chunk` at a time as matmuls; the same as `step` over the tokens.

  Within a chunk that starts from state S, with D_ij the decay from after token j up to and with
  token i, and d_i that from the chunk's start,

      A_ij = beta_i D_ij k_i.k_j  (j < i)
      U = (I + A)^-1 diag(beta) (V - diag(d) K S)      what each token adds to the state
      out = diag(d) Q S + (D * Q K^T, j <= i) U
      S <- d_C S + (diag(D_Cj) K)^T U

  D is exp of a sum of log decays, each taken over its own tokens. The state is zero at the start
  of each segment but a row's first, which continues from `initial_state`. Padding (segment 0)
  changes no state and gives 0. The tokens of a segment lie next to each other, but for padding.

  The backward pass holds one state per 8 chunks beside the inputs, and recomputes the rest.

  Args:
    q: [B, T, Hk, Dk] float.
    k: [B, T, Hk, Dk] float, of norm at most about 1.
    v: [B, T, Hv, Dv] float.
    log_decay: [B, T, Hv] float, at most 0 and finite.
    beta: [B, T, Hv] float, in [0, 1].
    segment_ids: [B, T] int32, 0 for padding.
    initial_state: [B, Hv, Dk, Dv] float32; None is zero.
    chunk: the most tokens of a chunk, a power of two.

  Returns:
    (out [B, T, Hv, Dv], the dtype of `v`; the state after each row, [B, Hv, Dk, Dv] float32).
    Everything between is float32; inputs in bfloat16 let a device multiply in its default
    precision.
  """
  return scan_chunks(
    q, k, v, log_decay, beta, Runs(segment_ids > 0, starts(segment_ids)), initial_state, chunk
  )


class Runs(NamedTuple):
  """Where rows hold tokens, and where the state restarts.

  Attributes:
    present: [B, T] bool, false for padding.
    resets: [B, T] bool, true at a token that starts from a zero state.
  """

  present: jax.Array
  resets: jax.Array


def scan_chunks(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  runs: Runs,
  initial_state: jax.Array | None,
  chunk: int,
) -> tuple[jax.Array, jax.Array]:
  """`chunked`, with segments stated as `Runs`."""
  chex.assert_rank([q, k, v, log_decay, beta, *runs], [4, 4, 4, 3, 3, 2, 2])
  chex.assert_equal_shape([q, k])
  batch, length, kv_heads, _ = k.shape
  heads, value_dim = v.shape[2:]
  if heads % kv_heads:
    raise ValueError(f'{heads} value heads; expected a multiple of the {kv_heads} key heads')
  if chunk < 1 or chunk & (chunk - 1):
    raise ValueError(f'chunk is {chunk}; expected a power of two')
  group = heads // kv_heads
  if initial_state is None:
    initial_state = jnp.zeros((batch, heads, k.shape[-1], value_dim), jnp.float32)
  state = vary(initial_state.astype(jnp.float32), k, v, log_decay)
  state = state.reshape(batch, kv_heads, group, *state.shape[2:]).transpose(0, 1, 3, 2, 4)

  chunk = min(chunk, 1 << (length - 1).bit_length())
  number = -(-length // chunk)
  outer = -(-number // _GROUP)
  inner = -(-number // outer)
  size = inner * chunk

  def split(x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [outer, B, size, ...], padded with zeros."""
    x = jnp.pad(x, ((0, 0), (0, outer * size - length)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, outer, size, *x.shape[2:]), 1, 0)

  log_decay, beta = (jnp.where(runs.present[..., None], x, 0) for x in (log_decay, beta))
  xs = tuple(split(x) for x in (q, k, v, log_decay, beta, runs.resets))
  precision = _HIGHEST if q.dtype == jnp.float32 else None
  run = jax.checkpoint(functools.partial(_run_group, chunk, precision), prevent_cse=False)
  if outer == 1:
    state, out = run(state, jax.tree.map(lambda x: x[0], xs))
  else:
    state, out = jax.lax.scan(run, state, xs)
    out = jnp.moveaxis(out, 0, 1)
  out = out.reshape(batch, outer * size, heads, value_dim)[:, :length]
  out = jnp.where(runs.present[..., None, None], out, 0)
  state = state.transpose(0, 1, 3, 2, 4)
  return out, state.reshape(initial_state.shape)


def _run_group(
  chunk: int, precision: jax.lax.Precision | None, state: jax.Array, xs: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
  """Runs some chunks: what needs no state for all of them at once, the rest one by one.

  Args:
    chunk: tokens of a chunk, C.
    precision: of the matmuls of keys, queries, values and states.
    state: [B, Hk, Dk, G, Dv] float32.
    xs: q, k, v, log_decay, beta and resets of N C tokens, each [B, N C, ...].

  Returns:
    (the state after the chunks, out [B, N C, Hv, Dv], the dtype of v).
  """
  batch, kv_heads, _, group, value_dim = state.shape
  dtype = xs[2].dtype
  q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in xs[:5])
  # [N, B, Hk, C, Dk], and [N, B, Hk, G, C, ...] of what each value head has.
  q, k = (x.reshape(batch, -1, chunk, *x.shape[2:]).transpose(1, 0, 3, 2, 4) for x in (q, k))
  v = v.reshape(batch, -1, chunk, kv_heads, group, value_dim).transpose(1, 0, 3, 4, 2, 5)
  log_decay, beta = (
    x.reshape(batch, -1, chunk, kv_heads, group).transpose(1, 0, 3, 4, 2) for x in (log_decay, beta)
  )
  resets = jnp.moveaxis(xs[5].reshape(batch, -1, chunk), 1, 0)
  run = jnp.cumsum(resets.astype(jnp.int32), axis=-1)[:, :, None, None]
  dot = functools.partial(jnp.matmul, precision=precision)
  index = np.arange(chunk)
  causal, before = index <= index[:, None], index < index[:, None]

  same = run[..., :, None] == run[..., None, :]
  pairs, to_start, to_end = _decay_sums(log_decay)
  pairs = jnp.exp(jnp.where(same & causal, pairs, -jnp.inf))
  to_start = jnp.where(run == 0, jnp.exp(to_start), 0)[..., None]
  to_end = jnp.where(run == run[..., -1:], jnp.exp(to_end), 0)[..., None]

  both = jnp.concatenate([q, k], axis=-2)
  products = dot(both, jnp.swapaxes(k, -1, -2))[:, :, :, None]
  weights, keys = pairs * products[..., :chunk, :], pairs * products[..., chunk:, :]
  inverse = unit_lower_inverse(jnp.where(before, beta[..., None] * keys, 0))
  inverse = inverse * beta[..., None, :]
  solve = jnp.concatenate([dot(weights, inverse), inverse], axis=-2)

  def advance(state: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    both, v, solve, to_start, to_end = xs
    read = dot(both, state.reshape(*state.shape[:3], -1))  # all value heads of a key head at once
    read = read.reshape(*read.shape[:3], group, value_dim).transpose(0, 1, 3, 2, 4)
    added = dot(solve, v - to_start * read[:, :, :, chunk:])
    out = to_start * read[:, :, :, :chunk] + added[:, :, :, :chunk]
    added = (to_end * added[:, :, :, chunk:]).transpose(0, 1, 3, 2, 4)
    added = dot(jnp.swapaxes(both[:, :, chunk:], -1, -2), added.reshape(*added.shape[:3], -1))
    state = state * to_start[:, :, None, :, -1] + added.reshape(state.shape)
    return state, out.astype(dtype)

  state, out = jax.lax.scan(advance, state, (both, v, solve, to_start, to_end))
  out = out.transpose(1, 0, 4, 2, 3, 5)
  return state, out.reshape(batch, -1, kv_heads * group, value_dim)


def _decay_sums(log_decay: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Sums of log decays [..., C] over the tokens between two of a chunk.

  Each is a sum of its own terms: the difference of two long sums would carry their rounding, and a
  head that forgets fast at one token may remember well at the next.

  Returns:
    [..., C, C], of tokens j + 1 to i; [..., C], of tokens 0 to i; [..., C], of i + 1 to the last.
  """
  index = np.arange(log_decay.shape[-1])
  upto = (index <= index[:, None]).astype(np.float32)  # [i, l]: l <= i
  after = (index[:, None] > index).astype(np.float32)  # [l, j]: l > j
  dot = functools.partial(jnp.matmul, precision=_HIGHEST)
  pairs = dot(upto * log_decay[..., None, :], after)
  return pairs, dot(log_decay, upto.T), dot(log_decay, after)


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
  """(I + a)^-1 of strictly lower triangular a [..., C, C] float32, C a power of two.

  Blocks on the diagonal are inverted by a product of powers, then joined two by two:

      [ L   0 ]^-1   [  L^-1            0   ]
      [ M   N ]    = [ -N^-1 M L^-1   N^-1 ]

  The product of powers alone would lose everything where keys repeat: the entries of a power of
  [C, C] grow like binomials.
  """
  size = a.shape[-1]
  side = min(size, _SERIES)
  dot = functools.partial(jnp.matmul, precision=_HIGHEST)
  power = -jnp.stack([a[..., i : i + side, i : i + side] for i in range(0, size, side)], axis=-3)
  inverse = jnp.eye(side, dtype=a.dtype) + power
  reach = 2
  while reach < side:
    power = dot(power, power)
    inverse = inverse + dot(inverse, power)
    reach *= 2
  while side < size:
    first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
    starts_at = range(0, size, 2 * side)
    below = jnp.stack([a[..., i + side : i + 2 * side, i : i + side] for i in starts_at], axis=-3)
    below = -dot(second, dot(below, first))
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    inverse = jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
    side *= 2
  return inverse[..., 0, :, :]


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
  inverse = unit_lower_inverse(a)
  return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
  """With T = (I + a)^-1: da = -T^T dT T^T, of which only the strict lower triangle is a's."""
  dot = functools.partial(jnp.matmul, precision=_HIGHEST)
  transposed = jnp.swapaxes(inverse, -1, -2)
  return (jnp.tril(-dot(transposed, dot(gradient, transposed)), -1),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


def conv(
  x: jax.Array,
  kernel: jax.Array,
  segment_ids: jax.Array,
  initial: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Short causal depthwise convolution that does not cross segments; no bias, no activation.

      y_t = sum_i kernel[:, i] x_{t - K + 1 + i}   over tokens of t's segment

  Args:
    x: [B, T, D] float.
    kernel: [D, K] float; kernel[:, K - 1] weighs the token itself.
    segment_ids: [B, T] int32, 0 for padding, whose result is 0.
    initial: [B, K - 1, D], the tokens before each row, of the segment of its first token; None is
      zero.

  Returns:
    (y [B, T, D], the dtype of `x`; the tail [B, K - 1, D]: the last tokens of each row, zero where
    they are not of the last token's segment: `initial` for what follows).
  """
  chex.assert_rank([x, kernel, segment_ids], [3, 2, 2])
  return conv_runs(x, kernel, Runs(segment_ids > 0, starts(segment_ids)), initial)


def conv_runs(
  x: jax.Array, kernel: jax.Array, runs: Runs, initial: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """`conv`, with segments stated as `Runs`."""
  batch, length, width = x.shape
  reach = kernel.shape[1] - 1
  if initial is None:
    initial = jnp.zeros((batch, reach, width), x.dtype)
  x = jnp.where(runs.present[..., None], x, 0)
  x = jnp.concatenate([initial.astype(x.dtype), x], axis=1)
  # Tokens before the row are of run 0, as its first token is unless it restarts.
  run = jnp.pad(jnp.cumsum(runs.resets.astype(jnp.int32), axis=1), ((0, 0), (reach, 0)))
  own = run[:, reach:]
  y = jnp.zeros((batch, length, width), jnp.float32)
  for i in range(reach + 1):
    part = jnp.where((run[:, i : i + length] == own)[..., None], x[:, i : i + length], 0)
    y = y + part.astype(jnp.float32) * kernel[:, i].astype(jnp.float32)
  y = jnp.where(runs.present[..., None], y, 0).astype(x.dtype)
  # Position p of the row is p + reach here; the tail ends with the last token.
  last = jnp.max(jnp.where(runs.present, jnp.arange(1, length + 1), 0), axis=1)
  at = last[:, None] + jnp.arange(reach)
  tail = jnp.take_along_axis(x, at[..., None], axis=1)
  mine = jnp.take_along_axis(run, at, axis=1) == jnp.take_along_axis(
    run, last[:, None] + reach - 1, axis=1
  )
  return y, jnp.where(mine[..., None], tail, 0)
