"""The trainer's policy: its master parameters rounded to bf16, and a host copy of that.

The forward and backward passes use the rounded weights, so the BF16 tensors that are published are
the trainer's policy exactly, and gradients with respect to them are applied to the float32 masters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.table import named_tensors


def policy_params(params: Any) -> Any:
  """Rounds float32 parameters to bf16 values, still float32.

  Under jit, a cast to bf16 and back may be dropped by XLA, which keeps excess precision;
  `reduce_precision` is not. It rounds to nearest even, as the cast does.
  """
  return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), params)


def snapshot(model: ModelConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (Hugging Face name, bf16 array) of the policy, one tensor at a time.

  The parameters are copied, rounded, before this returns: the next update may donate them.
  """
  rounded = jax.device_get(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
  return named_tensors(model, rounded)
