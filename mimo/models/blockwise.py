"""Softmax attention: over packed rows in memory linear in their length, and over a cache.

Grouped queries throughout: query head h reads key head h // (H / Hkv), and scores are scaled by
1 / sqrt(Dh). Scores and their softmax are float32; matmuls take their operands in the dtype of q.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from mimo.models import fused
from mimo.models.varying import vary

BLOCK = 256
_LOW = jnp.finfo(jnp.float32).min


def attend(
  q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, block: int = BLOCK
) -> jax.Array:
  """Causal attention within the segments of packed rows, exactly.

  A token sees itself and the tokens before it that have its segment id. Rows of up to `block`
  tokens are attended to densely. Longer ones block by block (Dao et al., "FlashAttention",
  arXiv 2205.14135): a running softmax over blocks of keys, from the first that shares a segment
  with the queries up to the diagonal; the backward pass keeps the output and the log normaliser,
  and computes scores again. On a GPU, rows that hold one sequence each use cuDNN's kernel where it
  takes their dtype and head size.

  Args:
    q: [B, T, H, Dh] float.
    k: [B, T, Hkv, Dh] float.
    v: [B, T, Hkv, Dh] float.
    segment_ids: [B, T] int32, 0 for padding, whose result is 0.
    block: tokens whose scores exist at once.

  Returns:
    [B, T, H, Dh], the dtype of `q`.
  """
  chex.assert_rank([q, k, v, segment_ids], [4, 4, 4, 2])
  chex.assert_equal_shape([k, v])
  if q.shape[2] % k.shape[2]:
    raise ValueError(f'{q.shape[2]} query heads; expected a multiple of the {k.shape[2]} key heads')
  length = q.shape[1]
  if length <= block:
    index = jnp.arange(length)
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    y = masked(
      q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), same & (index <= index[:, None])
    )
    return jnp.where(segment_ids[..., None, None] > 0, y, 0)
  run = _attend_rows if fused.serves(q) else _attend_blocks
  return run(block, q, k, v, segment_ids)


def masked(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
  """softmax(q k^T / sqrt(Dh)) v where each query says which keys it sees; all scores at once.

  Args:
    q: [B, T, H, Dh] float.
    k: [B, Hkv, Dh, S] float.
    v: [B, Hkv, S, Dh] float.
    mask: [B, T, S] bool; a query must see a key.

  Returns:
    [B, T, H, Dh], the dtype of `q`.
  """
  batch, length, heads, dim = q.shape
  kv_heads, slots = k.shape[1], k.shape[-1]
  split = (batch, kv_heads, heads // kv_heads, length)
  merged = (batch, kv_heads, -1)  # the queries of one key head are rows of one matrix
  q = q.transpose(0, 2, 1, 3).reshape(*merged, dim)
  scores = jnp.einsum('bkqd,bkds->bkqs', q, k, preferred_element_type=jnp.float32)
  scores = scores.reshape(*split, slots) * dim**-0.5
  scores = jnp.where(mask[:, None, None], scores, _LOW)
  weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(*merged, slots)
  y = jnp.einsum('bkqs,bksd->bkqd', weights, v)
  return y.reshape(batch, heads, length, dim).transpose(0, 2, 1, 3)


class Keys(NamedTuple):
  """Blocks of keys and values.

  Attributes:
    k: [N, B, Hkv, S, Dh].
    v: [N, B, Hkv, S, Dh].
    segment_ids: [N, B, S] int32.
    at: [N, S] int32, where in the row each lies.
  """

  k: jax.Array
  v: jax.Array
  segment_ids: jax.Array
  at: jax.Array


class Queries(NamedTuple):
  """One block of queries.

  Attributes:
    q: [B, Hkv, G, S, Dh].
    segment_ids: [B, S] int32.
    at: [S] int32, where in the row each lies.
  """

  q: jax.Array
  segment_ids: jax.Array
  at: jax.Array


class Partial(NamedTuple):
  """A softmax over some of the keys.

  Attributes:
    top: [B, Hkv, G, S] float32, the largest score.
    total: [B, Hkv, G, S] float32, the sum of exp(score - top).
    sum: [B, Hkv, G, S, Dh] float32, the sum of exp(score - top) times the value.
  """

  top: jax.Array
  total: jax.Array
  sum: jax.Array


def nothing(q: jax.Array) -> Partial:
  """A softmax over no keys, for queries [B, Hkv, G, S, Dh]."""
  zero = vary(jnp.zeros(q.shape, jnp.float32), q)
  return Partial(zero[..., 0] + _LOW, zero[..., 0], zero)


def absorb(queries: Queries, keys: Keys, partial: Partial) -> Partial:
  """Adds one block of keys (of `Keys` without its first dimension) to a softmax."""
  scores, seen = _scores(queries, keys)
  top = jnp.maximum(partial.top, jnp.max(scores, axis=-1))
  weights = jnp.where(seen, jnp.exp(scores - top[..., None]), 0)
  kept = jnp.exp(partial.top - top)
  values = _dot('bkgqs,bksd->bkgqd', weights.astype(keys.v.dtype), keys.v)
  return Partial(
    top, partial.total * kept + jnp.sum(weights, axis=-1), partial.sum * kept[..., None] + values
  )


def finish(partial: Partial) -> tuple[jax.Array, jax.Array]:
  """Returns (out [B, Hkv, G, S, Dh], log normaliser [B, Hkv, G, S]), float32.

  A query that saw no key gives 0, and infinity: whatever its scores, their weights are 0.
  """
  some = partial.total > 0
  total = jnp.where(some, partial.total, 1)
  return partial.sum / total[..., None], jnp.where(some, partial.top + jnp.log(total), jnp.inf)


def pull(
  queries: Queries, keys: Keys, normaliser: jax.Array, dout: jax.Array, inner: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of one block of queries and one of keys, computing their scores again.

  With weights w and inner = sum(out dout) of a query: dv = w dout, and
  dscore = w (v . dout - inner).

  Args:
    queries: the queries.
    keys: the keys, of `Keys` without its first dimension.
    normaliser: [B, Hkv, G, S] float32, of the queries over all keys.
    dout: [B, Hkv, G, S, Dh], the dtype of q.
    inner: [B, Hkv, G, S] float32.

  Returns:
    (dq [B, Hkv, G, S, Dh], dk [B, Hkv, S, Dh], dv [B, Hkv, S, Dh]), float32.
  """
  scores, seen = _scores(queries, keys)
  weights = jnp.where(seen, jnp.exp(scores - normaliser[..., None]), 0)
  dweights = _dot('bkgqd,bksd->bkgqs', dout, keys.v)
  dscores = weights * (dweights - inner[..., None]) * queries.q.shape[-1] ** -0.5
  dscores = dscores.astype(queries.q.dtype)
  return (
    _dot('bkgqs,bksd->bkgqd', dscores, keys.k),
    _dot('bkgqs,bkgqd->bksd', dscores, queries.q),
    _dot('bkgqs,bkgqd->bksd', weights.astype(dout.dtype), dout),
  )


