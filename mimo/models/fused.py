"""Attention by cuDNN's fused kernel, where a GPU has one that serves.

The kernel knows causal rows and their lengths, not segments. So a program for a GPU holds both
forms, and uses the kernel for a batch whose rows hold one sequence each.

NOT TRIED ON A GPU: what is tested is which rows it is used for, and, with XLA's implementation of
the same function in the kernel's place, what it is told.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp


def serves(q: jax.Array) -> bool:
  """Whether this process has a GPU whose kernel takes this dtype and head size (q [..., Dh])."""
  if q.dtype not in (jnp.bfloat16, jnp.float16) or jax.default_backend() != 'gpu':
    return False
  device = jax.local_devices()[0]
  if device.platform != 'gpu' or 'cuda' not in device.client.platform_version:
    return False
  hopper = tuple(map(int, device.compute_capability.split('.'))) >= (9, 0)
  return q.shape[-1] % 8 == 0 and q.shape[-1] <= (256 if hopper else 128)


def applies(segment_ids: jax.Array) -> jax.Array:
  """Whether each row of [B, T] is one segment from its first token, then padding. bool scalar."""
  first = segment_ids[:, :1]
  present = segment_ids > 0
  ends = jnp.all(present[:, 1:] <= present[:, :-1])  # no token follows padding
  return ends & jnp.all(~present | (segment_ids == first))


def attend(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  segment_ids: jax.Array,
  *,
  implementation: Literal['cudnn', 'xla'] = 'cudnn',
) -> jax.Array:
  """`blockwise.attend` for rows to which this `applies`; differentiable."""
  present = (segment_ids > 0)[..., None, None]
  lengths = jnp.maximum(jnp.sum(segment_ids > 0, axis=1, dtype=jnp.int32), 1)
  out = jax.nn.dot_product_attention(
    q,
    k,
    v,
    is_causal=True,
    query_seq_lengths=lengths,
    key_value_seq_lengths=lengths,
    implementation=implementation,
  )
  return jnp.where(present, out, 0).astype(q.dtype)
