"""One draw per row of logits, with the record that the trainer needs of it.

    q = softmax(logits / temperature) over the kept set, 0 elsewhere

The kept set is built as vLLM builds it: temperature, then the `top_k` most likely tokens with every
tie at the cutoff, then of these, renormalised, the fewest most likely tokens whose mass reaches
`top_p`. Where equal logits straddle that last cutoff, lower ids are kept first (vLLM leaves the
order of such ties to its sort).

Sorting a vocabulary is far dearer than finding its few largest entries, so the cutoff is looked
for among the `width` largest first; only where some row's cutoff lies beyond are all sorted, and
then only those rows take that answer, so that no row's draw depends on its neighbours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A recorded support whose mass misses 1 by more than this is no support.
SUPPORT_TOLERANCE = 1e-3

Array = Any  # a jax array inside a jitted step, a numpy array on the host


class DrawParams(NamedTuple):
  """How each row is drawn.

  Attributes:
    temperature: [B] float32; 0 takes the most likely token, with log-probs at temperature 1.
    top_k: [B] int32; 0 keeps all.
    top_p: [B] float32; 1 keeps all.
    cap: [B] int32, how many candidates are recorded at most.
  """

  temperature: Array
  top_k: Array
  top_p: Array
  cap: Array


class Draw(NamedTuple):
  """What was drawn, and the distribution it came from.

  Attributes:
    ids: [B] int32.
    logps: [B] float32, log q(a) in nats.
    candidate_ids: [B, K] int32, the most likely kept tokens in falling order; -1 for none.
    candidate_logps: [B, K] float32, log q(v) in nats; 0 where there is none.
    full_support: [B] bool: the candidates are all the kept tokens, their masses sum to 1 and
      the drawn id is one of them.
  """

  ids: Array
  logps: Array
  candidate_ids: Array
  candidate_logps: Array
  full_support: Array


class _Cutoff(NamedTuple):
  """A row keeps ids whose logit is above `value`, or equal to it with an id up to `last_id`."""

  value: jax.Array  # [B] float32
  last_id: jax.Array  # [B] int32
  decided: jax.Array  # [B] bool


def _cutoff(logits: jax.Array, values: jax.Array, ids: jax.Array, params: DrawParams) -> _Cutoff:
  """Finds each row's cutoff among its `width` largest logits.

  `logits` are [B, V] float32; `values` and `ids`, [B, width], are their `top_k`: equal values come
  in rising order of id.
  """
  vocab, width = logits.shape[-1], values.shape[-1]
  all_ids = jnp.int32(vocab)
  top_k = jnp.where(params.top_k > 0, jnp.minimum(params.top_k, vocab), vocab)
  at_k = jnp.take_along_axis(values, jnp.minimum(top_k, width)[:, None] - 1, axis=1)[:, 0]
  threshold = jnp.where(top_k < vocab, at_k, -jnp.inf)

  within_k = logits >= threshold[:, None]
  log_mass = jax.nn.logsumexp(logits, axis=-1, where=within_k)
  inside = values >= threshold[:, None]
  probs = jnp.where(inside, jnp.exp(values - log_mass[:, None]), 0.0)
  before = jnp.cumsum(probs, axis=-1) - probs
  num_kept = jnp.sum(inside & (before < params.top_p[:, None]), axis=-1)
  last = num_kept[:, None] - 1

  no_p = params.top_p >= 1.0
  found_k = (top_k <= width) | (top_k >= vocab)
  found_p = no_p | (num_kept < width) | (jnp.sum(within_k, axis=-1) <= width)
  return _Cutoff(
    value=jnp.where(no_p, threshold, jnp.take_along_axis(values, last, axis=1)[:, 0]),
    last_id=jnp.where(no_p, all_ids, jnp.take_along_axis(ids, last, axis=1)[:, 0]),
    decided=found_k & found_p,
  )


def _whole_cutoff(
  logits: jax.Array, values: jax.Array, ids: jax.Array, params: DrawParams
) -> _Cutoff:
  """`_cutoff`, falling back on the whole vocabulary for the rows that need it."""
  narrow, vocab = _cutoff(logits, values, ids, params), logits.shape[-1]
  if values.shape[-1] == vocab:
    return narrow

  def widen() -> _Cutoff:
    wide = _cutoff(logits, *jax.lax.top_k(logits, vocab), params)
    return jax.tree.map(lambda n, w: jnp.where(narrow.decided, n, w), narrow, wide)

  return jax.lax.cond(jnp.all(narrow.decided), lambda: narrow, widen)


def draw(
  logits: jax.Array, keys: jax.Array, params: DrawParams, *, num_candidates: int, width: int
) -> Draw:
  """Draws one token per row.

  Args:
    logits: [B, V] float32, as they leave the head.
    keys: [B] typed random keys, already folded with the drawn position.
    params: per row.
    num_candidates: K, the largest cap; static.
    width: how many of the largest logits are looked at before all are; static, best no smaller
      than the largest top_k.
  """
  vocab = logits.shape[-1]
  num_candidates = min(num_candidates, vocab)
  greedy = params.temperature == 0.0
  logits = logits.astype(jnp.float32)
  logits = logits / jnp.where(greedy, 1.0, params.temperature)[:, None]
  # top_k orders -0 below 0, and comparisons do not: keep one zero, so that both see a tie.
  logits = jnp.where(logits == 0.0, 0.0, logits)

  values, ids = jax.lax.top_k(logits, max(num_candidates, min(width, vocab)))
  cutoff = _whole_cutoff(logits, values, ids, params)

  def keeps(values: jax.Array, ids: jax.Array) -> jax.Array:
    value, last_id = cutoff.value[:, None], cutoff.last_id[:, None]
    return (values > value) | ((values == value) & (ids <= last_id))

  kept = keeps(logits, jnp.arange(vocab, dtype=jnp.int32))
  log_mass = jax.nn.logsumexp(logits, axis=-1, where=kept)
  noise = jax.vmap(lambda key: jax.random.gumbel(key, (vocab,), jnp.float32))(keys)
  noisy = logits + jnp.where(greedy[:, None], 0.0, noise)
  drawn = jnp.argmax(jnp.where(kept, noisy, -jnp.inf), axis=-1).astype(jnp.int32)
  logps = jnp.take_along_axis(logits, drawn[:, None], axis=1)[:, 0] - log_mass

  values, ids = values[:, :num_candidates], ids[:, :num_candidates]
  recorded = keeps(values, ids) & (jnp.arange(num_candidates) < params.cap[:, None])
  recorded &= values > -jnp.inf
  candidate_logps = jnp.where(recorded, values - log_mass[:, None], 0.0)
  mass = jnp.sum(jnp.where(recorded, jnp.exp(candidate_logps), 0.0), axis=-1)
  whole = jnp.sum(kept & (logits > -jnp.inf), axis=-1) == jnp.sum(recorded, axis=-1)
  holds = jnp.any(recorded & (ids == drawn[:, None]), axis=-1)
  return Draw(
    ids=drawn,
    logps=logps,
    candidate_ids=jnp.where(recorded, ids, -1),
    candidate_logps=candidate_logps,
    full_support=whole & holds & (jnp.abs(mass - 1.0) < SUPPORT_TOLERANCE),
  )
