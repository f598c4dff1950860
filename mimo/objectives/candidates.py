"""Log-probs of a few tokens out of a whole vocabulary, never holding [N, V]."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


def candidate_logps(
  hidden: jax.Array,
  head: jax.Array,
  ids: jax.Array,
  *,
  temperature: float,
  chunk: int,
  vocab_axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns log p(id) of some tokens and the entropy of p, p = softmax(hidden head / temperature).

  Logits exist for `chunk` tokens at a time, in the backward pass too, which computes them again:
  four matmuls where a dense version does three. Each chunk strides over all of N, so that tokens
  sharded over a mesh axis stay where they are; a head sharded over its vocabulary gives logits
  sharded alike.

  Both outputs are differentiable in `hidden` and `head`. Matmuls take their operands in the wider
  of the two dtypes and accumulate in float32; so does the gradient of `head` over the chunks. The
  gradient of the logits is rounded to the operands' dtype before its two matmuls.

  Args:
    hidden: [N, D] float32 or bfloat16, after the final norm.
    head: [D, V] float32 or bfloat16.
    ids: [N, 1+K] int32; -1 gives 0 and no gradient, V or more gives NaN.
    temperature: divides the logits; a Python number.
    chunk: the most tokens whose logits exist at once.
    vocab_axis: inside `jax.shard_map`, the mapped axis over which the vocabulary is split: `head`
      is then [D, V / devices], in order, and every device gets the same tokens and results. The
      gradient of `hidden` is summed over the axis once.

  Returns:
    (logps [N, 1+K] float32, entropy [N] float32), in nats.

  Raises:
    ValueError: a temperature that is not positive and finite, or chunk < 1.
  """
  chex.assert_rank([hidden, head, ids], 2)
  chex.assert_type([hidden, head], float)
  chex.assert_type(ids, int)
  chex.assert_equal(hidden.shape[1], head.shape[0])
  chex.assert_equal(hidden.shape[0], ids.shape[0])
  temperature = float(temperature)
  if not (math.isfinite(temperature) and temperature > 0):
    raise ValueError(f'temperature is {temperature}; expected a finite number > 0')
  if chunk < 1:
    raise ValueError(f'chunk is {chunk}; expected at least 1')
  if not hidden.shape[0]:
    return jnp.zeros(ids.shape, jnp.float32), jnp.zeros((0,), jnp.float32)
  return _candidate_logps(_Static(temperature, int(chunk), vocab_axis), hidden, head, ids)


class _Static(NamedTuple):
  temperature: float
  chunk: int
  vocab_axis: str | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _candidate_logps(
  static: _Static, hidden: jax.Array, head: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array]:
  logps, entropy, _ = _forward_chunks(static, hidden, head, ids)
  return logps, entropy