def _scores(queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array]:
  """Returns scores [B, Hkv, G, Sq, Sk] float32 and whether each is of a pair that counts."""
  ids = queries.segment_ids[:, :, None]
  seen = (ids == keys.segment_ids[:, None, :]) & (ids > 0)
  seen = (seen & (keys.at <= queries.at[:, None]))[:, None, None]
  scores = _dot('bkgqd,bksd->bkgqs', queries.q, keys.k) * queries.q.shape[-1] ** -0.5
  return jnp.where(seen, scores, _LOW), seen


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_at(
  block: int,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_ids: jax.Array,
  k_ids: jax.Array,
  at: jax.Array,
) -> jax.Array:
  """`attend` block by block, where the queries are some of a row's tokens.

  Args:
    block: tokens of a block, at most.
    q: [B, S, H, Dh] float.
    k: [B, T, Hkv, Dh] float.
    v: [B, T, Hkv, Dh] float.
    q_ids: [B, S] int32, segment ids of the queries.
    k_ids: [B, T] int32, segment ids of the keys.
    at: [S] int32, which of the T tokens each query is.

  Returns:
    [B, S, H, Dh], the dtype of `q`.
  """
  return _forward(block, q, k, v, q_ids, k_ids, at)[0]


def _forward(
  block: int,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_ids: jax.Array,
  k_ids: jax.Array,
  at: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  """Returns out, and what the backward pass needs: the log normaliser is [N, B, Hkv, G, S]."""
  cut = _Cut(q.shape[1], k.shape[1], block)
  queries, keys = cut.queries(q, k.shape[2], q_ids, at), cut.keys(k, v, k_ids)

  def run(_: None, xs: tuple) -> tuple[None, tuple[jax.Array, ...]]:
    queries, first, end = xs
    absorb_block = lambda j, partial: absorb(queries, _pick(keys, j), partial)
    out, normaliser = finish(jax.lax.fori_loop(first, end, absorb_block, nothing(queries.q)))
    return None, (out.astype(q.dtype), normaliser)

  _, (out, normaliser) = jax.lax.scan(run, None, (queries, *_ranges(queries, keys)))
  out = cut.join_queries(out)
  return out, (q, k, v, q_ids, k_ids, at, out, normaliser)


def _backward(
  block: int, residuals: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array | None, ...]:
  q, k, v, q_ids, k_ids, at, out, normaliser = residuals
  kv_heads = k.shape[2]
  cut = _Cut(q.shape[1], k.shape[1], block)
  queries, keys = cut.queries(q, kv_heads, q_ids, at), cut.keys(k, v, k_ids)
  inner = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1, keepdims=True)
  inner = cut.split_queries(inner, kv_heads)[..., 0]

  def run(sums: tuple[jax.Array, ...], xs: tuple) -> tuple[tuple[jax.Array, ...], jax.Array]:
    queries, normaliser, dout, inner, first, end = xs

    def pull_block(j: jax.Array, carry: tuple) -> tuple:
      dq, dk, dv = carry
      parts = pull(queries, _pick(keys, j), normaliser, dout, inner)
      return dq + parts[0], dk.at[j].add(parts[1]), dv.at[j].add(parts[2])

    zero = vary(jnp.zeros(queries.q.shape, jnp.float32), queries.q)
    dq, dk, dv = jax.lax.fori_loop(first, end, pull_block, (zero, *sums))
    return (dk, dv), dq.astype(q.dtype)

  sums: tuple[jax.Array, ...] = (vary(jnp.zeros(keys.k.shape, jnp.float32), q, k),) * 2
  xs = (queries, normaliser, cut.split_queries(dout, kv_heads), inner, *_ranges(queries, keys))
  (dk, dv), dq = jax.lax.scan(run, sums, xs)
  dk, dv = cut.join_keys(dk).astype(k.dtype), cut.join_keys(dv).astype(v.dtype)
  return cut.join_queries(dq), dk, dv, None, None, None


