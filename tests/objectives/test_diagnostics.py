import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.objectives import Correction, merge_aux, summarise, total_aux
from mimo.objectives.centering import Tail
from mimo.objectives.diagnostics import accumulate, per_token

LOG_RATIO = np.log([0.25, 1.0, 2.0, 8.0, 1.0])
MASK = np.array([True, True, True, True, False])
MASKED = Correction(importance='masked', low=0.5, high=5.0, replay=True)


def _values(correction, log_ratio=LOG_RATIO):
  tail = Tail(
    head_sampler=jnp.array([0.9, 1.0, 0.8, 0.7, 0.1]),
    head_trainer=jnp.array([0.8, 0.6, 0.9, 0.7, 0.1]),
    rho=jnp.array([0.5, 9.0, 2.0, 1.0, 77.0]),
    floored=jnp.array([False, True, True, False, True]),
  )
  full = jnp.array([False, True, False, False, False])
  log_ratio = jnp.asarray(log_ratio, jnp.float32)
  return per_token(log_ratio, jnp.array([0, 1, 2.0, 0, 1]), tail, full, correction)


def test_sums_by_hand():
  got = jax.jit(accumulate)(_values(MASKED), MASK)
  d = np.log([0.25, 1.0, 2.0, 8.0])
  want = {
    'tokens': 4,
    'log_ratio_sum': d.sum(),
    'kl_sum': (np.exp(d) - 1 - d).sum(),
    'ratio_sum': 11.25,
    'ratio_sq_sum': 0.0625 + 1 + 4 + 64,
    'weight_sum': 3,
    'masked_low': 1,
    'masked_high': 1,
    'truncated': 0,
    'cut_tokens': 3,
    'head_sampler_sum': 3.4,
    'head_trainer_sum': 3.0,
    'head_tokens': 3,
    'rho_sum': 3.5,
    'rho_max': 2.0,
    'rho_floored': 1,
  }
  assert got.keys() == want.keys()
  for name, value in want.items():
    assert got[name].dtype == jnp.float32 and got[name].shape == ()
    np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


def test_counts_follow_the_importance():
  truncated = accumulate(_values(Correction(importance='truncated')), MASK)
  assert (truncated['truncated'], truncated['masked_high'], truncated['cut_tokens']) == (1, 0, 0)
  none = accumulate(_values(Correction(importance='none')), MASK)
  assert (none['truncated'], none['masked_low'], none['masked_high']) == (0, 0, 0)


def test_far_ratios_are_clipped_here_only():
  got = accumulate(_values(MASKED, np.array([-100.0, 100, 0, 0, 0])), MASK)
  assert all(np.isfinite(leaf) for leaf in got.values())
  np.testing.assert_allclose(got['log_ratio_sum'], 0, atol=1e-5)
  np.testing.assert_allclose(got['ratio_sum'], np.exp(20.0) + 2, rtol=1e-6)
  assert (got['masked_low'], got['masked_high']) == (1, 1)


def test_per_source():
  source = np.array([0, 2, 0, 2, -7])
  got = accumulate(_values(MASKED), MASK, source, 4)
  np.testing.assert_array_equal(got['tokens'], [2, 0, 2, 0])
  np.testing.assert_allclose(got['ratio_sum'], [2.25, 0, 9, 0])
  np.testing.assert_allclose(got['rho_max'], [2, 0, 1, 0])
  whole = accumulate(_values(MASKED), MASK)
  for name, leaf in total_aux(got).items():
    np.testing.assert_allclose(leaf, whole[name], rtol=1e-6, err_msg=name)


def test_merge_adds_sums_and_takes_the_larger_maximum():
  first = accumulate(_values(MASKED), MASK & (np.arange(5) < 2))
  second = accumulate(_values(MASKED), MASK & (np.arange(5) >= 2))
  whole = accumulate(_values(MASKED), MASK)
  for name, leaf in merge_aux(first, second).items():
    np.testing.assert_allclose(leaf, whole[name], rtol=1e-6, err_msg=name)


def test_summary_by_hand():
  got = summarise(accumulate(_values(MASKED), MASK))
  want = {
    'tokens': 4,
    'ratio': 11.25 / 4,
    'effective_sample': 11.25**2 / (4 * 69.0625),
    'weight': 0.75,
    'masked_low': 0.25,
    'cut': 0.75,
    'cut_tokens': 3,
    'head_share': 0.75,
    'head_sampler': 0.85,
    'rho': 3.5 / 3,
    'rho_max': 2,
    'rho_floored': 1 / 3,
  }
  for name, value in want.items():
    np.testing.assert_allclose(got[name], value, rtol=1e-6, err_msg=name)


def test_summary_of_nothing_is_zero():
  got = summarise(accumulate(_values(MASKED), np.zeros(5, bool)))
  assert all(value == 0 for value in got.values())


def test_refuses():
  values = _values(MASKED)
  with pytest.raises(ValueError, match='one of source and num_sources'):
    accumulate(values, MASK, num_sources=2)
  with pytest.raises(ValueError, match='num_sources is 0'):
    accumulate(values, MASK, np.zeros(5, int), 0)
  with pytest.raises(ValueError, match='aux leaves differ'):
    merge_aux(values, {'tokens': values['tokens']})
