"""The sampler's support: which candidates count, and the trainer renormalised over them."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp


def replay(
  logp_trainer: jax.Array,
  logp_trainer_candidates: jax.Array,
  valid: jax.Array,
  replayed: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Renormalises the trainer over the candidates: log p_S = log p - logsumexp_S log p.

  Samplers that draw from a nucleus renormalise over it; the trainer then has to do the same, or
  every ratio is off by the mass it keeps there. Logits outside S get no gradient.

  Args:
    logp_trainer: [...] float32, log p(a) over the full vocabulary.
    logp_trainer_candidates: [..., K] float32, finite where `valid` is False.
    valid: [..., K] bool, True where there is a candidate.
    replayed: [...] bool, True where to renormalise: `valid` must hold somewhere in such a row.

  Returns:
    Both log-probs, renormalised where `replayed` and untouched elsewhere.
  """
  chex.assert_equal_shape([logp_trainer, replayed])
  chex.assert_equal_shape([logp_trainer_candidates, valid])
  chex.assert_type([logp_trainer, logp_trainer_candidates], float)
  chex.assert_type([valid, replayed], bool)
  if not valid.shape[-1]:
    return logp_trainer, logp_trainer_candidates
  # Rows that are not replayed go through the logarithm as zeros: no infinity reaches its gradient.
  rows = replayed[..., None]
  inside = jnp.where(rows & valid, logp_trainer_candidates, jnp.where(rows, -jnp.inf, 0.0))
  kept = jnp.where(replayed, jax.nn.logsumexp(inside, axis=-1), 0.0)
  return logp_trainer - kept, logp_trainer_candidates - kept[..., None]
