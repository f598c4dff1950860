"""What holds exactly of the objective, whatever the numbers."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mimo.objectives import ARMS, Correction, arm, policy_loss

SIZE, WIDTH = 48, 56  # as in conftest.py
CENTRED = [name for name in ARMS if name.startswith('sc')]


def _log_softmax(x):
  return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.fixture
def prefix():
  """The trainer's logits, and a sampler's whole distribution some way off."""
  rng = np.random.default_rng(3)
  logits = rng.normal(0, 2, SIZE).astype(np.float32)
  return logits, _log_softmax(logits + rng.normal(0, 1, SIZE).astype(np.float32))


@pytest.fixture
def grads_of(row_type, evaluate):
  """Gradient in the logits [V] of every token as the sample: [V, V], row a for token a."""

  def grads_of(logits, logq, ids, adv, *, correction, full):
    rows = every_token(row_type, logits, logq, ids, adv, full)
    return np.float64(evaluate(rows, correction)[1])

  return grads_of


def every_token(row_type, logits, logq, ids, adv, full):
  padded = np.full(WIDTH, -1, np.int32)
  padded[: len(ids)] = ids
  record = np.full(WIDTH, np.nan, np.float32)
  record[: len(ids)] = logq[ids]
  return [
    row_type(logits, padded, record, full, token, logq[token], np.float32(adv[token]))
    for token in range(SIZE)
  ]


def _nucleus(logq, kept):
  """`logq` renormalised over its `kept` most likely tokens, and their ids."""
  ids = np.argsort(-logq)[:kept]
  inside = np.full(SIZE, -np.inf, np.float32)
  inside[ids] = _log_softmax(logq[ids])
  return inside, ids


def _expected(logq, grads):
  support = np.isfinite(logq)
  return np.exp(logq[support], dtype=np.float64) @ grads[support]


@pytest.mark.parametrize('name', CENTRED)
@pytest.mark.parametrize('kept', [1, 7, SIZE])
def test_no_drift_on_a_full_support(name, kept, prefix, grads_of):
  logits, logq = prefix
  logq, ids = _nucleus(logq, kept)
  grads = grads_of(logits, logq, ids, np.ones(SIZE), correction=arm(name).correction, full=True)
  np.testing.assert_allclose(_expected(logq, grads), 0, atol=1e-6)


@pytest.mark.parametrize('name', CENTRED)
@pytest.mark.parametrize('head', [1, 5, SIZE - 1])
def test_no_drift_where_the_tails_are_proportional(name, head, prefix, grads_of):
  logits, logq = prefix
  ids = np.argsort(-logq)[:head]
  outside = np.setdiff1d(np.arange(SIZE), ids)
  logp = _log_softmax(logits)
  rest = np.log(np.exp(logq[outside]).sum() / np.exp(logp[outside]).sum())
  logq[outside] = logp[outside] + rest
  grads = grads_of(logits, logq, ids, np.ones(SIZE), correction=arm(name).correction, full=False)
  np.testing.assert_allclose(_expected(logq, grads), 0, atol=2e-6)


def test_the_uncentred_arms_do_drift(prefix, grads_of):
  logits, logq = prefix
  everything = np.arange(SIZE)
  grads = grads_of(logits, logq, everything, np.ones(SIZE), correction=Correction(), full=True)
  # Uncorrected, the push on every logit is toward the sampler: p - q, to descend.
  p = np.exp(_log_softmax(logits))
  np.testing.assert_allclose(_expected(logq, grads), p - np.exp(logq), atol=1e-6)


@pytest.mark.parametrize('name', ARMS)
@pytest.mark.parametrize(('head', 'full'), [(5, False), (SIZE, False), (SIZE, True)])
def test_on_policy_nothing_changes(name, head, full, prefix, grads_of):
  logits, _ = prefix
  logp = _log_softmax(logits)
  ids = np.argsort(-logp)[:head]
  adv = np.linspace(-1, 1, SIZE)
  want = adv[:, None] * (np.exp(logp) - np.eye(SIZE))
  got = grads_of(logits, logp, ids, adv, correction=arm(name).correction, full=full)
  np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize('kept', [1, 7, SIZE])
def test_centering_is_nothing_where_the_ratio_is_whole(kept, prefix, grads_of):
  logits, logq = prefix
  logq, ids = _nucleus(logq, kept)
  whole = Correction(importance='truncated', low=0.0, high=1e30, replay=True)
  centred = dataclasses.replace(whole, center=True)
  adv = np.ones(SIZE)
  want = grads_of(logits, logq, ids, adv, correction=whole, full=True)[ids]
  got = grads_of(logits, logq, ids, adv, correction=centred, full=True)[ids]
  np.testing.assert_allclose(got, want, atol=1e-6)
  assert kept == 1 or np.abs(want).max() > 0.1


@pytest.mark.parametrize('name', [name for name in ARMS if name.endswith('_topp')])
def test_replay_leaves_logits_outside_the_support_alone(name, prefix, grads_of):
  logits, logq = prefix
  logq, ids = _nucleus(logq, 7)
  correction = arm(name).correction
  grads = grads_of(logits, logq, ids, np.ones(SIZE), correction=correction, full=True)[ids]
  outside = ~np.isfinite(logq)
  np.testing.assert_allclose(grads[:, outside], 0, atol=1e-7)
  assert np.any(np.abs(grads[:, ~outside]) > 1e-3)


def test_a_nucleus_not_replayed_shows_the_kept_mass_as_its_ratio(prefix):
  logits, _ = prefix
  logp = _log_softmax(logits)
  logq, ids = _nucleus(logp, 7)
  for correction, want in ((Correction(), np.exp(logp[ids]).sum()), (Correction(replay=True), 1.0)):
    loss = jax.jit(functools.partial(policy_loss, correction=correction))
    _, aux = loss(
      logp_trainer=logp[ids],
      logp_trainer_candidates=np.tile(logp[ids], (7, 1)),
      logp_sampler=logq[ids],
      logp_sampler_candidates=np.tile(logq[ids], (7, 1)),
      candidate_ids=np.tile(ids, (7, 1)),
      full_support=np.ones(7, bool),
      adv=np.ones(7, np.float32),
      mask=np.ones(7, bool),
    )
    np.testing.assert_allclose(aux['ratio_sum'] / aux['tokens'], want, rtol=1e-5)
    np.testing.assert_allclose(aux['head_trainer_sum'] / 7, np.exp(logp[ids]).sum(), rtol=1e-5)


@pytest.mark.parametrize('name', ARMS)
@pytest.mark.parametrize('kind', ['head', 'nucleus'])
def test_monte_carlo_mean_is_the_closed_form(name, kind, prefix, row_type, evaluate, enumeration):
  """20,000 tokens drawn from q, advantages that depend on the token, 4 standard errors."""
  rng = np.random.default_rng(11)
  logits, logq = prefix
  ids = np.argsort(-logq)[:8]
  if kind == 'nucleus':
    logq, ids = _nucleus(logq, 8)
  adv = rng.normal(size=SIZE)
  correction = arm(name).correction
  rows = every_token(row_type, logits, logq, ids, adv, kind == 'nucleus')

  q = np.exp(logq, dtype=np.float64)
  q /= q.sum()
  drawn = np.bincount(rng.choice(SIZE, 20_000, p=q), minlength=SIZE)
  grads = np.float64(evaluate(rows, correction)[1])
  want = sum(q[token] * enumeration(rows[token], correction)[1] for token in np.flatnonzero(q))
  mean = drawn @ grads / drawn.sum()
  error = np.sqrt(q @ (grads - want) ** 2 / drawn.sum())
  assert (np.abs(mean - want) <= 4 * error + 1e-6).all()
