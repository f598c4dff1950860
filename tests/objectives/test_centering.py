import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.objectives import Correction
from mimo.objectives.centering import center_coefficients, tail

LOGP = jnp.log(jnp.array([[0.4, 0.2, 0.9], [0.5, 0.5, 0.9]]))
LOGQ = jnp.log(jnp.array([[0.5, 0.3, 0.9], [0.6, 0.4, 0.9]]))
VALID = jnp.array([[True, True, False]] * 2)
FULL = jnp.array([False, True])


def test_tail():
  got = jax.jit(tail)(LOGP, LOGQ, VALID)
  np.testing.assert_allclose(got.head_trainer, [0.6, 1.0], rtol=1e-6)
  np.testing.assert_allclose(got.head_sampler, [0.8, 1.0], rtol=1e-6)
  np.testing.assert_allclose(got.rho, [0.5, 1.0], rtol=1e-6)  # (1 - 0.8) / (1 - 0.6)
  np.testing.assert_array_equal(got.floored, [False, True])


def test_tail_floors():
  logp = jnp.log(jnp.array([[0.5], [1.0], [1.0 + 1e-6]]))
  logq = jnp.log(jnp.array([[1.0 + 1e-6], [0.5], [1.0]]))
  got = tail(logp, logq, jnp.ones((3, 1), bool))
  np.testing.assert_allclose(got.rho, [2e-6, 5e5, 1.0], rtol=1e-6)
  np.testing.assert_array_equal(got.floored, True)


@pytest.mark.parametrize(
  ('correction', 'want'),
  [
    # q - rho p, with rho = 0.5; then q alone on the full support
    (Correction(importance='none'), [[0.3, 0.2, 0], [0.6, 0.4, 0]]),
    # min(p, q) - min(1, rho) p
    (Correction(importance='truncated', high=1.0, low=0.0), [[0.2, 0.1, 0], [0.5, 0.4, 0]]),
    # p where 0.7 <= p/q <= 1.2; the tail's ratio of 2 is outside, so alpha is 0
    (Correction(importance='masked', low=0.7, high=1.2), [[0.4, 0, 0], [0.5, 0, 0]]),
    # the same with 2 inside: alpha is 1
    (Correction(importance='masked', low=0.7, high=2.5), [[0, -0.2, 0], [0.5, 0.5, 0]]),
  ],
)
def test_coefficients(correction, want):
  got = center_coefficients(
    LOGP,
    LOGQ,
    valid=VALID,
    full=FULL,
    rho=tail(LOGP, LOGQ, VALID).rho,
    correction=correction,
  )
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