attend_at.defvjp(_forward, _backward)


def _attend_blocks(
  block: int, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  at = jnp.arange(q.shape[1], dtype=jnp.int32)
  return attend_at(block, q, k, v, segment_ids, segment_ids, at)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_rows(
  block: int, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """`_attend_blocks`, which programs for a GPU leave to cuDNN for rows that it can do.

  Choosing in the forward and in the backward pass, and not differentiating the choice, keeps the
  residuals those of one form: the kernel's backward pass runs its forward pass again.
  """
  return _rows_forward(block, q, k, v, segment_ids)[0]


def _rows_forward(
  block: int, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  def blocks(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    out, residuals = _forward(block, q, k, v, ids, ids, jnp.arange(q.shape[1], dtype=jnp.int32))
    return out, residuals[-1]

  shape = jax.eval_shape(blocks, q, k, v, segment_ids)[1].shape

  def kernel(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
    return fused.attend(q, k, v, ids), vary(jnp.zeros(shape, jnp.float32), q, k, ids)

  out, normaliser = _choose(kernel, blocks, segment_ids, q, k, v, segment_ids)
  return out, (q, k, v, segment_ids, out, normaliser)


def _rows_backward(
  block: int, residuals: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array | None, ...]:
  def blocks(*xs: jax.Array) -> Any:
    q, k, v, ids, out, normaliser, dout = xs
    at = jnp.arange(q.shape[1], dtype=jnp.int32)
    return _backward(block, (q, k, v, ids, ids, at, out, normaliser), dout)[:3]

  def kernel(*xs: jax.Array) -> Any:
    q, k, v, ids, _, _, dout = xs
    return jax.vjp(lambda q, k, v: fused.attend(q, k, v, ids), q, k, v)[1](dout)

  return *_choose(kernel, blocks, residuals[3], *residuals, dout), None


_attend_rows.defvjp(_rows_forward, _rows_backward)


def _choose(kernel: Any, blocks: Any, segment_ids: jax.Array, *args: jax.Array) -> Any:
  """Calls `kernel` in a program for a GPU, for rows that it can do; else `blocks`."""
  applies = fused.applies(segment_ids)
  cuda = lambda *xs: jax.lax.cond(applies, kernel, blocks, *xs)
  return jax.lax.platform_dependent(*args, cuda=cuda, default=blocks)


def _pick(keys: Keys, j: jax.Array) -> Keys:
  return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), keys)


def _ranges(queries: Queries, keys: Keys) -> tuple[jax.Array, jax.Array]:
  """Returns (first, end) [N] int32: the blocks of keys that each block of queries reads.

  From the first that may share a segment, going by the range of ids, up to the last query's own.
  Where ids do not grow along a row, some blocks that share nothing are read too.
  """
  nowhere = jnp.iinfo(jnp.int32).max

  def span(ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.min(jnp.where(ids > 0, ids, nowhere), axis=-1), jnp.max(ids, axis=-1)

  low, high = span(keys.segment_ids)

  def one(_: None, block: Queries) -> tuple[None, tuple[jax.Array, jax.Array]]:
    least, most = span(block.segment_ids)
    meet = jnp.any((least <= high) & (low <= most), axis=-1)
    end = jnp.max(block.at) // keys.at.shape[1] + 1
    # Where none meets, as for padding alone, the first is after all.
    return None, (jnp.where(jnp.any(meet), jnp.argmax(meet), len(meet)).astype(jnp.int32), end)

  return jax.lax.scan(one, None, queries._replace(q=queries.q[..., 0, 0, 0, 0]))[1]


class _Cut:
  """How queries and keys are cut into blocks of up to `block` tokens."""

  def __init__(self, num_queries: int, num_keys: int, block: int) -> None:
    self.num_queries, self.num_keys, self.block = num_queries, num_keys, block

  def split(self, x: jax.Array) -> jax.Array:
    """[B, T, ...] -> [N, B, S, ...], padded with zeros."""
    length = x.shape[1]
    number = -(-length // self.block)
    size = -(-length // number)
    x = jnp.pad(x, ((0, 0), (0, number * size - length)) + ((0, 0),) * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(x.shape[0], number, size, *x.shape[2:]), 1, 0)

  def split_queries(self, x: jax.Array, kv_heads: int) -> jax.Array:
    """[B, S, H, Dh] -> [N, B, Hkv, G, S, Dh]."""
    x = self.split(x).transpose(0, 1, 3, 2, 4)
    return x.reshape(*x.shape[:2], kv_heads, -1, *x.shape[3:])

  def queries(self, q: jax.Array, kv_heads: int, ids: jax.Array, at: jax.Array) -> Queries:
    return Queries(self.split_queries(q, kv_heads), self.split(ids), self.split(at[None])[:, 0])

  def keys(self, k: jax.Array, v: jax.Array, ids: jax.Array) -> Keys:
    k, v = (self.split(x).transpose(0, 1, 3, 2, 4) for x in (k, v))
    ids = self.split(ids)
    at = jnp.arange(ids.shape[0] * ids.shape[2], dtype=jnp.int32)
    return Keys(k, v, ids, at.reshape(ids.shape[0], -1))

  def join_queries(self, x: jax.Array) -> jax.Array:
    """The inverse of `split_queries`."""
    number, batch, kv_heads, group, size, dim = x.shape
    x = x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, number * size, kv_heads * group, dim)
    return x[:, : self.num_queries]

  def join_keys(self, x: jax.Array) -> jax.Array:
    """[N, B, Hkv, S, Dh] -> [B, T, Hkv, Dh]."""
    number, batch, kv_heads, size, dim = x.shape
    x = x.transpose(1, 0, 3, 2, 4).reshape(batch, number * size, kv_heads, dim)
    return x[:, : self.num_keys]
