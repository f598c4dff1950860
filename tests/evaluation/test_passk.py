import itertools
import math

import numpy as np
import pytest

from mimo.evaluation import passk


def test_hand_computed_values():
  # n = 4: C(4, 2) = 6 pairs; with c = 1 three of them hold no success, with c = 2 one.
  got = passk.pass_at_k(np.array([0, 1, 2, 3, 4]), 4, 2)
  np.testing.assert_allclose(got, [0, 1 / 2, 5 / 6, 1, 1], rtol=1e-15)
  np.testing.assert_allclose(passk.pass_at_k(np.array([0, 3, 8]), 8, 1), [0, 3 / 8, 1], rtol=1e-15)
  np.testing.assert_allclose(passk.pass_at_k(np.array([0, 1, 8]), 8, 8), [0, 1, 1], rtol=1e-15)


def test_equals_enumeration_of_all_subsets():
  for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
    if c > n or k > n:
      continue
    subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
    want = sum(any(subset) for subset in subsets) / len(subsets)
    np.testing.assert_allclose(passk.pass_at_k(np.array([c]), n, k), [want], rtol=1e-14)


def test_binomial_formula_at_many_samples():
  want = 1 - math.comb(190, 100) / math.comb(200, 100)
  np.testing.assert_allclose(passk.pass_at_k(np.array([10]), 200, 100), [want], rtol=1e-12)


def test_unbiased():
  # Sum over all outcomes of n draws at p: the estimate's expectation is 1 - (1 - p)^k.
  n, k, p = 5, 3, 0.3
  chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
  values = passk.pass_at_k(np.arange(n + 1), n, k)
  np.testing.assert_allclose(np.dot(chance, values), 1 - (1 - p) ** k, rtol=1e-14)


def test_estimate_and_its_error_over_tasks():
  got = passk.estimate(np.array([0, 2, 4, 4]), 4, 1)
  # values 0, .5, 1, 1: mean .625; squared deviations sum to .6875; var = .6875 / 3.
  assert got.mean == pytest.approx(0.625, rel=1e-15)
  assert got.error == pytest.approx(math.sqrt(0.6875 / 3 / 4), rel=1e-14)
  assert got.tasks == 4
  assert math.isnan(passk.estimate(np.array([1]), 2, 1).error)


def test_count_successes_refuses_missing_samples():
  np.testing.assert_array_equal(passk.count_successes(np.array([[1, 0], [1, 1.0]])), [1, 2])
  np.testing.assert_array_equal(passk.count_successes(np.array([[0.5, 0.99]])), [0])
  with pytest.raises(ValueError, match='1 of 4 samples are missing, the first at task 1, sample 0'):
    passk.count_successes(np.array([[1, 0], [np.nan, 1]]))
  with pytest.raises(ValueError, match=r'expected \[tasks, samples\]'):
    passk.count_successes(np.zeros((0, 4)))


def test_refusals():
  with pytest.raises(ValueError, match='k is 3; expected 1 to 2'):
    passk.pass_at_k(np.array([1]), 2, 3)
  with pytest.raises(ValueError, match='k is 0'):
    passk.pass_at_k(np.array([1]), 2, 0)
  with pytest.raises(ValueError, match=r'successes range over \[0, 3\]'):
    passk.pass_at_k(np.array([0, 3]), 2, 1)
  with pytest.raises(ValueError, match='no tasks'):
    passk.estimate(np.zeros(0, np.int64), 2, 1)
