"""Log-probs of the trained tokens over a mesh: hidden states and the head to where they meet."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mimo.models.parallel import Parallel, gather_param, mesh_axes, only, spec_axes
from mimo.objectives import candidate_logps

_TENSOR = 'tensor'
_CONTEXT = 'context'


def trained_logps(
  parallel: Parallel,
  hidden: jax.Array,
  head: jax.Array,
  predict: jax.Array,
  ids: jax.Array,
  *,
  temperature: float,
  chunk: int,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs of `ids` at the trained positions, and the entropy there.

  Each device takes an equal share of its rows' trained tokens, wherever in the row they are. The
  head stays split over 'tensor', and is gathered over the other axes once; its gradient is summed
  over devices once, after all chunks.

  Args:
    parallel: the mesh.
    hidden: [B, T, D] float, after the final norm; rows and tokens laid out as activations are.
    head: [D, V] float, stored as `parallel.param` says.
    predict: [B, M] int32, which of the T hidden states predicts.
    ids: [B, M, 1 + K] int32; -1 gives 0 and no gradient.
    temperature: divides the logits.
    chunk: the most tokens whose logits a device holds at once.

  Returns:
    (logps [B, M, 1 + K] float32, entropy [B, M] float32), in nats.
  """
  chex.assert_rank([hidden, head, predict, ids], [3, 2, 2, 3])
  chex.assert_equal_shape_prefix([predict, ids], 2)
  trained = predict.shape[1]
  # What is padded has no id. Its hidden state is the row's first, and its gradient 0.
  extra = (0, -trained % parallel.size(_CONTEXT))
  predict = jnp.pad(predict, ((0, 0), extra))
  ids = jnp.pad(ids, ((0, 0), extra, (0, 0)), constant_values=-1)
  placed = parallel.activation(hidden.shape, ('rows', 'context', None))
  rows, split = placed[0], bool(mesh_axes(placed[1]))
  out = P(rows, _CONTEXT if split else None)
  tokens = spec_axes(placed)
  stored = only(parallel.param(head.shape, (None, 'vocab')), (_TENSOR, *tokens))
  vocab_axis = _TENSOR if _TENSOR in spec_axes(stored) else None

  def run(
    hidden: jax.Array, head: jax.Array, predict: jax.Array, ids: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    head = gather_param(head, stored, keep=(_TENSOR,))
    # From here on the head differs from device to device as far as its gradient is concerned.
    shared = tuple(axis for axis in tokens if axis not in spec_axes(stored))
    head = jax.lax.pcast(head, shared, to='varying') if shared else head
    at = predict - (jax.lax.axis_index(_CONTEXT) * hidden.shape[1] if split else 0)
    here = (at >= 0) & (at < hidden.shape[1])
    hidden = jnp.take_along_axis(hidden, jnp.where(here, at, 0)[..., None], axis=1)
    if split:
      # A trained token's state is on one device: the sum is exact, and leaves each a share of them.
      hidden = jnp.where(here[..., None], hidden, 0)
      hidden = jax.lax.psum_scatter(hidden, _CONTEXT, scatter_dimension=1, tiled=True)
    logps, entropy = candidate_logps(
      hidden.reshape(-1, hidden.shape[-1]).astype(head.dtype),
      head,
      ids.reshape(-1, ids.shape[-1]),
      temperature=temperature,
      chunk=chunk,
      vocab_axis=vocab_axis,
    )
    return logps.reshape(ids.shape), entropy.reshape(ids.shape[:2])

  logps, entropy = jax.shard_map(
    run,
    mesh=parallel.mesh,
    in_specs=(placed, stored, P(rows), out),
    out_specs=(out, out),
  )(hidden, head, predict, ids)
  return logps[:, :trained], entropy[:, :trained]
