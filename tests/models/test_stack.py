"""How layers of alternating kinds are stacked: what each gets, and what it leaves."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from mimo.models import decoder, moe, stack


def test_routes_reach_their_layers(hybrid, config):
  """Layer l = 2 s + p is at position p of stack entry s; of one kind, the stack is the layers."""
  routes = np.arange(1 * 3 * 4 * 2).reshape(1, 3, 4, 2)  # [B, T, L, k]
  parts = np.asarray(stack._by_stack(hybrid, jnp.asarray(routes)))
  assert parts.shape == (2, 2, 1, 3, 2)
  for layer in range(4):
    np.testing.assert_array_equal(parts[divmod(layer, 2)], routes[:, :, layer])
  plain = dataclasses.replace(config, num_layers=4)
  np.testing.assert_array_equal(
    stack._by_stack(plain, jnp.asarray(routes)), np.moveaxis(routes, 2, 0)
  )
  assert stack._by_stack(hybrid, None) is None
  # And back, from where the layers leave theirs: [s, B, T, k] at each position.
  left = {str(p): {'moe': {'ids': jnp.asarray(parts[:, p])}} for p in range(2)}
  got = stack.by_token(hybrid, {moe.ROUTES: {'layers': left}})
  np.testing.assert_array_equal(got, routes)


def test_cache_has_a_state_for_each_delta_net(hybrid):
  cache = decoder.init_cache(hybrid, 3, 10, jnp.bfloat16)
  assert isinstance(cache, stack.Cache)
  assert cache.kv.keys.shape == (2, 3, 2, 16, 10) and cache.length == 10
  assert cache.delta.tails.shape == (2, 3, 3, 80) and cache.delta.tails.dtype == jnp.bfloat16
  assert cache.delta.states.shape == (2, 3, 4, 8, 12) and cache.delta.states.dtype == jnp.float32


def test_cache_of_attention_alone(config):
  assert decoder.init_cache(config, 1, 4, jnp.float32).delta is None
