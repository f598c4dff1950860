import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.objectives import Correction
from mimo.objectives.importance import expected_weight, tail_weight, weight

NONE = Correction(importance='none')
TRUNCATED = Correction(importance='truncated', low=0.5, high=5.0)
MASKED = Correction(importance='masked', low=0.5, high=5.0)

RATIOS = np.array([1e-9, 0.25, 1.0, 3.0, 7.0])


@pytest.mark.parametrize(
  ('correction', 'want'),
  [
    (NONE, [1, 1, 1, 1, 1]),
    (TRUNCATED, [1e-9, 0.25, 1, 3, 5]),
    (MASKED, [0, 0, 1, 3, 0]),
  ],
)
def test_weight(correction, want):
  got = jax.jit(weight, static_argnums=1)(jnp.log(RATIOS).astype(jnp.float32), correction)
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize('correction', [NONE, TRUNCATED, MASKED])
def test_expected_weight_is_q_times_f(correction):
  q = np.array([0.3, 0.2, 0.1, 0.05, 0.02])
  p = RATIOS * q
  logp, logq = jnp.log(p).astype(jnp.float32), jnp.log(q).astype(jnp.float32)
  want = q * np.asarray(weight(logp - logq, correction))
  np.testing.assert_allclose(expected_weight(logp, logq, correction), want, rtol=1e-5)


@pytest.mark.parametrize(
  ('correction', 'want'),
  # rho f(1/rho) at rho = 1e-6, 0.1, 0.25, 1, 4, 1e6, by hand
  [
    (NONE, [1e-6, 0.1, 0.25, 1, 4, 1e6]),
    (TRUNCATED, [5e-6, 0.5, 1, 1, 1, 1]),
    (MASKED, [0, 0, 1, 1, 0, 0]),
  ],
)
def test_tail_weight(correction, want):
  rho = jnp.array([1e-6, 0.1, 0.25, 1.0, 4.0, 1e6])
  np.testing.assert_allclose(tail_weight(rho, correction), want, rtol=1e-6)


@pytest.mark.parametrize('correction', [NONE, TRUNCATED, MASKED])
def test_far_ratios_stay_finite(correction):
  far = jnp.array([-1e4, -100.0, 100.0, 1e4, -jnp.inf, jnp.inf])
  assert np.isfinite(weight(far, correction)).all()
  assert np.isfinite(expected_weight(-jnp.abs(far), jnp.full(6, -1.0), correction)).all()


def test_a_bound_of_zero():
  closed = Correction(importance='masked', low=0.0, high=0.0)
  np.testing.assert_array_equal(weight(jnp.array([-200.0, 0.0]), closed), [0, 0])
  everything = Correction(importance='masked', low=0.0, high=1.0)
  np.testing.assert_allclose(weight(jnp.array([-50.0, -jnp.inf]), everything), [2e-22, 0], rtol=0.1)


def test_no_gradient():
  np.testing.assert_array_equal(jax.grad(lambda d: weight(d, TRUNCATED).sum())(jnp.zeros(3)), 0)


def test_refuses_other_shapes():
  with pytest.raises(AssertionError):
    expected_weight(jnp.zeros(3), jnp.zeros(2), NONE)
