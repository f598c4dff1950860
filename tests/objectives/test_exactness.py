"""The loss and its gradient against a float64 enumeration of the vocabulary (conftest.py)."""

import chex
import numpy as np
import pytest

from mimo.objectives import ARMS, arm


@pytest.mark.parametrize('name', ARMS)
def test_gradient_is_the_enumerations(name, rows, evaluate, enumeration, rho_of, tails_of):
  correction = arm(name).correction
  loss, grads, aux = evaluate(rows, correction)
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
