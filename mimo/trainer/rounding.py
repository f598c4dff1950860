"""The trainer's policy: its master parameters rounded to bf16.

The forward and backward passes use the rounded weights, so the BF16 tensors that are published are
the trainer's policy exactly, and gradients with respect to them are applied to the float32 masters.
"""

from __future__ import annotations

from typing import Any

import jax


def policy_params(params: Any) -> Any:
  """Rounds float32 parameters to bf16 values, still float32.

  Under jit, a cast to bf16 and back may be dropped by XLA, which keeps excess precision;
  `reduce_precision` is not. It rounds to nearest even, as the cast does.
  """
  return jax.tree.map(lambda x: jax.lax.reduce_precision(x, 8, 7), params)
