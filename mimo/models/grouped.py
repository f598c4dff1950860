"""Matmuls of sorted rows with a matrix for each group: what a layer of experts computes.

`jax.lax.ragged_dot` says the same, but without a kernel for it XLA multiplies every row with every
matrix and masks: [E, M, D] of memory and E times the work. Here rows are cut into blocks of one
group each, so the extra work is at most one block per group.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

# Rows of a block. On CPU the last ones cost as much as the others and a block costs little more
# than its rows; elsewhere a block fills a tile of matrix units.
_CPU_ROWS = (8, 32)
_ROWS = 128
_CHUNK = 64  # blocks multiplied at once elsewhere: their matrices are copied together


class _Blocks(NamedTuple):
  """Blocks of rows, in order.

  Attributes:
    group: [n] int32, whose rows a block has.
    start: [n] int32, its first row.
    end: [n] int32, the end of its group: rows from there on are not the block's.
    num: [] int32, how many of the n there are.
  """

  group: jax.Array
  start: jax.Array
  end: jax.Array
  num: jax.Array


@jax.custom_vjp
def grouped_matmul(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Multiplies the first sizes[0] rows with w[0], the next sizes[1] with w[1], and so on.

  Args:
    x: [M, D] float.
    w: [E, D, F], the dtype of `x`.
    sizes: [E] int32, at most M together; rows beyond give 0 and cost nothing on CPU.

  Returns:
    [M, F], the dtype of `x`.
  """
  return _product(x, w, sizes, transpose=False)


def _forward(
  x: jax.Array, w: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return grouped_matmul(x, w, sizes), (x, w, sizes)


def _backward(saved: tuple[jax.Array, ...], dy: jax.Array) -> tuple[Any, ...]:
  x, w, sizes = saved
  dx = _product(dy, w, sizes, transpose=True)
  dw = _outer(x, dy, sizes).astype(w.dtype)
  return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0)


grouped_matmul.defvjp(_forward, _backward)


def _product(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transpose: bool) -> jax.Array:
  """Rows of group e times w[e], or its transpose."""
  chex.assert_rank([x, w, sizes], [2, 3, 1])
  return jax.lax.platform_dependent(
    x,
    w,
    sizes,
    cpu=functools.partial(product_by_block, transpose=transpose),
    default=functools.partial(product_by_chunk, transpose=transpose),
  )


