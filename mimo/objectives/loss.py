"""The loss: every correction composed, one token at a time."""

from __future__ import annotations

import math
import numbers

import chex
import jax
import jax.numpy as jnp

from mimo.objectives import diagnostics
from mimo.objectives.centering import center_coefficients, tail
from mimo.objectives.correction import Correction
from mimo.objectives.importance import weight
from mimo.objectives.support import replay


def policy_loss(
  *,
  logp_trainer: jax.Array,
  logp_trainer_candidates: jax.Array,
  logp_sampler: jax.Array,
  logp_sampler_candidates: jax.Array,
  candidate_ids: jax.Array,
  full_support: jax.Array,
  adv: jax.Array,
  mask: jax.Array,
  correction: Correction,
  denominator: float | jax.Array | None = None,
  source: jax.Array | None = None,
  num_sources: int | None = None,
) -> tuple[jax.Array, diagnostics.Aux]:
  """Policy-gradient loss of samples whose sampler is not the trainer.

  Per token a with advantage A, sampler q, trainer p and importance weight f, as a loss to minimise:

    l = -A (sg(f(r)) log p(a) - sum_v sg(c(v)) log p(v)),   r = p(a) / q(a)

  c is `center_coefficients` where `correction.center`, else 0. Where `correction.replay` and the
  support is full, p is renormalised over the candidates first. Tokens whose ratio masking zeroes
  stay in the denominator.

  Any leading shape: here [B, T]; gathered positions are [N]. Log-probs are nats, after temperature.
  What masked-out positions and ids of -1 hold never matters, NaN and infinities included.

  Args:
    logp_trainer: [B, T] float32, log p(a) over the full vocabulary.
    logp_trainer_candidates: [B, T, K] float32, log p(v) over the full vocabulary.
    logp_sampler: [B, T] float32, log q(a), of the distribution drawn from.
    logp_sampler_candidates: [B, T, K] float32, log q(v), of the same.
    candidate_ids: [B, T, K] int32, -1 where there is no candidate.
    full_support: [B, T] bool, True where the candidates are q's whole support, a included. A
      position without candidates is never full.
    adv: [B, T] float32.
    mask: [B, T] bool, True where the token is trained on.
    correction: what to correct; static.
    denominator: None divides by sum(mask); a number composes micro-batches. With no token trained
      on, the loss is 0.
    source: [B, T] int32 in [0, num_sources), for aux per source.
    num_sources: how many sources there are; static.

  Returns:
    (loss, aux): a float32 scalar, the sum over masked-in tokens over the denominator; and the sums
    and counts that `mimo.objectives.diagnostics` lists.

  Raises:
    ValueError: a denominator that is negative or not finite, or `source` without `num_sources`.
  """
  tokens = [logp_trainer, logp_sampler, adv, full_support, mask]
  candidates = [logp_trainer_candidates, logp_sampler_candidates, candidate_ids]
  chex.assert_equal_shape(tokens)
  chex.assert_equal_shape(candidates)
  chex.assert_rank(candidates, mask.ndim + 1)
  chex.assert_equal_shape_prefix([mask, candidate_ids], mask.ndim)
  chex.assert_type([*tokens[:3], *candidates[:2]], float)
  chex.assert_type([full_support, mask], bool)
  chex.assert_type(candidate_ids, int)
  _check_denominator(denominator)
  diagnostics.check_sources(source, num_sources)

  # Selected before anything is computed: no garbage reaches a function whose gradient it could
  # turn into NaN.
  valid = mask[..., None] & (candidate_ids >= 0)
  full = mask & full_support & jnp.any(valid, axis=-1)
  logp, logq, adv = (_keep(x, mask) for x in (logp_trainer, logp_sampler, adv))
  logp_candidates = _keep(logp_trainer_candidates, valid)
  logq_candidates = _keep(logp_sampler_candidates, valid)

  outside = tail(logp_candidates, logq_candidates, valid)
  if correction.replay:
    logp, logp_candidates = replay(logp, logp_candidates, valid, full)
  log_ratio = jax.lax.stop_gradient(logp) - logq
  token_weight = weight(log_ratio, correction)
  score = _times(token_weight, logp)
  if correction.center:
    coefficients = center_coefficients(
      logp_candidates,
      logq_candidates,
      valid=valid,
      full=full,
      rho=outside.rho,
      correction=correction,
    )
    score = score - jnp.sum(_times(coefficients, logp_candidates), axis=-1)
  total = -jnp.sum(adv * score)  # adv is 0 outside the mask, and everything finite

  count = jnp.sum(mask, dtype=jnp.float32)
  divisor = count if denominator is None else jnp.asarray(denominator, jnp.float32)
  loss = total / jnp.where(count > 0, divisor, 1.0)
  values = diagnostics.per_token(log_ratio, token_weight, outside, full, correction)
  return loss, diagnostics.accumulate(values, mask, source, num_sources)


def _keep(x: jax.Array, where: jax.Array) -> jax.Array:
  """Returns `x` in float32, and 0 without a gradient outside `where`."""
  return jnp.where(where, x, 0.0).astype(jnp.float32)


def _times(coefficient: jax.Array, logp: jax.Array) -> jax.Array:
  """Returns coefficient * logp, 0 where the coefficient is 0 even if logp is -inf."""
  return coefficient * jnp.where(coefficient != 0, logp, 0.0)


def _check_denominator(denominator: float | jax.Array | None) -> None:
  if isinstance(denominator, numbers.Real) and not (
    math.isfinite(denominator) and denominator >= 0
  ):
    raise ValueError(f'denominator is {denominator}; expected None or a finite number >= 0')
