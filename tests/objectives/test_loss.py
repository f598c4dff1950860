"""The contract of policy_loss: hand-computed values, what never matters, what is refused."""

import dataclasses
import functools

import chex
import jax
import numpy as np
import pytest

from mimo.objectives import Correction, arm, policy_loss

SC_MIS = arm('sc_mis_topp').correction


def _batch(seed=0, shape=(2, 6), width=4):
  """A batch with a filled, a partly filled and an empty record; log-probs of a real softmax."""
  rng = np.random.default_rng(seed)
  logp = np.log(rng.dirichlet(np.ones(16), shape)).astype(np.float32)
  logq = (logp + rng.normal(0, 0.7, logp.shape)).astype(np.float32)
  logq -= np.log(np.exp(logq).sum(-1, keepdims=True))
  ids = rng.permuted(np.broadcast_to(np.arange(16), (*shape, 16)), axis=-1)[..., :width]
  ids = np.where(rng.random(ids.shape) < 0.2, -1, ids).astype(np.int32)
  ids[0, 0] = -1
  full = rng.random(shape) < 0.5
  token = np.maximum(ids[..., :1], 0)
  return {
    'logp_trainer': np.take_along_axis(logp, token, -1)[..., 0],
    'logp_trainer_candidates': np.take_along_axis(logp, ids, -1),
    'logp_sampler': np.take_along_axis(logq, token, -1)[..., 0],
    'logp_sampler_candidates': np.take_along_axis(logq, ids, -1),
    'candidate_ids': ids,
    'full_support': full,
    'adv': rng.normal(size=shape).astype(np.float32),
    'mask': rng.random(shape) < 0.7,
  }


@functools.partial(jax.jit, static_argnames=('correction', 'num_sources'))
def _loss(batch, **kwargs):
  return policy_loss(**batch, **kwargs)


@functools.partial(jax.jit, static_argnames=('correction', 'num_sources'))
def _jitted_grads(floats, rest, **kwargs):
  loss = lambda floats: policy_loss(**floats, **rest, **kwargs)
  return jax.value_and_grad(loss, has_aux=True)(floats)


def _grads(batch, **kwargs):
  """Returns (loss, aux), and gradients of the loss in every float argument."""
  floats = {name: x for name, x in batch.items() if x.dtype == np.float32}
  rest = {name: x for name, x in batch.items() if name not in floats}
  return _jitted_grads(floats, rest, **kwargs)


def _one(correction, *, full, adv=2.0):
  """Two candidates with q = (0.5, 0.3), p = (0.4, 0.2); the first one was drawn."""
  p, q = np.log([[0.4, 0.2]]), np.log([[0.5, 0.3]])
  batch = {
    'logp_trainer': p[:, 0].astype(np.float32),
    'logp_trainer_candidates': p.astype(np.float32),
    'logp_sampler': q[:, 0].astype(np.float32),
    'logp_sampler_candidates': q.astype(np.float32),
    'candidate_ids': np.array([[7, 3]]),
    'full_support': np.array([full]),
    'adv': np.array([adv], np.float32),
    'mask': np.array([True]),
  }
  return _loss(batch, correction=correction)[0]


