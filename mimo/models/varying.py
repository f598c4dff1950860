"""Loops whose start is a constant, inside `jax.shard_map`."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def vary(x: jax.Array, *like: jax.Array) -> jax.Array:
  """Marks a constant as varying over the mesh axes over which any of `like` varies.

  Inside `jax.shard_map` a loop's carry has one type throughout, and a constant differs there from
  what depends on a device's data. Elsewhere this is `x`, whatever the others hold.
  """
  for other in like:
    x = x + jnp.where(False, other[(0,) * other.ndim], 0).astype(x.dtype)
  return x
