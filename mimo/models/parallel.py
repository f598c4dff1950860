"""Which mesh a decoder runs on, and where its parameters and activations lie there.

Parameters and activations name their dimensions with logical axes; the rules here say which mesh
axes shard each. A dimension is sharded over as many of its axes as divide it, so that any model
runs on any mesh:

  data     rows of a batch
  fsdp     rows, and one dimension of every matrix, which is gathered where it is used
  expert   rows outside of the experts; a layer's experts inside
  context  the tokens of a row
  tensor   heads, feed-forward features, the vocabulary

Matrices that are not experts are stored sharded over fsdp, expert and context together: all of
them hold the same values there, so each device keeps a part and gathers the rest layer by layer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH_AXES = ('data', 'fsdp', 'expert', 'context', 'tensor')

# Logical axis of a parameter -> mesh axes, the first that divide it. A mesh axis shards one
# dimension of an array: the first one that asks for it.
PARAM_RULES: dict[str, tuple[str, ...]] = {
  # One dimension of the embedding, never both: XLA would gather the whole of it at each lookup.
  'vocab': ('tensor', 'fsdp', 'expert', 'context'),
  'expert': ('expert',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'delta_heads': ('tensor',),
  'delta_qkv': ('tensor',),
  'mlp': ('tensor',),
  'expert_mlp': ('tensor',),
  'embed': ('fsdp', 'expert', 'context'),
}

# The same for activations.
ACTIVATION_RULES: dict[str, tuple[str, ...]] = {
  'rows': ('data', 'fsdp', 'expert'),
  'context': ('context',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'delta_heads': ('tensor',),
  'delta_qkv': ('tensor',),
  'mlp': ('tensor',),
  'vocab': ('tensor',),
}


@dataclasses.dataclass(frozen=True)
class Parallel:
  """A mesh of `MESH_AXES`. Hashable: a static argument of a jitted function."""

  mesh: Mesh | AbstractMesh

  def __post_init__(self) -> None:
    if self.mesh.axis_names != MESH_AXES:
      raise ValueError(f'mesh has axes {self.mesh.axis_names}; expected {MESH_AXES}')

  def size(self, axis: str) -> int:
    """How many devices a mesh axis has."""
    return self.mesh.shape[axis]

  def param(self, shape: Sequence[int], axes: Sequence[str | None]) -> P:
    """How a parameter of these logical axes is stored."""
    return _spec(self.mesh, PARAM_RULES, shape, axes)

  def activation(self, shape: Sequence[int], axes: Sequence[str | None]) -> P:
    """How an activation of these logical axes is laid out."""
    return _spec(self.mesh, ACTIVATION_RULES, shape, axes)

  def sharding(self, spec: P) -> NamedSharding:
    return NamedSharding(self.mesh, spec)


def constrain(parallel: Parallel | None, x: jax.Array, *axes: str | None) -> jax.Array:
  """Lays an activation out as its logical axes say; `x` itself where there is no mesh.

  Without this XLA may shard D of an activation as a weight is, and gather it back.
  """
  if parallel is None:
    return x
  spec = parallel.activation(x.shape, axes)
  return jax.lax.with_sharding_constraint(x, parallel.sharding(spec))


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
  """The mesh axes of one dimension's entry in a PartitionSpec."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def spec_axes(spec: P) -> tuple[str, ...]:
  """Every mesh axis that a PartitionSpec names."""
  return tuple(axis for entry in spec for axis in mesh_axes(entry))


def only(spec: P, axes: Sequence[str]) -> P:
  """A PartitionSpec without the mesh axes that `axes` lacks."""
  return P(*(tuple(a for a in mesh_axes(entry) if a in axes) or None for entry in spec))


def gather_param(x: jax.Array, spec: P, keep: Sequence[str] = ()) -> jax.Array:
  """Inside shard_map: gathers a parameter that entered as `spec` over all of its axes but `keep`.

  Its gradient is summed over those axes and scattered back, once, where the parameter entered. So
  `spec` may name only axes on which devices hold different data.
  """
  for dim, entry in enumerate(spec):
    # The last axis of a dimension varies fastest, so it is gathered first.
    for axis in reversed(mesh_axes(entry)):
      if axis not in keep:
        x = jax.lax.all_gather(x, axis, axis=dim, tiled=True)
  return x


def lookup(parallel: Parallel | None, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
  """Rows of an embedding [V, D] float for tokens [B, T] int32: [B, T, D], dtype of the embedding.

  The vocabulary is gathered over the axes that hold tokens, not over 'tensor': there each device
  looks up what it has, and the sum over devices is the row.
  """
  if parallel is None:
    return embedding[tokens]
  placed = parallel.activation(tokens.shape, ('rows', 'context'))
  stored = parallel.param(embedding.shape, ('vocab', None))
  stored = only(stored, ('tensor', *spec_axes(placed)))
  split = 'tensor' in mesh_axes(stored[0])

  def run(table: jax.Array, ids: jax.Array) -> jax.Array:
    table = gather_param(table, stored, keep=('tensor',))
    if not split:
      return table[ids]
    local = ids - jax.lax.axis_index('tensor') * len(table)
    here = (local >= 0) & (local < len(table))
    rows = jnp.where(here[..., None], table[jnp.where(here, local, 0)], 0)
    return jax.lax.psum(rows, 'tensor')

  run = jax.shard_map(
    run, mesh=parallel.mesh, in_specs=(stored, placed), out_specs=P(*placed, None)
  )
  return run(embedding, tokens)


def _spec(
  mesh: Mesh | AbstractMesh,
  rules: dict[str, tuple[str, ...]],
  shape: Sequence[int],
  axes: Sequence[str | None],
) -> P:
  used: set[str] = set()
  entries: list[tuple[str, ...] | None] = []
  for size, axis in zip(shape, axes, strict=True):
    chosen: tuple[str, ...] = ()
    for name in rules[axis] if axis is not None else ():
      devices = mesh.shape[name] * math.prod(mesh.shape[other] for other in chosen)
      if name not in used and mesh.shape[name] > 1 and size % devices == 0:
        chosen = (*chosen, name)
    used |= {*chosen}
    entries.append(chosen or None)
  return P(*entries)