@pytest.mark.parametrize(
  ('correction', 'full', 'want'),
  [
    (Correction(), False, -2 * np.log(0.4)),
    (Correction(importance='truncated', low=0, high=0.6), False, -2 * 0.6 * np.log(0.4)),
    (Correction(importance='masked', low=0.5, high=5), False, -2 * 0.8 * np.log(0.4)),
    (Correction(importance='masked', low=0.9, high=5), False, 0.0),
    # replayed: p = (2/3, 1/3); the ratio is (2/3) / 0.5 = 4/3
    (Correction(replay=True), True, -2 * np.log(2 / 3)),
    (Correction(importance='masked', replay=True), True, -2 * 4 / 3 * np.log(2 / 3)),
    (Correction(replay=True), False, -2 * np.log(0.4)),
    # centred on the whole support: minus sum q log p
    (Correction(center=True), True, -2 * (np.log(0.4) - 0.5 * np.log(0.4) - 0.3 * np.log(0.2))),
    # centred on a head: rho = 0.2 / 0.4, so c = q - 0.5 p = (0.3, 0.2)
    (Correction(center=True), False, -2 * (np.log(0.4) - 0.3 * np.log(0.4) - 0.2 * np.log(0.2))),
  ],
)
def test_by_hand(correction, full, want):
  np.testing.assert_allclose(_one(correction, full=full), want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize('name', ['grpo', 'sc_tis', 'sc_mis_topp'])
@pytest.mark.parametrize('garbage', [np.nan, np.inf, -np.inf, 1e30])
def test_garbage_never_matters(name, garbage):
  batch = _batch()
  if not np.isfinite(garbage):
    dirty = {}
    for key, x in batch.items():
      hidden = ~batch['mask']
      if x.ndim > hidden.ndim:
        hidden = hidden[..., None] | (batch['candidate_ids'] < 0)
      dirty[key] = np.where(hidden, garbage, x) if x.dtype == np.float32 else x
  else:  # ids and flags too
    hidden = ~batch['mask']
    dirty = dict(batch)
    dirty['candidate_ids'] = np.where(hidden[..., None], 2**31 - 1, batch['candidate_ids'])
    dirty['full_support'] = batch['full_support'] | hidden
  source = np.where(batch['mask'], 1, -9)
  kwargs = {'correction': arm(name).correction, 'num_sources': 2}
  clean = _grads(batch, source=np.ones_like(source), **kwargs)
  got = _grads(dirty, source=source, **kwargs)
  chex.assert_tree_all_finite(got)
  chex.assert_trees_all_equal(got, clean)


@pytest.mark.parametrize('name', ['sc_mis_topp'])
def test_a_masked_row_equals_its_absence(name):
  batch = _batch(shape=(3, 5))
  batch['mask'][1] = False
  correction = arm(name).correction
  (loss, aux), grads = _grads(batch, correction=correction)
  kept = {key: x[[0, 2]] for key, x in batch.items()}
  (want_loss, want_aux), want = _grads(kept, correction=correction)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
  chex.assert_trees_all_close(aux, want_aux, rtol=1e-6)
  for key, grad in grads.items():
    np.testing.assert_allclose(grad[np.array([0, 2])], want[key], rtol=1e-6)
    assert not np.any(grad[1])


def test_any_leading_shape_and_vmap():
  batch = _batch(shape=(2, 6))
  loss, _ = _loss(batch, correction=SC_MIS, denominator=3.0)
  flat = {key: x.reshape(12, *x.shape[2:]) for key, x in batch.items()}
  flat_loss, _ = _loss(flat, correction=SC_MIS, denominator=3.0)
  rows = jax.vmap(lambda row: _loss(row, correction=SC_MIS, denominator=3.0)[0])(batch)
  np.testing.assert_allclose(flat_loss, loss, rtol=1e-6)
  np.testing.assert_allclose(rows.sum(), loss, rtol=1e-6)


def test_masked_tokens_stay_in_the_denominator():
  batch = _batch()
  nowhere = dataclasses.replace(SC_MIS, low=1e8, high=1e9, center=False)
  loss, aux = _loss(batch, correction=nowhere)
  assert loss == 0
  assert aux['tokens'] == aux['masked_low'] == batch['mask'].sum()
  by_default, _ = _loss(batch, correction=SC_MIS)
  total, _ = _loss(batch, correction=SC_MIS, denominator=1.0)
  np.testing.assert_allclose(total / batch['mask'].sum(), by_default, rtol=1e-6)


@pytest.mark.parametrize('denominator', [None, 0.0, 5.0])
def test_an_all_masked_batch_is_a_no_op(denominator):
  batch = _batch()
  batch['mask'][:] = False
  (loss, aux), grads = _grads(batch, correction=SC_MIS, denominator=denominator)
  assert loss == 0
  assert all(leaf == 0 for leaf in aux.values())
  assert not any(np.any(g) for g in grads.values())


def test_cut_tokens_use_the_head_form():
  batch = _batch()
  batch['mask'][0, 0] = True
  batch['full_support'][0, 0] = True  # without candidates: not full
  _, aux = _loss(batch, correction=SC_MIS)
  some = (batch['candidate_ids'] >= 0).any(-1)
  assert aux['cut_tokens'] == (batch['mask'] & ~(batch['full_support'] & some)).sum()
  batch['full_support'][:] = False
  replayed, aux = _loss(batch, correction=SC_MIS)
  plain, plain_aux = _loss(batch, correction=arm('sc_mis').correction)
  np.testing.assert_allclose(replayed, plain, rtol=1e-5)
  assert (aux['cut_tokens'], plain_aux['cut_tokens']) == (batch['mask'].sum(), 0)


def test_no_gradient_but_through_the_trainer():
  _, grads = _grads(_batch(), correction=SC_MIS)
  assert np.any(grads['logp_trainer']) and np.any(grads['logp_trainer_candidates'])
  assert not np.any(grads['logp_sampler']) and not np.any(grads['logp_sampler_candidates'])


def test_a_probability_of_zero_at_a_zeroed_token():
  batch = _batch()
  batch['mask'][:] = True
  batch['logp_trainer'][0, 1] = -np.inf
  batch['logp_trainer_candidates'][1, 1] = -np.inf
  batch['full_support'][:] = False
  chex.assert_tree_all_finite(_grads(batch, correction=SC_MIS))


def test_real_trouble_is_not_hidden():
  batch = _batch()
  batch['mask'][1, 1] = True
  batch['logp_trainer'][1, 1] = np.nan
  assert np.isnan(_loss(batch, correction=arm('sc').correction)[0])


def test_no_candidates():
  batch = _batch()
  for key in ('candidate_ids', 'logp_trainer_candidates', 'logp_sampler_candidates'):
    batch[key] = batch[key][..., :0]
  loss, _ = _loss(batch, correction=SC_MIS)
  plain, _ = _loss(batch, correction=arm('mis').correction)
  np.testing.assert_allclose(loss, plain, rtol=1e-6)


@pytest.mark.parametrize('denominator', [-1.0, np.inf, np.nan, -2])
def test_refuses_a_denominator(denominator):
  with pytest.raises(ValueError, match=r'denominator is .*; expected None or a finite'):
    policy_loss(**_batch(), correction=SC_MIS, denominator=denominator)


def test_refuses_source_without_num_sources():
  batch = _batch()
  with pytest.raises(ValueError, match='one of source and num_sources'):
    policy_loss(**batch, correction=SC_MIS, source=np.zeros_like(batch['mask'], int))


@pytest.mark.parametrize('key', list(_batch()))
def test_refuses_other_shapes_and_types(key):
  batch = _batch()
  with pytest.raises(AssertionError):
    policy_loss(**{**batch, key: batch[key][:1]}, correction=SC_MIS)
  with pytest.raises(AssertionError):
    policy_loss(**{**batch, key: batch[key].astype(np.complex64)}, correction=SC_MIS)
