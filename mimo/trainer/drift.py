"""How far a batch pulls toward its sampler: the two parts of the policy gradient, apart.

    sum_t A_t w_t s_t  =  sum_t A_t (w_t s_t - mu_t)  +  sum_t A_t mu_t

s is the score of a sampled token, w its importance weight, mu the expected weighted score under the
sampler (see mimo/objectives). The first sum is the covariance of advantage and score: what
centering leaves. The second is the mean-score term: what it takes away, a drift that has nothing to
do with which token was drawn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax

from mimo.trainer import sharding
from mimo.trainer.packing import Batch
from mimo.trainer.update import Trainer


class Drift:
  """Measures the drift of batches, at the cost of two more backward passes each.

  Args:
    trainer: whose objective and parameters it is about; left as it is.
  """

  def __init__(self, trainer: Trainer) -> None:
    spec = trainer.spec
    self._mesh = spec.mesh
    self._plain, self._centred = (
      Trainer(
        spec.model,
        spec.config,
        correction=dataclasses.replace(spec.correction, center=center),
        temperature=spec.temperature,
        num_sources=spec.num_sources,
        mesh=spec.mesh,
      )
      for center in (False, True)
    )
    self._norms = jax.jit(_norms)

  def measure(self, params: Any, batch: Batch) -> dict[str, float]:
    """Returns norms of gradients of the batch's mean loss, before clipping.

    Args:
      params: the trainer's, before the update.
      batch: what it is about to learn from.

    Returns:
      `covariance_norm`, `mean_score_norm`, their ratio `drift` (NaN where the first is 0), and
      `drift_cosine`, between the two.
    """
    denominator = jax.device_put(np.float32(batch.trained), sharding.replicated(self._mesh))
    totals = []
    for trainer in (self._plain, self._centred):
      total = trainer.zero_total(params)
      for micro in batch.micro:
        placed = sharding.place(micro, self._mesh)
        total = trainer.micro_step(params, total, placed, denominator)
      totals.append(total.grads)
    covariance, mean_score, product = map(float, self._norms(*totals))
    both = covariance * mean_score
    return {
      'covariance_norm': covariance,
      'mean_score_norm': mean_score,
      'drift': mean_score / covariance if covariance else math.nan,
      'drift_cosine': product / both if both else math.nan,
    }


def _norms(plain: Any, centred: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
  mean_score = jax.tree.map(lambda a, b: a - b, plain, centred)
  return optax.tree.norm(centred), optax.tree.norm(mean_score), optax.tree.vdot(centred, mean_score)
