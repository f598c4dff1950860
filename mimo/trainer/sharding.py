"""Where arrays live: a mesh of (data, fsdp, tensor), and rules from logical axes to it.

The parameter table names each dimension; `RULES` says which mesh axes shard it. A dimension whose
size its mesh axes do not divide is replicated, so that any model runs on any mesh.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mimo.models.config import ModelConfig
from mimo.models.table import nest, table
from mimo.trainer.packing import MicroBatch

MESH_AXES = ('data', 'fsdp', 'tensor')

RULES: dict[str, tuple[str, ...]] = {
  # One dimension of the embedding, never both: XLA would gather the whole of it at each lookup.
  'vocab': ('tensor',),
  'heads': ('tensor',),
  'kv_heads': ('tensor',),
  'mlp': ('tensor',),
  'embed': ('fsdp',),
}
ROWS = ('data', 'fsdp')


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
  """A mesh over the first data * fsdp * tensor devices.

  Raises:
    ValueError: a size is below 1, or there are fewer devices.
  """
  sizes = (data, fsdp, tensor)
  if min(sizes) < 1:
    raise ValueError(f'mesh (data, fsdp, tensor) is {sizes}; expected sizes of at least 1')
  count = math.prod(sizes)
  if count > jax.device_count():
    raise ValueError(
      f'mesh (data, fsdp, tensor) is {sizes}, {count} devices; expected at most '
      f'{jax.device_count()}, those there are'
    )
  return jax.make_mesh(
    sizes, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:count]
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """The same value everywhere."""
  return NamedSharding(mesh, P())


def param_shardings(model: ModelConfig, mesh: Mesh) -> dict[str, Any]:
  """Returns the sharding of each parameter, in the parameters' own nesting."""
  leaves = {}
  for row in table(model):
    dims = [
      _dividing(size, RULES[axis] if axis is not None else (), mesh)
      for size, axis in zip(row.shape, row.axes, strict=True)
    ]
    leaves[row.path] = NamedSharding(mesh, P(None, *dims) if row.stacked else P(*dims))
  return nest(leaves)


def place(micro: MicroBatch, mesh: Mesh) -> MicroBatch:
  """Copies host arrays to the devices, rows split over (data, fsdp) where they divide."""
  return jax.device_put(micro, rows(len(micro.tokens), mesh))


def rows(count: int, mesh: Mesh) -> NamedSharding:
  """The leading dimension, `count` rows, over (data, fsdp) as far as they divide it."""
  return NamedSharding(mesh, P(_dividing(count, ROWS, mesh)))


def _dividing(size: int, axes: tuple[str, ...], mesh: Mesh) -> tuple[str, ...] | None:
  """The longest leading part of `axes` whose devices divide `size`."""
  for count in range(len(axes), 0, -1):
    if size % math.prod(mesh.shape[axis] for axis in axes[:count]) == 0:
      return axes[:count]
  return None
