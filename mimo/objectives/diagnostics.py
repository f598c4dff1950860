"""Diagnostics of the objective: per-token values, their sums, and the ratios of those sums.

Nothing here has a gradient or decides anything in the loss. Every leaf of aux is float32, a scalar
or [num_sources]; `_max` leaves combine by maximum, all others by addition:

  leaf                 over which tokens    what is summed
  tokens               trained on           1
  log_ratio_sum        trained on           d = log p(a) - log q(a), nats (replayed where replayed)
  kl_sum               trained on           e^d - 1 - d: an estimate of KL(q || p), nats
  ratio_sum            trained on           r = e^d
  ratio_sq_sum         trained on           r^2
  weight_sum           trained on           f(r), what the loss multiplies by
  masked_low           trained on           1 where importance is 'masked' and r < low
  masked_high          trained on           1 where importance is 'masked' and r > high
  truncated            trained on           1 where importance is 'truncated' and r > high
  cut_tokens           trained on           1 where replay was asked and the support is not full
  head_sampler_sum     trained on           Q, the candidates' mass under the sampler
  head_trainer_sum     trained on           P, their mass under the trainer, before replay
  head_tokens          heads                1: the candidates are not the whole support
  rho_sum              heads                rho = (1 - Q) / (1 - P), each floored at 1e-6
  rho_max              heads                its maximum; 0 where there are no heads
  rho_floored          heads                1 where a floor decided rho

d is clipped to +-20 nats in `log_ratio_sum`, `kl_sum`, `ratio_sum` and `ratio_sq_sum`, and only
there: float32 holds e^40. The entropy belongs to the caller (`candidate_logps` returns it).
"""

from __future__ import annotations

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np

from mimo.objectives.centering import Tail
from mimo.objectives.correction import Correction
from mimo.objectives.importance import log_bound

LOG_RATIO_CLIP = 20.0

Aux = dict[str, jax.Array]


def _is_max(name: str) -> bool:
  return name.endswith('_max')


def per_token(
  log_ratio: jax.Array, weight: jax.Array, tail: Tail, full: jax.Array, correction: Correction
) -> Aux:
  """Returns what each token adds to each leaf of aux.

  Args:
    log_ratio: [...] float32, d in nats.
    weight: [...] float32, f(r).
    tail: head masses and rho of each position.
    full: [...] bool, True where the candidates are the whole support.
    correction: what the loss corrects.
  """
  chex.assert_equal_shape([log_ratio, weight, full, *tail])
  d = jnp.clip(jax.lax.stop_gradient(log_ratio), -LOG_RATIO_CLIP, LOG_RATIO_CLIP)
  ratio = jnp.exp(d)
  below = log_ratio < log_bound(correction.low)
  above = log_ratio > log_bound(correction.high)
  never = jnp.zeros_like(full)
  masked = correction.importance == 'masked'
  truncated = correction.importance == 'truncated'
  head = ~full
  values = {
    'tokens': jnp.ones_like(full),
    'log_ratio_sum': d,
    'kl_sum': jnp.expm1(d) - d,
    'ratio_sum': ratio,
    'ratio_sq_sum': ratio * ratio,
    'weight_sum': weight,
    'masked_low': below if masked else never,
    'masked_high': above if masked else never,
    'truncated': above if truncated else never,
    'cut_tokens': head if correction.replay else never,
    'head_sampler_sum': tail.head_sampler,
    'head_trainer_sum': tail.head_trainer,
    'head_tokens': head,
    'rho_sum': jnp.where(head, tail.rho, 0.0),
    'rho_max': jnp.where(head, tail.rho, 0.0),
    'rho_floored': head & tail.floored,
  }
  return {name: value.astype(jnp.float32) for name, value in values.items()}