def _outer(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  """[E, D, F] float32: for each group, the sum over its rows of x^T y."""
  return jax.lax.platform_dependent(x, y, sizes, cpu=outer_by_block, default=outer_by_chunk)


def product_by_block(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transpose: bool) -> jax.Array:
  """`grouped_matmul`, one block after another: no matrix is copied."""
  rows = _cpu_rows(len(x), len(sizes))
  blocks = _blocks(sizes, len(x), rows)
  num, width = len(x), w.shape[1 if transpose else 2]
  x = jnp.pad(x, ((0, rows), (0, 0)))

  def body(i: jax.Array, y: jax.Array) -> jax.Array:
    part = jax.lax.dynamic_slice(x, (blocks.start[i], 0), (rows, x.shape[1]))
    matrix = jax.lax.dynamic_index_in_dim(w, blocks.group[i], keepdims=False)
    part = jax.lax.dot_general(part, matrix, (((1,), (1 if transpose else 0,)), ((), ())))
    # Rows past the block's are of later groups, whose blocks come later and write over these.
    return jax.lax.dynamic_update_slice(y, part, (blocks.start[i], 0))

  y = jax.lax.fori_loop(0, blocks.num, body, jnp.zeros((num + rows, width), x.dtype))
  return jnp.where((jnp.arange(num) < jnp.sum(sizes))[:, None], y[:num], 0)


def outer_by_block(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
  """The gradient of `grouped_matmul`'s matrices, one block after another."""
  rows = _cpu_rows(len(x), len(sizes))
  blocks = _blocks(sizes, len(x), rows)
  x, y = (jnp.pad(a, ((0, rows), (0, 0))) for a in (x, y))

  def body(i: jax.Array, total: jax.Array) -> jax.Array:
    left, right = (
      jax.lax.dynamic_slice(a, (blocks.start[i], 0), (rows, a.shape[1])) for a in (x, y)
    )
    mine = blocks.start[i] + jnp.arange(rows) < blocks.end[i]
    part = jax.lax.dot_general(
      jnp.where(mine[:, None], left, 0),
      right,
      (((0,), (0,)), ((), ())),
      preferred_element_type=jnp.float32,
    )
    group = blocks.group[i]
    part = part + jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(total, part, group, 0)

  shape = (len(sizes), x.shape[1], y.shape[1])
  return jax.lax.fori_loop(0, blocks.num, body, jnp.zeros(shape, jnp.float32))


def product_by_chunk(
  x: jax.Array,
  w: jax.Array,
  sizes: jax.Array,
  *,
  transpose: bool,
  rows: int = _ROWS,
  chunk: int = _CHUNK,
) -> jax.Array:
  """`grouped_matmul`, many blocks at a time as one batched matmul."""
  group, at = _chunks(sizes, len(x), rows, chunk)
  padded = jnp.pad(x, ((0, 1), (0, 0)))
  spec = 'cbf,cdf->cbd' if transpose else 'cbd,cdf->cbf'

  def run(part: tuple[jax.Array, jax.Array]) -> jax.Array:
    group, at = part
    return jnp.einsum(spec, padded[at], w[group])

  y = jax.lax.map(run, (group, at))
  y = y.reshape(-1, y.shape[-1])
  # Where each row went: blocks are in order, so only their padding lies between.
  where = jnp.full(len(x) + 1, len(y), jnp.int32)
  where = where.at[at.reshape(-1)].set(jnp.arange(len(y), dtype=jnp.int32))[: len(x)]
  real = jnp.arange(len(x)) < jnp.sum(sizes)
  return jnp.where(real[:, None], y[jnp.where(real, where, 0)], 0)


def outer_by_chunk(
  x: jax.Array, y: jax.Array, sizes: jax.Array, *, rows: int = _ROWS, chunk: int = _CHUNK
) -> jax.Array:
  """The gradient of `grouped_matmul`'s matrices, many blocks at a time."""
  group, at = _chunks(sizes, len(x), rows, chunk)
  x, y = (jnp.pad(a, ((0, 1), (0, 0))) for a in (x, y))

  def body(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    group, at = part
    added = jnp.einsum('cbd,cbf->cdf', x[at], y[at], preferred_element_type=jnp.float32)
    return total.at[group].add(added), None

  shape = (len(sizes), x.shape[1], y.shape[1])
  return jax.lax.scan(body, jnp.zeros(shape, jnp.float32), (group, at))[0]


def _cpu_rows(num: int, groups: int) -> int:
  """A power of two near the rows of a group."""
  least, most = _CPU_ROWS
  return min(most, max(least, 1 << (max(num // groups, 1).bit_length() - 1)))


def _blocks(sizes: jax.Array, num: int, rows: int) -> _Blocks:
  """Cuts groups into blocks of up to `rows` of the `num` rows."""
  counts = -(-sizes // rows)
  until, ends = jnp.cumsum(counts), jnp.cumsum(sizes)
  index = jnp.arange(num // rows + len(sizes), dtype=jnp.int32)
  # The last group takes what lies beyond `num`.
  group = jnp.searchsorted(until, index, side='right').clip(0, len(sizes) - 1).astype(jnp.int32)
  first = index - (until - counts)[group]
  start = (ends - sizes)[group] + first * rows
  return _Blocks(group, start.astype(jnp.int32), ends[group], until[-1])


def _chunks(sizes: jax.Array, num: int, rows: int, chunk: int) -> tuple[jax.Array, jax.Array]:
  """Returns the group [n, chunk] and the rows [n, chunk, rows] of each block; `num`: none."""
  blocks = _blocks(sizes, num, rows)
  at = blocks.start[:, None] + jnp.arange(rows, dtype=jnp.int32)
  real = (at < blocks.end[:, None]) & (jnp.arange(len(at)) < blocks.num)[:, None]
  at, group = jnp.where(real, at, num), blocks.group
  chunk = min(chunk, len(group))
  missing = -len(group) % chunk
  group = jnp.pad(group, (0, missing)).reshape(-1, chunk)
  at = jnp.pad(at, ((0, missing), (0, 0)), constant_values=num)
  return group, at.reshape(-1, chunk, rows)
