"""Importance weights: f(r) for the sampled token, and q f(p/q) for a whole distribution.

Everything is a function of log-probs and is compared in log space, so that no ratio overflows: the
sampled token and its own entry among the candidates fall on the same side of a bound.
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

from mimo.objectives.correction import Correction


def log_bound(bound: float) -> float:
  """Returns log(bound) in nats, -inf for 0."""
  return math.log(bound) if bound > 0 else -math.inf


def in_range(log_ratio: jax.Array, correction: Correction) -> jax.Array:
  """Returns low <= r <= high, as bool, of `log_ratio` in nats."""
  return (log_bound(correction.low) <= log_ratio) & (log_ratio <= log_bound(correction.high))


def weight(log_ratio: jax.Array, correction: Correction) -> jax.Array:
  """Returns f(r): 1, min(r, high), or r * 1[low <= r <= high].

  Args:
    log_ratio: [...] float32, log p(a) - log q(a) in nats.
    correction: names f and its bounds.

  Returns:
    [...] float32, without a gradient.
  """
  chex.assert_type(log_ratio, float)
  log_ratio = jax.lax.stop_gradient(log_ratio)
  if correction.importance == 'none':
    return jnp.ones_like(log_ratio)
  capped = jnp.exp(jnp.minimum(log_ratio, log_bound(correction.high)))
  if correction.importance == 'truncated':
    return capped
  return jnp.where(in_range(log_ratio, correction), capped, 0.0)


def expected_weight(
  logp_trainer: jax.Array, logp_sampler: jax.Array, correction: Correction
) -> jax.Array:
  """Returns q f(p/q) of each token: q, min(p, high q), or p * 1[low q <= p <= high q].

  In these forms nothing is divided by a small q, and every value is at most max(p, q).

  Args:
    logp_trainer: [...] float32, log p(v) in nats.
    logp_sampler: [...] float32, log q(v) in nats.
    correction: names f and its bounds.

  Returns:
    [...] float32, without a gradient.
  """
  chex.assert_equal_shape([logp_trainer, logp_sampler])
  chex.assert_type([logp_trainer, logp_sampler], float)
  logp_trainer, logp_sampler = jax.lax.stop_gradient((logp_trainer, logp_sampler))
  if correction.importance == 'none':
    return jnp.exp(logp_sampler)
  if correction.importance == 'truncated':
    return jnp.exp(jnp.minimum(logp_trainer, log_bound(correction.high) + logp_sampler))
  inside = in_range(logp_trainer - logp_sampler, correction)
  return jnp.where(inside, jnp.exp(logp_trainer), 0.0)


def tail_weight(rho: jax.Array, correction: Correction) -> jax.Array:
  """Returns alpha = rho f(1/rho): rho, min(1, rho high), or 1[low <= 1/rho <= high].

  It is `expected_weight` of a tail with q = rho p, per unit of p.

  Args:
    rho: [...] float32, positive: the sampler's tail mass over the trainer's.
    correction: names f and its bounds.

  Returns:
    [...] float32, without a gradient.
  """
  chex.assert_type(rho, float)
  rho = jax.lax.stop_gradient(rho)
  if correction.importance == 'none':
    return rho
  if correction.importance == 'truncated':
    return jnp.minimum(1.0, rho * correction.high)
  return jnp.where(in_range(-jnp.log(rho), correction), 1.0, 0.0)