def accumulate(
  values: Aux, mask: jax.Array, source: jax.Array | None = None, num_sources: int | None = None
) -> Aux:
  """Sums (or takes the maximum of) each leaf over masked-in tokens, per source where given.

  Args:
    values: leaves of [...] float32.
    mask: [...] bool, True where a token counts.
    source: [...] int32 in [0, num_sources); masked-out positions may hold anything.
    num_sources: how many sources there are; given with `source`.

  Returns:
    The same leaves, scalars or [num_sources].

  Raises:
    ValueError: one of `source` and `num_sources` without the other, or no source at all.
  """
  check_sources(source, num_sources)
  chex.assert_type(mask, bool)
  member = mask[..., None]
  if source is not None and num_sources is not None:
    chex.assert_equal_shape([source, mask])
    chex.assert_type(source, int)
    member = member & (source[..., None] == jnp.arange(num_sources))
  axes = tuple(range(mask.ndim))
  aux = {}
  for name, value in values.items():
    chex.assert_equal_shape([value, mask])
    kept = jnp.where(member, value[..., None], 0.0)
    reduced = jnp.max(kept, axis=axes, initial=0.0) if _is_max(name) else jnp.sum(kept, axis=axes)
    aux[name] = reduced if source is not None else reduced[0]
  return aux


def check_sources(source: jax.Array | None, num_sources: int | None) -> None:
  """Raises ValueError unless both are given, with at least one source, or neither is."""
  if (source is None) != (num_sources is None):
    raise ValueError('got one of source and num_sources; expected both or neither')
  if num_sources is not None and num_sources < 1:
    raise ValueError(f'num_sources is {num_sources}; expected at least 1')


def merge_aux(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> Aux:
  """Combines the aux of two micro-batches: sums add, maxima (`_max`) take the larger.

  Raises:
    ValueError: the leaves differ.
  """
  if a.keys() != b.keys():
    raise ValueError(f'aux leaves differ: {sorted(a.keys() ^ b.keys())} are in one only')
  return {name: jnp.maximum(a[name], b[name]) if _is_max(name) else a[name] + b[name] for name in a}


def total_aux(aux: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Combines [num_sources] leaves into scalars, on the host."""
  return {
    name: np.asarray(leaf).max() if _is_max(name) else np.asarray(leaf).sum(dtype=np.float64)
    for name, leaf in aux.items()
  }


def summarise(aux: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Divides the sums once, on the host, in float64.

  Args:
    aux: leaves of one shape, scalars or [num_sources]; `total_aux` gives the overall ones.

  Returns:
    Leaves of the same shape; 0 / 0 gives 0, so a source without tokens reads 0 everywhere:
      tokens, cut_tokens, head_tokens  counts
      log_ratio         mean d, nats
      kl                mean e^d - 1 - d, nats: KL(q || p)
      ratio             mean r
      effective_sample  (sum r)^2 / (tokens * sum r^2), in [0, 1]
      weight            mean f(r)
      masked_low, masked_high, truncated, cut   shares of tokens
      head_share        share of tokens whose candidates are only a head
      head_sampler, head_trainer                mean masses Q and P
      rho, rho_max      mean and maximum of the tail ratio over heads
      rho_floored       share of heads where a floor decided rho
  """
  leaf = {name: np.asarray(value, np.float64) for name, value in aux.items()}
  tokens, heads = leaf['tokens'], leaf['head_tokens']

  def share(name: str, count: np.ndarray = tokens) -> np.ndarray:
    return _divide(leaf[name], count)

  return {
    'tokens': tokens,
    'cut_tokens': leaf['cut_tokens'],
    'head_tokens': heads,
    'log_ratio': share('log_ratio_sum'),
    'kl': share('kl_sum'),
    'ratio': share('ratio_sum'),
    'effective_sample': _divide(leaf['ratio_sum'] ** 2, tokens * leaf['ratio_sq_sum']),
    'weight': share('weight_sum'),
    'masked_low': share('masked_low'),
    'masked_high': share('masked_high'),
    'truncated': share('truncated'),
    'cut': share('cut_tokens'),
    'head_share': share('head_tokens'),
    'head_sampler': share('head_sampler_sum'),
    'head_trainer': share('head_trainer_sum'),
    'rho': share('rho_sum', heads),
    'rho_max': leaf['rho_max'],
    'rho_floored': share('rho_floored', heads),
  }


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
  empty = denominator == 0
  return np.where(empty, 0.0, numerator / np.where(empty, 1.0, denominator))
