"""What holds exactly of the objective, whatever the numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.objectives import ARMS, Correction, arm, policy_loss

SIZE = 24
CENTRED = [name for name in ARMS if name.startswith('sc')]


def _log_softmax(x):
  return x - x.max() - np.log(np.exp(x - x.max()).sum())


def _grads(logits, logq, ids, adv, correction, full):
  """Gradient in the logits [V] of every token as the sample: [V, V], row a for token a."""
  padded = np.full(SIZE, -1, np.int32)  # one shape, one trace per correction
  padded[: len(ids)] = ids
  return _padded_grads(logits, logq, padded, adv, np.array(full), correction=correction)


@functools.partial(jax.jit, static_argnames='correction')
def _padded_grads(logits, logq, ids, adv, full, correction):
  def one(token, adv):
    def loss(logits):
      logp = jax.nn.log_softmax(logits)
      return policy_loss(
        logp_trainer=logp[token],
        logp_trainer_candidates=logp[ids],
        logp_sampler=logq[token],
        logp_sampler_candidates=logq[ids],
        candidate_ids=ids,
        full_support=full,
        adv=adv,
        mask=jnp.array(True),
        correction=correction,
        denominator=1.0,
      )[0]

    return jax.grad(loss)(logits)

  return jax.vmap(one)(jnp.arange(SIZE), adv)


@pytest.fixture
def prefix():
  """The trainer's logits, and a sampler's whole distribution some way off."""
  rng = np.random.default_rng(3)
  logits = rng.normal(0, 2, SIZE).astype(np.float32)
  logq = _log_softmax(logits + rng.normal(0, 1, SIZE).astype(np.float32))
  return logits, logq


def _nucleus(logq, kept):
  """`logq` renormalised over its `kept` most likely tokens, and their ids."""
  ids = np.argsort(-logq)[:kept]
  inside = np.full(SIZE, -np.inf, np.float32)
  inside[ids] = _log_softmax(logq[ids])
  return inside, ids


def _expected(logq, grads):
  support = np.isfinite(logq)
  return np.exp(logq[support], dtype=np.float64) @ np.asarray(grads, np.float64)[support]


@pytest.mark.parametrize('name', CENTRED)
@pytest.mark.parametrize('kept', [1, 7, SIZE])
def test_no_drift_on_a_full_support(name, kept, prefix):
  logits, logq = prefix
  logq, ids = _nucleus(logq, kept)
  grads = _grads(logits, logq, ids, jnp.ones(SIZE), arm(name).correction, True)
  np.testing.assert_allclose(_expected(logq, grads), 0, atol=1e-6)


@pytest.mark.parametrize('name', CENTRED)
@pytest.mark.parametrize('head', [1, 5, SIZE - 1])
def test_no_drift_where_the_tails_are_proportional(name, head, prefix):
  logits, logq = prefix
  ids = np.argsort(-logq)[:head]
  outside = np.setdiff1d(np.arange(SIZE), ids)
  logp = _log_softmax(logits)
  rest = np.log(np.exp(logq[outside]).sum() / np.exp(logp[outside]).sum())
  logq[outside] = logp[outside] + rest
  grads = _grads(logits, logq, ids, jnp.ones(SIZE), arm(name).correction, False)
  np.testing.assert_allclose(_expected(logq, grads), 0, atol=2e-6)


def test_the_uncentred_arms_do_drift(prefix):
  logits, logq = prefix
  grads = _grads(logits, logq, np.arange(SIZE), jnp.ones(SIZE), arm('grpo').correction, True)
  # Uncorrected, the push on every logit is toward the sampler: p - q, to descend.
  p = np.exp(_log_softmax(logits))
  np.testing.assert_allclose(_expected(logq, grads), p - np.exp(logq), atol=1e-6)


@pytest.mark.parametrize('name', ARMS)
@pytest.mark.parametrize(('head', 'full'), [(5, False), (SIZE, False), (SIZE, True)])
def test_on_policy_nothing_changes(name, head, full, prefix):
  logits, _ = prefix
  logp = _log_softmax(logits)
  ids = np.argsort(-logp)[:head]
  adv = jnp.linspace(-1, 1, SIZE)
  plain = _grads(logits, logp, ids, adv, Correction(), False)
  want = np.asarray(adv)[:, None] * (np.exp(logp) - np.eye(SIZE))
  np.testing.assert_allclose(plain, want, atol=1e-6)
  got = _grads(logits, logp, ids, adv, arm(name).correction, full)
  np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize('kept', [1, 7, SIZE])
def test_centering_is_nothing_where_the_ratio_is_whole(kept, prefix):
  logits, logq = prefix
  logq, ids = _nucleus(logq, kept)
  adv = jnp.where(jnp.isfinite(logq), 1.0, 0.0)
  whole = Correction(importance='truncated', low=0.0, high=1e30, replay=True)
  centred = dataclasses.replace(whole, center=True)
  want = _grads(logits, logq, ids, adv, whole, True)
  got = _grads(logits, logq, ids, adv, centred, True)
  support = np.isfinite(logq)
  np.testing.assert_allclose(got[support], want[support], atol=1e-6)
  assert kept == 1 or np.abs(want[support]).max() > 0.1


@pytest.mark.parametrize('name', [name for name in ARMS if name.endswith('_topp')])
def test_replay_leaves_logits_outside_the_support_alone(name, prefix):
  logits, logq = prefix
  logq, ids = _nucleus(logq, 7)
  grads = _grads(logits, logq, ids, jnp.ones(SIZE), arm(name).correction, True)
  outside = ~np.isfinite(logq)
  np.testing.assert_allclose(np.asarray(grads)[ids][:, outside], 0, atol=1e-7)
  assert np.any(np.abs(np.asarray(grads)[ids][:, ~outside]) > 1e-3)


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
def test_monte_carlo_mean_is_the_closed_form(name, kind, prefix, enumeration, row_maker):
  """20,000 tokens drawn from q, advantages that depend on the token, 4 standard errors."""
  rng = np.random.default_rng(11)
  row = row_maker(rng, SIZE, SIZE, kind=kind, head=8)
  logits, logq = prefix
  row.logits = logits
  if kind == 'nucleus':
    logq, ids = _nucleus(logq, 8)
  else:
    ids = np.argsort(-logq)[:8]
  row.ids, row.logq = ids.astype(np.int32), logq[ids]
  adv = rng.normal(size=SIZE).astype(np.float32)
  correction = arm(name).correction

  q = np.exp(logq, dtype=np.float64)
  q /= q.sum()
  drawn = np.bincount(rng.choice(SIZE, 20_000, p=q), minlength=SIZE)
  grads = np.asarray(_grads(logits, logq, ids, adv, correction, kind == 'nucleus'), np.float64)
  want = np.zeros(SIZE)
  for token in np.flatnonzero(q):
    row.token, row.logq_token, row.adv = int(token), logq[token], adv[token]
    want += q[token] * enumeration(row, correction)[1]
  mean = drawn @ grads / drawn.sum()
  error = np.sqrt(q @ (grads - want) ** 2 / drawn.sum())
  assert (np.abs(mean - want) <= 4 * error + 1e-6).all()
