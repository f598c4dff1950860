"""Where the trainer's arrays live: the mesh, parameters by the table's axes, rows of a batch.

The rules from logical axes to mesh axes are `mimo.models.parallel`'s.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mimo.models.config import ModelConfig
from mimo.models.parallel import MESH_AXES, Parallel
from mimo.models.table import nest, table
from mimo.trainer.packing import MicroBatch


def make_mesh(
  *, data: int = 1, fsdp: int = 1, expert: int = 1, context: int = 1, tensor: int = 1
) -> Mesh:
  """A mesh over the first devices, as many as the product of the sizes.

  Neighbours lie along 'tensor', then 'context': the axes that speak most.

  Raises:
    ValueError: a size is below 1, or there are fewer devices.
  """
  sizes = dict(zip(MESH_AXES, (data, fsdp, expert, context, tensor), strict=True))
  named = ', '.join(f'{axis} {size}' for axis, size in sizes.items())
  if min(sizes.values()) < 1:
    raise ValueError(f'mesh is {named}; expected sizes of at least 1')
  count = math.prod(sizes.values())
  if count > jax.device_count():
    raise ValueError(
      f'mesh is {named}: {count} devices; expected at most {jax.device_count()}, those there are'
    )
  return jax.make_mesh(
    tuple(sizes.values()),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * len(MESH_AXES),
    devices=jax.devices()[:count],
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """The same value everywhere."""
  return NamedSharding(mesh, P())


def param_shardings(model: ModelConfig, mesh: Mesh) -> dict[str, Any]:
  """Returns the sharding of each parameter, in the parameters' own nesting."""
  parallel = Parallel(mesh)
  return nest(
    {
      row.path: parallel.sharding(parallel.param(row.leaf_shape, row.leaf_axes))
      for row in table(model)
    }
  )


def micro_shardings(micro: MicroBatch, mesh: Mesh) -> MicroBatch:
  """Returns how a micro-batch is split: rows over (data, fsdp, expert), tokens over context.

  Trained tokens are split over context as well, an equal share to each device: a device computes
  the loss of its share, wherever in the row those tokens are.
  """
  parallel = Parallel(mesh)

  def sharding(x: Any) -> NamedSharding:
    axes = ('rows', 'context', None, None)[: x.ndim]
    return parallel.sharding(parallel.activation(x.shape, axes))

  return jax.tree.map(sharding, micro)


def place(micro: MicroBatch, mesh: Mesh) -> MicroBatch:
  """Copies host arrays to the devices, split as `micro_shardings` says."""
  return jax.device_put(micro, micro_shardings(micro, mesh))
