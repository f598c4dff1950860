"""What mixes tokens, and the routed experts, over a mesh: each device runs its own part.

Rows, heads and channels are independent, so a device takes its own and needs nothing from the
others. Tokens of a row are not: over the axis 'context' the functions of
`mimo.models.context_parallel` exchange keys and values, states and halos. Experts are on the
devices of the axis 'expert', which gather the tokens of all of them and scatter the results.

Inside `shard_map` a loop runs as long as a device's own rows need; left to itself, XLA would have
all devices run each loop together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mimo.models import blockwise, context_parallel, delta
from mimo.models.parallel import Parallel, gather_param, mesh_axes, only, spec_axes

_CONTEXT, _EXPERT, _TENSOR = 'context', 'expert', 'tensor'

# Tokens that a device runs experts on at a time.
EXPERT_TOKENS = 65_536

_Experts = Callable[..., jax.Array]


def attend(
  parallel: Parallel | None,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """`blockwise.attend` of q [B, T, H, Dh], k and v [B, T, Hkv, Dh], segment_ids [B, T]."""
  if parallel is None or parallel.mesh.size == 1:
    return blockwise.attend(q, k, v, segment_ids)
  heads, kv_heads = q.shape[2], k.shape[2]
  queries = parallel.activation(q.shape, ('rows', 'context', 'heads', None))
  split = parallel.size(_TENSOR) if mesh_axes(queries[2]) else 1
  # Key heads are split with the query heads that read them, or each device picks the one it reads.
  picks = bool(kv_heads % split)
  if picks and (heads // kv_heads) % (heads // split):
    split, picks = 1, False
  queries = P(*queries[:2], _TENSOR if split > 1 else None, None)
  keys = P(*queries[:2], None, None) if picks else queries

  def run(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    if picks:
      head = jax.lax.axis_index(_TENSOR) * q.shape[2] // (heads // kv_heads)
      k, v = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=2) for x in (k, v))
    if mesh_axes(queries[1]):
      return context_parallel.attend(q, k, v, ids, axis_name=_CONTEXT)
    return blockwise.attend(q, k, v, ids)

  specs = (queries, keys, keys, P(*queries[:2]))
  return _shard_map(parallel, run, specs, queries)(q, k, v, segment_ids)


def chunked(
  parallel: Parallel | None,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  segment_ids: jax.Array,
) -> jax.Array:
  """`delta.chunked` from a zero state: q and k [B, T, Hk, Dk], v [B, T, Hv, Dv] and so on."""
  if parallel is None or parallel.mesh.size == 1:
    return delta.chunked(q, k, v, log_decay, beta, segment_ids)[0]
  # Value heads follow their key head, so both are split or none.
  keys = parallel.activation(k.shape, ('rows', 'context', 'delta_heads', None))
  values = P(*keys[:3])

  def run(*xs: Any) -> jax.Array:
    if mesh_axes(keys[1]):
      return context_parallel.chunked(*xs, axis_name=_CONTEXT)
    return delta.chunked(*xs)[0]

  specs = (keys, keys, keys, values, values, P(*keys[:2]))
  return _shard_map(parallel, run, specs, keys)(q, k, v, log_decay, beta, segment_ids)


def conv(
  parallel: Parallel | None, x: jax.Array, kernel: jax.Array, segment_ids: jax.Array
) -> jax.Array:
  """`delta.conv` with nothing before the rows: x [B, T, C], kernel [C, K], segment_ids [B, T]."""
  if parallel is None or parallel.mesh.size == 1:
    return delta.conv(x, kernel, segment_ids)[0]
  placed = parallel.activation(x.shape, ('rows', 'context', 'delta_qkv'))

  def run(x: jax.Array, kernel: jax.Array, ids: jax.Array) -> jax.Array:
    if mesh_axes(placed[1]):
      return context_parallel.conv(x, kernel, ids, axis_name=_CONTEXT)
    return delta.conv(x, kernel, ids)[0]

  specs = (placed, P(placed[2], None), P(*placed[:2]))
  return _shard_map(parallel, run, specs, placed)(x, kernel, segment_ids)


def experts(
  parallel: Parallel | None,
  function: _Experts,
  x: jax.Array,
  ids: jax.Array,
  weights: jax.Array,
  kernels: tuple[jax.Array, jax.Array, jax.Array],
  *,
  chunk: int = EXPERT_TOKENS,
) -> jax.Array:
  """Routed experts, dropless: `function(x [N, D], ids [N, k], weights [N, k], *kernels)`.

  Over the axis 'expert' tokens are gathered, each device runs the experts it holds on those of
  them that are routed there, and results are summed and scattered back. Features of an expert
  are split over 'tensor'. What else an expert's matrices are stored over is gathered here, once.

  Args:
    parallel: the mesh.
    function: as `moe.experts`; an id outside of the kernels it is given must contribute 0.
    x: [B, T, D] float.
    ids: [B, T, k] int32.
    weights: [B, T, k] float32.
    kernels: gate and up [E, D, F], down [E, F, D], the dtype of `x`.
    chunk: the most tokens that a device runs its experts on at a time, the gathered ones counted.

  Returns:
    [B, T, D], the dtype of `x`.
  """
  if parallel is None or parallel.mesh.size == 1:
    flat = (x.reshape(-1, x.shape[-1]), *(a.reshape(-1, a.shape[-1]) for a in (ids, weights)))
    return function(*flat, *kernels).reshape(x.shape)
  placed = parallel.activation(x.shape, ('rows', 'context', None))
  tokens = spec_axes(placed)
  axes = (('expert', 'embed', 'expert_mlp'),) * 2 + (('expert', 'expert_mlp', 'embed'),)
  stored = tuple(
    only(parallel.param(kernel.shape, names), (_EXPERT, _TENSOR, *tokens))
    for kernel, names in zip(kernels, axes, strict=True)
  )
  owned = _EXPERT in mesh_axes(stored[0][0])
  # Devices along the axis have different tokens, or the same where rows do not divide over it.
  exchanged = owned and _EXPERT in tokens
  summed: tuple[str, ...] = (_EXPERT,) if owned and not exchanged else ()
  summed += (_TENSOR,) if _TENSOR in spec_axes(stored[0]) else ()

  def some(part: tuple[jax.Array, ...], kernels: tuple[jax.Array, ...]) -> jax.Array:
    x, ids, weights = part
    if exchanged:
      x, ids, weights = (jax.lax.all_gather(a, _EXPERT, tiled=True) for a in part)
    if owned:
      ids = ids - jax.lax.axis_index(_EXPERT) * kernels[0].shape[0]
    y = function(x, ids, weights, *kernels)
    y = jax.lax.psum(y, summed) if summed else y
    return jax.lax.psum_scatter(y, _EXPERT, tiled=True) if exchanged else y

  def run(x: jax.Array, ids: jax.Array, weights: jax.Array, *kernels: jax.Array) -> jax.Array:
    whole = tuple(
      gather_param(kernel, spec, keep=(_EXPERT, _TENSOR))
      for kernel, spec in zip(kernels, stored, strict=True)
    )
    part = tuple(a.reshape(-1, a.shape[-1]) for a in (x, ids, weights))
    own = max(1, chunk // parallel.size(_EXPERT)) if exchanged else chunk
    return _in_chunks(lambda part: some(part, whole), part, own).reshape(x.shape)

  specs = (placed, placed, placed, *stored)
  return _shard_map(parallel, run, specs, placed)(x, ids, weights, *kernels)


def _in_chunks(
  function: Callable[[Any], jax.Array], part: tuple[jax.Array, ...], chunk: int
) -> jax.Array:
  """Applies a function of (x, ids, weights) to at most `chunk` tokens at a time.

  What it keeps for the backward pass is computed again. Chunks are of one size: the last is filled
  up with tokens that are sent to no expert.
  """
  rows = len(part[0])
  if rows <= chunk:
    return function(part)
  steps = -(-rows // chunk)
  size = -(-rows // steps)
  split = tuple(
    jnp.pad(a, ((0, steps * size - rows), (0, 0)), constant_values=filler).reshape(steps, size, -1)
    for a, filler in zip(part, (0, -1, 0), strict=True)
  )
  y = jax.lax.map(jax.checkpoint(function, prevent_cse=False), split)
  return y.reshape(steps * size, -1)[:rows]


def _shard_map(
  parallel: Parallel, function: Callable[..., jax.Array], in_specs: Sequence[P], out_specs: P
) -> Callable[..., jax.Array]:
  # What varies where is not checked: rules for gradients inside need not state it.
  return jax.shard_map(
    function,
    mesh=parallel.mesh,
    in_specs=tuple(in_specs),
    out_specs=out_specs,
    check_vma=False,
  )
