"""Score centering: the expected weighted score under the sampler, from a head of candidates."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from mimo.objectives.correction import Correction
from mimo.objectives.importance import expected_weight, tail_weight

# Both tail masses are floored here. A float32 sum of probabilities is good to about 1e-7, so a
# smaller tail is mostly rounding.
TAIL_FLOOR = 1e-6


class Tail(NamedTuple):
  """What lies outside the candidates, per position.

  Attributes:
    head_sampler: [...] float32, Q, the candidates' mass under the sampler.
    head_trainer: [...] float32, P, their mass under the trainer.
    rho: [...] float32, (1 - Q) / (1 - P), both floored: within [1e-6, 1e6].
    floored: [...] bool, True where a floor decided rho.
  """

  head_sampler: jax.Array
  head_trainer: jax.Array
  rho: jax.Array
  floored: jax.Array


def tail(
  logp_trainer_candidates: jax.Array, logp_sampler_candidates: jax.Array, valid: jax.Array
) -> Tail:
  """Returns the head masses and the tail ratio of each position, without a gradient.

  Args:
    logp_trainer_candidates: [..., K] float32, log p(v) over the full vocabulary.
    logp_sampler_candidates: [..., K] float32, log q(v).
    valid: [..., K] bool, True where there is a candidate.
  """
  arrays = [logp_trainer_candidates, logp_sampler_candidates]
  chex.assert_equal_shape([*arrays, valid])
  chex.assert_type(arrays, float)
  chex.assert_type(valid, bool)
  logp, logq = jax.lax.stop_gradient(tuple(arrays))
  head_trainer = jnp.sum(jnp.where(valid, jnp.exp(logp), 0.0), axis=-1)
  head_sampler = jnp.sum(jnp.where(valid, jnp.exp(logq), 0.0), axis=-1)
  tail_trainer = 1.0 - head_trainer
  tail_sampler = 1.0 - head_sampler
  rho = jnp.maximum(tail_sampler, TAIL_FLOOR) / jnp.maximum(tail_trainer, TAIL_FLOOR)
  floored = jnp.minimum(tail_sampler, tail_trainer) < TAIL_FLOOR
  return Tail(head_sampler, head_trainer, rho, floored)


def center_coefficients(
  logp_trainer_candidates: jax.Array,
  logp_sampler_candidates: jax.Array,
  *,
  valid: jax.Array,
  full: jax.Array,
  rho: jax.Array,
  correction: Correction,
) -> jax.Array:
  """Returns c(v), so that the expected weighted score is sum_v c(v) grad log p(v) over candidates.

    full support   c(v) = q(v) f(p(v) / q(v))
    a head         c(v) = q(v) f(p(v) / q(v)) - alpha p(v),   alpha = rho f(1 / rho)

  A head says nothing of the tokens outside it. They are taken as the trainer's, rescaled to the
  mass that the sampler has left: q(v) = rho p(v). Because sum_v p(v) grad log p(v) = 0 over the
  vocabulary, their share of the sum is -alpha times the head's, and only the head is needed.

  Args:
    logp_trainer_candidates: [..., K] float32, log p(v); replayed where the loss replays.
    logp_sampler_candidates: [..., K] float32, log q(v).
    valid: [..., K] bool, True where there is a candidate.
    full: [...] bool, True where the candidates are q's whole support.
    rho: [...] float32, of `tail`.
    correction: names f and its bounds.

  Returns:
    [..., K] float32, 0 where not `valid`, without a gradient.
  """
  logp, logq = logp_trainer_candidates, logp_sampler_candidates
  chex.assert_equal_shape([logp, logq, valid])
  chex.assert_equal_shape([full, rho])
  head = expected_weight(logp, logq, correction)
  alpha = jnp.where(full, 0.0, tail_weight(rho, correction))
  # Selected, not multiplied: where alpha is 0 nothing of the trainer's probability is read.
  rest = jnp.where(full[..., None], 0.0, alpha[..., None] * jnp.exp(jax.lax.stop_gradient(logp)))
  return jnp.where(valid, head - rest, 0.0)
