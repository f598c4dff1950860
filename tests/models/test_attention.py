import jax
import jax.numpy as jnp
import numpy as np

from mimo.models.attention import KVCache, write


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
