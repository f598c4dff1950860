"""Token mixing where the tokens of a row are spread over the devices of a mesh axis.

Functions to call inside `jax.shard_map`: each device holds the same rows, and of every row the
same number of tokens, in order along the axis `axis_name`. Results, and gradients, are those of
`blockwise.attend`, `delta.chunked` and `delta.conv` on whole rows, segments that cross devices
included.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from mimo.models import blockwise, delta


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  axis_name: str,
  block: int = blockwise.BLOCK,
) -> jax.Array:
  """`blockwise.attend`, with keys and values gathered: [B, T, Hkv, Dh] of each on every device.

  The first tokens of a row have few keys to read and the last have all. So that every device does
  the same work, queries move before and results after: of 2 n pieces of a row on n devices, a
  device takes pieces i and 2 n - 1 - i. (Not where a device's tokens are an odd number.)

  Args:
    q: [B, T / n, H, Dh] float, this device's tokens.
    k: [B, T / n, Hkv, Dh] float.
    v: [B, T / n, Hkv, Dh] float.
    segment_ids: [B, T / n] int32, 0 for padding.
    axis_name: the mesh axis of n devices.
    block: as in `blockwise.attend`; here shorter rows are cut into blocks too.

  Returns:
    [B, T / n, H, Dh], the dtype of `q`.
  """
  chex.assert_rank([q, k, v, segment_ids], [4, 4, 4, 2])
  k, v, ids = (jax.lax.all_gather(x, axis_name, axis=1, tiled=True) for x in (k, v, segment_ids))
  length, index = q.shape[1], jax.lax.axis_index(axis_name)
  if length % 2:
    at = index * length + jnp.arange(length, dtype=jnp.int32)
    return blockwise.attend_at(block, q, k, v, segment_ids, ids, at)
  half, pieces = length // 2, 2 * jax.lax.axis_size(axis_name)
  # Whose pieces this device takes: even[i] goes to the device where piece 2 i belongs.
  homes = [min(piece, pieces - 1 - piece) for piece in range(pieces)]
  even = [(source, home) for source, home in enumerate(homes[0::2])]
  odd = [(source, home) for source, home in enumerate(homes[1::2])]
  mine = jnp.stack([index, pieces - 1 - index])
  mine = jnp.where(index % 2 == 0, mine, mine[::-1])  # the even piece, the odd piece

  def move(x: jax.Array) -> jax.Array:
    first = jax.lax.ppermute(x[:, :half], axis_name, even)
    return jnp.concatenate([first, jax.lax.ppermute(x[:, half:], axis_name, odd)], axis=1)

  at = (mine[:, None] * half + jnp.arange(half, dtype=jnp.int32)).reshape(-1)
  block = -(-half // -(-half // block))  # so that a block of queries is of one piece
  out = blockwise.attend_at(block, move(q), k, v, move(segment_ids), ids, at)
  first = jax.lax.ppermute(out[:, :half], axis_name, [pair[::-1] for pair in even])
  second = jax.lax.ppermute(out[:, half:], axis_name, [pair[::-1] for pair in odd])
  return jnp.concatenate([first, second], axis=1)


def chunked(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  segment_ids: jax.Array,
  *,
  axis_name: str,
  chunk: int = 64,
) -> jax.Array:
  """`delta.chunked` without an initial state, the state passed from device to device.

  The state after a device's tokens is an affine map of the state before: M S + N. Both come out
  of one run over its tokens, of all devices at once: the values are widened by Dk zeros, and those
  columns start from the identity, so they end as M, and read as R, what each token reads of the
  state before. The maps, [Dk, Dk + Dv] a head, are gathered; every device joins those before its
  own, and adds R S to its results. This doubles the work on values and states (Dk = Dv), not that
  on keys.

  Args:
    q: [B, T / n, Hk, Dk] float, this device's tokens; the others alike.
    k: [B, T / n, Hk, Dk] float.
    v: [B, T / n, Hv, Dv] float.
    log_decay: [B, T / n, Hv] float.
    beta: [B, T / n, Hv] float.
    segment_ids: [B, T / n] int32, 0 for padding.
    axis_name: the mesh axis of n devices.
    chunk: as in `delta.chunked`.

  Returns:
    [B, T / n, Hv, Dv], the dtype of `v`.
  """
  runs = _runs(segment_ids, axis_name)
  key_dim, (heads, value_dim) = k.shape[-1], v.shape[2:]
  wide = jnp.pad(v.astype(jnp.float32), ((0, 0),) * 3 + ((0, key_dim),))
  start = jnp.pad(jnp.eye(key_dim), ((0, 0), (value_dim, 0)))
  start = jnp.broadcast_to(start, (len(v), heads, *start.shape))
  out, after = delta.scan_chunks(q, k, wide, log_decay, beta, runs, start, chunk)

  maps = jax.lax.all_gather(after, axis_name)
  dot = lambda a, b: jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
  states = [jnp.zeros_like(after[..., :value_dim])]
  for one in maps[:-1]:
    states.append(dot(one[..., value_dim:], states[-1]) + one[..., :value_dim])
  state = jnp.stack(states)[jax.lax.axis_index(axis_name)]
  out, reads = out[..., :value_dim], out[..., value_dim:]
  precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
  out = out + jnp.einsum('bthd,bhde->bthe', reads, state, precision=precision)
  return out.astype(v.dtype)


def conv(x: jax.Array, kernel: jax.Array, segment_ids: jax.Array, *, axis_name: str) -> jax.Array:
  """`delta.conv` without an initial tail: the last K - 1 tokens of the device before are fetched.

  Args:
    x: [B, T / n, D] float, this device's tokens.
    kernel: [D, K] float.
    segment_ids: [B, T / n] int32, 0 for padding.
    axis_name: the mesh axis of n devices.

  Returns:
    [B, T / n, D], the dtype of `x`.

  Raises:
    ValueError: a device holds fewer than K - 1 tokens.
  """
  reach = kernel.shape[1] - 1
  if x.shape[1] < reach:
    raise ValueError(f'{x.shape[1]} tokens a device; a kernel of {reach + 1} expects {reach}')
  pairs = [(i, i + 1) for i in range(jax.lax.axis_size(axis_name) - 1)]
  halo = jax.lax.ppermute(x[:, x.shape[1] - reach :], axis_name, pairs)
  x = jnp.concatenate([halo, x], axis=1)
  return delta.conv_runs(x, kernel, _runs(segment_ids, axis_name, reach), None)[0][:, reach:]


def _runs(segment_ids: jax.Array, axis_name: str, reach: int = 0) -> delta.Runs:
  """Runs of this device's tokens, and of `reach` tokens before; before the row is padding."""
  length = segment_ids.shape[1]
  ids = jax.lax.all_gather(segment_ids, axis_name, axis=1, tiled=True)
  begin = jax.lax.axis_index(axis_name) * length
  whole = delta.Runs(ids > 0, delta.starts(ids))
  whole = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (reach, 0))), whole)
  cut = lambda x: jax.lax.dynamic_slice_in_dim(x, begin, length + reach, axis=1)
  return jax.tree.map(cut, whole)
