import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import layers
from mimo.models.config import RopeConfig

LLAMA3 = (
  ('factor', 8.0),
  ('high_freq_factor', 4.0),
  ('low_freq_factor', 1.0),
  ('original_max_position_embeddings', 8192),
)


def test_rms_norm_against_float64():
  x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
  scale = np.arange(1, 9, dtype=np.float32)
  got = layers.RMSNorm(1e-2, jnp.float32).apply({'params': {'scale': scale}}, x)
  wide = x.astype(np.float64)
  expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-2) * scale
  np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_rms_norm_statistics_are_float32():
  x = jnp.full((1, 4096), 3.0, jnp.bfloat16)
  params = {'scale': jnp.ones(4096)}
  got = layers.RMSNorm(0.0, jnp.bfloat16).apply({'params': params}, x)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got, 1.0)  # a bf16 sum of 4096 squares would stop growing


def test_swiglu_against_float64():
  rng = np.random.default_rng(0)
  x, gate, up = (rng.standard_normal(shape) for shape in ((2, 3, 4), (4, 6), (4, 6)))
  down = rng.standard_normal((6, 4))
  params = {
    'gate_proj': {'kernel': gate.astype(np.float32)},
    'up_proj': {'kernel': up.astype(np.float32)},
    'down_proj': {'kernel': down.astype(np.float32)},
  }
  got = layers.SwiGLU(4, 6, jnp.float32, None).apply({'params': params}, x.astype(np.float32))
  hidden = x @ gate
  expected = (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_projection_contracts_the_trailing_dimensions():
  rng = np.random.default_rng(0)
  x, kernel = rng.standard_normal((2, 5, 3, 4)), rng.standard_normal((3, 4, 6))
  module = layers.Projection((3, 4), (6,), jnp.float32, None)
  got = module.apply({'params': {'kernel': kernel.astype(np.float32)}}, x.astype(np.float32))
  np.testing.assert_allclose(got, np.einsum('bthn,hnd->btd', x, kernel), rtol=1e-5, atol=1e-5)


def test_projection_rounds_its_whole_input_as_one_row():
  """The input of an output projection is all heads: one scale per token, not per head."""
  x = jnp.array([[[448.0, 100.0], [3.3, 0.0]]])
  module = layers.Projection((2, 2), (4,), jnp.float32, 'fp8_token')
  kernel = jnp.eye(4).reshape(2, 2, 4)
  got = module.apply({'params': {'kernel': kernel}}, x)
  np.testing.assert_array_equal(got, [[448.0, 96.0, 3.25, 0.0]])


def test_rope_frequencies_by_hand():
  got = layers.rope_frequencies(RopeConfig(10_000.0), 8)
  np.testing.assert_allclose(got, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)
  linear = layers.rope_frequencies(RopeConfig(10_000.0, 'linear', (('factor', 4.0),)), 8)
  np.testing.assert_allclose(linear, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-6)


def test_llama3_frequencies_by_hand():
  """Over 8192 positions, 1, 0.1 and 0.01 turn more than 4 times and are kept.

  0.001 turns 8.192 / 2 pi = 1.3038 times, between 1 and 4: a share of 0.3038 / 3 = 0.10126 is
  kept and the rest divided by 8. 1e-6 turns less than once and is divided.
  """
  got = layers.rope_frequencies(RopeConfig(1e4, 'llama3', LLAMA3), 8)
  np.testing.assert_allclose(got[:3], [1.0, 0.1, 0.01], rtol=1e-6)
  assert got[3] == pytest.approx(0.001 * (0.89874 / 8 + 0.10126), rel=1e-4)
  slow = layers.rope_frequencies(RopeConfig(1e8, 'llama3', LLAMA3), 8)
  assert slow[3] == pytest.approx(1e-6 / 8, rel=1e-5)


def test_rotation_by_hand():
  """A quarter turn takes (first, second) to (-second, first): pairs are half a head apart."""
  angles = (jnp.zeros((1, 1, 2)), jnp.ones((1, 1, 2)))
  x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
  np.testing.assert_allclose(layers.rotate(x, angles).ravel(), [-3.0, -4.0, 1.0, 2.0])


def test_scores_depend_on_distance_only():
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))

  def score(i, j):
    at = [layers.rope_angles(RopeConfig(1e4), 16, jnp.array([[p]])) for p in (i, j)]
    return jnp.sum(layers.rotate(q, at[0]) * layers.rotate(k, at[1]))

  assert score(9, 4) == pytest.approx(float(score(105, 100)), rel=1e-3)
  assert abs(score(9, 4) - score(9, 5)) > 1e-3
