"""The loss and its gradient against a float64 enumeration of the vocabulary (conftest.py)."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.objectives import ARMS, arm, policy_loss

CORRECTIONS = {name: arm(name).correction for name in ARMS}


def stack(rows):
  """Rows -> the arguments of `row_losses`."""
  return {
    'logits': np.stack([row.logits for row in rows]),
    'token': np.array([row.token for row in rows], np.int32),
    'logp_sampler': np.array([row.logq_token for row in rows], np.float32),
    'logp_sampler_candidates': np.stack([row.logq for row in rows]),
    'candidate_ids': np.stack([row.ids for row in rows]),
    'full_support': np.array([row.full for row in rows]),
    'adv': np.array([row.adv for row in rows], np.float32),
    'mask': np.ones(len(rows), bool),
  }


def batch_loss(logits, *, token, candidate_ids, correction, denominator=1.0, **rest):
  logp = jax.nn.log_softmax(logits)
  return policy_loss(
    logp_trainer=jnp.take_along_axis(logp, token[:, None], -1)[:, 0],
    # Ids of -1 read the last token here: the loss must not care.
    logp_trainer_candidates=jnp.take_along_axis(logp, candidate_ids, -1),
    candidate_ids=candidate_ids,
    correction=correction,
    denominator=denominator,
    **rest,
  )


@functools.partial(jax.jit, static_argnames='correction')
def row_losses(logits, correction, **args):
  """Returns the loss, the gradient and the aux of each row by itself."""

  def one(logits, args):
    args = {name: value[None] for name, value in args.items()}
    return batch_loss(logits[None], correction=correction, **args)

  (loss, aux), grads = jax.vmap(jax.value_and_grad(one, has_aux=True))(logits, args)
  return loss, grads, aux


def run(rows, correction):
  args = stack(rows)
  return row_losses(args.pop('logits'), correction=correction, **args)


@pytest.mark.parametrize('name', ARMS)
def test_gradient_is_the_enumerations(name, rows, enumeration, rho_of, tails_of):
  correction = CORRECTIONS[name]
  loss, grads, aux = run(rows, correction)
  chex.assert_tree_all_finite((loss, grads, aux))
  for i, row in enumerate(rows):
    want_loss, want = enumeration(row, correction)
    rho = rho_of(row)
    bound = 1e-4 * np.linalg.norm(want) + 1e-6 * max(rho, 1.0)
    error = np.linalg.norm(np.asarray(grads[i], np.float64) - want)
    assert error <= bound, (i, row, error, bound)
    if row.full and (row.ids >= 0).any():
      np.testing.assert_allclose(loss[i], want_loss, rtol=1e-4, atol=1e-6)
    if not row.full:
      # float32 sums of probabilities are good to 1e-7, so that a tail of 1e-6 is good to 10%.
      slack = 1e-3 + 2e-7 / max(min(tails_of(row)), 1e-6)
      np.testing.assert_allclose(aux['rho_max'][i], rho, rtol=slack)