def _forward_chunks(
  static: _Static, hidden: jax.Array, head: jax.Array, ids: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns logps [N, 1+K], entropy [N] and the log normaliser [N], all float32."""
  temperature, chunk, axis = static

  def step(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, ...]]:
    h, i = xs
    z = _logits(h, head, temperature)
    top = jnp.max(z, axis=-1)
    top = top if axis is None else jax.lax.pmax(top, axis)
    shifted = z - top[:, None]
    e = jnp.exp(shifted)
    sums = jnp.stack([jnp.sum(e, axis=-1), jnp.sum(e * shifted, axis=-1)], axis=-1)
    at, here = _local(i, z.shape[-1], axis)
    picked = jnp.take_along_axis(z, at, axis=-1)
    if axis is not None:
      # One sum over the axis for all three. An id is on one device; beyond the last it is nowhere.
      both = jnp.concatenate([sums, jnp.where(here, picked, 0.0)], axis=-1)
      both = jax.lax.psum(both, axis)
      vocab = z.shape[-1] * jax.lax.axis_size(axis)
      sums, picked = both[:, :2], jnp.where(i < vocab, both[:, 2:], jnp.nan)
    log_total = jnp.log(sums[:, 0])
    entropy = log_total - sums[:, 1] / sums[:, 0]
    normaliser = top + log_total
    logps = jnp.where(i >= 0, picked - normaliser[:, None], 0.0)
    return None, (logps, entropy, normaliser)

  _, out = jax.lax.scan(step, None, (_split(hidden, chunk), _split(ids, chunk)))
  logps, entropy, normaliser = (_join(x, len(hidden)) for x in out)
  return logps, entropy, normaliser


def _local(ids: jax.Array, vocab: int, axis: str | None) -> tuple[jax.Array, jax.Array]:
  """Returns where in this device's part of the vocabulary ids lie, and whether they do."""
  if axis is None:
    return jnp.maximum(ids, 0), ids >= 0
  at = ids - jax.lax.axis_index(axis) * vocab
  here = (ids >= 0) & (at >= 0) & (at < vocab)
  return jnp.where(here, at, 0), here


def _forward(
  static: _Static, hidden: jax.Array, head: jax.Array, ids: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
  logps, entropy, normaliser = _forward_chunks(static, hidden, head, ids)
  return (logps, entropy), (hidden, head, ids, normaliser, entropy)


def _backward(
  static: _Static,
  residuals: tuple[jax.Array, ...],
  cotangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, None]:
  """Recomputes each chunk's logits z; with p = softmax(z) and H its entropy,

  d log p(i) / dz_v = 1[v = i] - p_v   and   dH / dz_v = -p_v (log p_v + H).
  """
  temperature, chunk, axis = static
  hidden, head, ids, normaliser, entropy = residuals
  dtype = jnp.promote_types(hidden.dtype, head.dtype)
  wide = jnp.float32

  def step(dhead: jax.Array, xs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    h, i, norm, ent, dlogps, dent = xs
    dlogps = jnp.where(i >= 0, dlogps, 0.0)
    logp = _logits(h, head, temperature) - norm[:, None]
    pull = jnp.sum(dlogps, axis=-1) + dent * ent
    dz = -jnp.exp(logp) * (pull[:, None] + dent[:, None] * logp)
    at, here = _local(i, dz.shape[-1], axis)
    dpicked = jnp.where(here, dlogps, 0.0)
    dz = jax.vmap(lambda row, at, add: row.at[at].add(add))(dz, at, dpicked)
    dz = (dz / temperature).astype(dtype)
    dh = _dot(dz, head.astype(dtype), ((1,), (1,)))
    dhead = dhead + _dot(h.astype(dtype), dz, ((0,), (0,)))
    return dhead, dh

  dlogps, dentropy = cotangents
  parts = (hidden, ids, normaliser, entropy, dlogps, dentropy)
  xs = tuple(_split(x, chunk) for x in parts)
  dhead, dhidden = jax.lax.scan(step, jnp.zeros_like(head, wide), xs)
  dhidden = _join(dhidden, len(hidden))
  if axis is not None:
    dhidden = jax.lax.psum(dhidden, axis)
  return dhidden.astype(hidden.dtype), dhead.astype(head.dtype), None


_candidate_logps.defvjp(_forward, _backward)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[tuple[int], tuple[int]]) -> jax.Array:
  """Contracts in float32; float32 operands are multiplied in full precision on every device."""
  precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
  return jax.lax.dot_general(
    a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32
  )


def _logits(hidden: jax.Array, head: jax.Array, temperature: float) -> jax.Array:
  dtype = jnp.promote_types(hidden.dtype, head.dtype)
  return _dot(hidden.astype(dtype), head.astype(dtype), ((1,), (0,))) / temperature


def _steps(n: int, chunk: int) -> tuple[int, int]:
  """Returns (steps, tokens per step) with steps * tokens >= n and tokens <= chunk, both least."""
  steps = -(-n // chunk)
  return steps, -(-n // steps)


def _split(x: jax.Array, chunk: int) -> jax.Array:
  """[N, ...] -> [steps, tokens, ...]: step s takes tokens s, s + steps, s + 2 steps, ..."""
  steps, tokens = _steps(len(x), chunk)
  pad = [(0, steps * tokens - len(x))] + [(0, 0)] * (x.ndim - 1)
  return jnp.pad(x, pad).reshape(tokens, steps, *x.shape[1:]).swapaxes(0, 1)


def _join(x: jax.Array, n: int) -> jax.Array:
  """The inverse of `_split`: [steps, tokens, ...] -> [N, ...]."""
  return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:n]
