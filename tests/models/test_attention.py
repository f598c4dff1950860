import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.attention import KVCache, attend, write


def attend_numpy(q, k, v, mask):
  """One query at a time, in float64. q [B, T, H, N]; k, v [B, S, Hkv, N]."""
  y = np.zeros(q.shape)
  group = q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(*q.shape[:3]):
    scores = k[b, :, h // group].astype(np.float64) @ q[b, t, h] / np.sqrt(q.shape[-1])
    weights = np.exp(scores[mask[b, t]] - scores[mask[b, t]].max())
    y[b, t, h] = weights / weights.sum() @ v[b, mask[b, t], h // group]
  return y


@pytest.mark.parametrize('heads', [2, 6])
def test_attend_against_float64(heads):
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, 3, heads, 4)).astype(np.float32)
  k, v = rng.standard_normal((2, 2, 5, 2, 4)).astype(np.float32)
  mask = rng.random((2, 3, 5)) < 0.5
  mask[..., 0] = True
  got = jax.jit(attend)(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)
  np.testing.assert_allclose(got, attend_numpy(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_write_puts_each_token_in_its_slot_and_drops_the_rest():
  cache = KVCache(jnp.zeros((2, 3, 2, 4, 5)), jnp.zeros((2, 3, 2, 5, 4)))
  assert cache.length == 5
  keys = jnp.arange(1.0, 3 * 2 * 2 * 4 + 1).reshape(3, 2, 2, 4)
  slots = jnp.array([[0, 1], [3, 4], [4, 5]])
  got = jax.jit(write)(cache, 1, slots, keys, -keys)
  expected = np.zeros((2, 3, 5, 2, 4))
  for row, token in np.ndindex(3, 2):
    if slots[row, token] < 5:
      expected[1, row, slots[row, token]] = keys[row, token]
  np.testing.assert_array_equal(got.keys, expected.transpose(0, 1, 3, 4, 2))
  np.testing.assert_array_equal(got.values, -expected.transpose(0, 1, 3, 2, 4))


def test_write_casts_to_the_dtype_of_the_cache():
  cache = KVCache(
    jnp.zeros((1, 1, 1, 2, 3), jnp.bfloat16), jnp.zeros((1, 1, 1, 3, 2), jnp.bfloat16)
  )
  ones = jnp.full((1, 1, 1, 2), 1.001)
  got = write(cache, 0, jnp.array([[2]]), ones, ones)
  assert got.keys.dtype == got.values.dtype == jnp.bfloat16
  assert got.keys[0, 0, 0, 0, 2] == 1.0
