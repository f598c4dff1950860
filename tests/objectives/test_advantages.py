import numpy as np
import pytest

from mimo.objectives import advantages


def test_group_mean():
  got = advantages(np.array([[1.0, 0, 0, 0], [1, 1, 0, 0]]), 'group_mean')
  assert got.dtype == np.float32
  np.testing.assert_array_equal(got, [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]])


def test_group_mean_std():
  # std of (1, 0, 0, 0) over n is sqrt(3) / 4.
  got = advantages(np.array([[1.0, 0, 0, 0]]), 'group_mean_std')
  np.testing.assert_allclose(got, [[3**0.5, *[-(3**-0.5)] * 3]], rtol=1e-5)


@pytest.mark.parametrize('rule', ['group_mean', 'group_mean_std'])
@pytest.mark.parametrize('reward', [0.0, 1.0, 0.1, 1e-30])
@pytest.mark.parametrize('n', [1, 3, 7])
def test_equal_rewards_give_exact_zeros(rule, reward, n):
  # The float64 mean of seven times 0.1 is not 0.1.
  np.testing.assert_array_equal(advantages(np.full((2, n), reward), rule), np.zeros((2, n)))


def test_one_group():
  np.testing.assert_array_equal(advantages([1.0, 0.0], 'group_mean'), [0.5, -0.5])


def test_groups_of_unequal_sizes():
  got = advantages([[1.0, 0.0], [0.0, 0.0, 3.0]], 'group_mean')
  np.testing.assert_array_equal(got[0], [0.5, -0.5])
  np.testing.assert_array_equal(got[1], [-1.0, -1.0, 2.0])


def test_no_groups():
  assert advantages(np.zeros((0, 4)), 'group_mean').shape == (0, 4)


@pytest.mark.parametrize(
  ('rewards', 'rule', 'message'),
  [
    ([[1.0]], 'mean', "advantage rule is 'mean'; expected one of"),
    ([[1.0, np.nan]], 'group_mean', 'expected finite numbers'),
    ([[1.0], []], 'group_mean', r'expected \[n\] with n >= 1'),
    (np.zeros((1, 1, 1)), 'group_mean', r'expected \[G, n\] or \[n\]'),
  ],
)
def test_refuses(rewards, rule, message):
  with pytest.raises(ValueError, match=message):
    advantages(rewards, rule)
