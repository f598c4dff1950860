import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.objectives.support import replay

LOGP = jnp.log(jnp.array([[0.2, 0.1, 0.7], [0.2, 0.1, 0.7], [0.5, 0.25, 0.25]]))
VALID = jnp.array([[True, True, False], [True, True, False], [True, True, True]])
REPLAYED = jnp.array([True, False, True])


def test_renormalises_over_the_support():
  logp, candidates = jax.jit(replay)(LOGP[:, 0], LOGP, VALID, REPLAYED)
  np.testing.assert_allclose(np.exp(logp), [2 / 3, 0.2, 0.5], rtol=1e-6)
  np.testing.assert_allclose(np.exp(candidates[0, :2]), [2 / 3, 1 / 3], rtol=1e-6)
  np.testing.assert_allclose(candidates[1:], LOGP[1:], rtol=1e-6)


def test_gradient_is_finite_without_candidates_or_replay():
  nothing = jnp.zeros_like(VALID)

  @jax.jit
  @jax.grad
  def grad(x, valid, replayed):
    return sum(jnp.sum(y) for y in replay(x[:, 0], x, valid, replayed))

  for valid in (VALID, nothing):
    grads = grad(LOGP, valid, REPLAYED & valid.any(-1))
    assert np.isfinite(grads).all()


def test_no_candidates_at_all():
  logp, candidates = replay(jnp.zeros(2), jnp.zeros((2, 0)), jnp.zeros((2, 0), bool), REPLAYED[:2])
  assert candidates.shape == (2, 0)
  np.testing.assert_array_equal(logp, 0)


def test_refuses_a_mask_that_is_no_bool():
  with pytest.raises(AssertionError):
    replay(LOGP[:, 0], LOGP, VALID.astype(jnp.int32), REPLAYED)
