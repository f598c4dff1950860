"""Delta nets in the decoder: whole rows, packed rows, and state from call to call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import decoder, layers
from mimo.models.activations import ActivationQuant
from mimo.models.table import leaf, table

LENGTH = 24
# A row of two segments and padding between, and a row padded on the left.
SEGMENTS = np.array([[1] * 9 + [0] * 2 + [2] * 13, [0] * 5 + [1] * 19], np.int32)
POSITIONS = np.array([[*range(9), 0, 0, *range(13)], [0] * 5 + [*range(19)]], np.int32)

forward = jax.jit(decoder.forward, static_argnums=0)
extend = jax.jit(decoder.extend, static_argnums=0)


@pytest.fixture(scope='module')
def tokens():
  return np.random.default_rng(0).integers(0, 48, (2, LENGTH)).astype(np.int32)


@pytest.fixture(scope='module')
def whole(hybrid, hybrid_params, tokens):
  """Hidden states of each row of tokens as one sequence."""
  ones = np.ones_like(tokens)
  positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
  return np.asarray(forward(hybrid, hybrid_params, tokens, ones, positions))


def close(got, expected):
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_packing_and_padding(hybrid, hybrid_params, tokens, whole):
  """Each segment gives what its tokens give alone, and padding nothing."""
  packed = tokens.copy()
  packed[0, 11:] = tokens[1, :13]
  packed[1, 5:] = tokens[0, :19]
  got = np.asarray(forward(hybrid, hybrid_params, packed, SEGMENTS, POSITIONS))
  close(got[0, :9], whole[0, :9])
  close(got[0, 11:], whole[1, :13])
  close(got[1, 5:], whole[0, :19])
  assert np.all(got[SEGMENTS == 0] == 0)


def test_gradients_of_a_packed_segment(hybrid, hybrid_params, tokens):
  """None from its neighbour, some for every parameter."""

  def loss(hidden):
    return jnp.sum(hidden[0, 11:] * jnp.cos(jnp.arange(hidden[0, 11:].size)).reshape(13, -1))

  # Distinct tokens: the embedding's gradient says whose state reached the second segment.
  tokens = np.stack([np.random.default_rng(1).permutation(48)[:LENGTH]] * 2).astype(np.int32)
  args = (tokens, SEGMENTS, POSITIONS)
  run = functools.partial(decoder.forward, hybrid, remat=True)
  grads = jax.jit(jax.grad(lambda params: loss(run(params, *args))))(hybrid_params)
  moved = np.asarray(grads['embed']['embedding'])
  assert np.all(moved[tokens[0, :9]] == 0)
  assert np.all(np.abs(moved[tokens[0, 11:]]).sum(axis=1) > 0)
  for row in table(hybrid):
    if row.path[0] != 'head':
      assert np.abs(leaf(grads, row.path)).max() > 0, row.hf_name


@pytest.fixture(scope='module')
def stepped(hybrid, hybrid_params):
  """Runs rows through a cache: (tokens, counts of each chunk [n, B]) -> (hidden, cache)."""

  def run(tokens, chunks, size, cache=None):
    if cache is None:
      cache = decoder.init_cache(hybrid, len(tokens), LENGTH, jnp.float32)
    done = np.zeros(len(tokens), np.int32)
    hidden = np.zeros((*tokens.shape, hybrid.hidden_size), np.float32)
    for counts in chunks:
      counts = np.asarray(counts, np.int32)
      width = 1 if counts.max() == 1 else size
      at = np.minimum(done[:, None] + np.arange(width), LENGTH - 1)
      fed = np.take_along_axis(tokens, at, axis=1)
      fed[np.arange(width) >= counts[:, None]] = 7  # what is not counted must not matter
      out, cache = extend(hybrid, hybrid_params, cache, fed, done, counts)
      for row, count in enumerate(counts):
        hidden[row, done[row] : done[row] + count] = out[row, :count]
        assert np.all(np.asarray(out)[row, count:] == 0)
      done += counts
    return hidden, cache

  return run


CHUNKS = ([5, 2], [0, 5], [5, 3], [1, 0], [1, 1], [0, 1], [1, 1], [5, 4])


def test_cached_equals_whole(tokens, whole, stepped):
  """Chunks and single tokens, rows at different lengths, and rows that idle."""
  hidden, _ = stepped(tokens, CHUNKS, 5)
  for row, count in enumerate(np.sum(CHUNKS, axis=0)):
    close(hidden[row, :count], whole[row, :count])


def test_a_row_begun_anew_forgets(tokens, whole, stepped):
  """Row 0 starts from 0 on a cache that others filled, row 1 of count 0 keeps it bit for bit."""
  _, cache = stepped(tokens[::-1], CHUNKS, 5)
  kept = jax.tree.map(lambda x: np.asarray(x[:, 1]), cache)
  hidden, cache = stepped(tokens, ([5, 0], [1, 0], [5, 0]), 5, cache)
  close(hidden[0, :11], whole[0, :11])
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:, 1], y), cache, kept)


def test_routes_replayed(hybrid, hybrid_params, tokens):
  """A model's own routes change nothing; others do; -1 leaves the choice to the router."""
  args = (hybrid, hybrid_params, tokens, SEGMENTS, POSITIONS)
  own = np.asarray(jax.jit(decoder.chosen_experts, static_argnums=0)(*args))
  assert own.shape == (2, LENGTH, 4, 2)
  assert np.all((own >= 0) == (SEGMENTS > 0)[..., None, None])
  run = jax.jit(functools.partial(decoder.forward, hybrid))
  expected = forward(*args)
  close(run(*args[1:], routes=own), expected)
  given = np.where(np.arange(4)[:, None] == 2, own, -1)
  close(run(*args[1:], routes=given), expected)
  other = own.copy()
  other[:, 7:, 2] = (own[:, 7:, 2] + 1) % 6
  got = np.asarray(run(*args[1:], routes=other))
  close(got[:, :7], expected[:, :7])
  assert np.abs(got[:, 12:] - expected[:, 12:]).max() > 0.01


def test_routes_of_another_shape(config, params, hybrid, hybrid_params, tokens):
  wrong = np.zeros((2, LENGTH, 3, 2), np.int32)
  with pytest.raises(ValueError, match=r'routes are \[2, 24, 3, 2\]; expected \[2, 24, 4, 2\]'):
    decoder.forward(hybrid, hybrid_params, tokens, SEGMENTS, POSITIONS, routes=wrong)
  with pytest.raises(ValueError, match='of a model with experts'):
    decoder.forward(config, params, tokens, SEGMENTS, POSITIONS, routes=wrong)
  with pytest.raises(ValueError, match="family 'qwen3' has no experts"):
    decoder.chosen_experts(config, params, tokens, SEGMENTS, POSITIONS)


def test_every_quantised_projection_is_measured_and_rounded(hybrid, hybrid_params, tokens):
  """amax of the first delta net's input by hand; scales of one projection reach its layer alone."""
  measure = jax.jit(functools.partial(decoder.input_amax, hybrid))
  amax = measure(hybrid_params, tokens, SEGMENTS, POSITIONS)
  rows = [row for row in table(hybrid) if row.quantisable]
  for row in rows:
    assert amax[row.path].shape == row.lead_shape
  x = np.asarray(hybrid_params['embed']['embedding'], np.float64)[tokens[SEGMENTS > 0]]
  norm = np.asarray(hybrid_params['layers']['0']['mixer_norm']['scale'][0], np.float64)
  x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * (1 + norm)
  path = ('layers', '0', 'delta', 'in_proj_qkv', 'kernel')
  assert amax[path][0] == pytest.approx(np.abs(x).max(), rel=1e-4)

  run = jax.jit(functools.partial(decoder.forward, hybrid))
  args = (hybrid_params, tokens, SEGMENTS, POSITIONS)
  exact = np.asarray(forward(hybrid, *args))
  scales = {row.path: 448 * 6 / jnp.maximum(amax[row.path], 1e-3) for row in rows}
  rounded = np.asarray(run(*args, activation_quant=ActivationQuant('nvfp4', scales)))
  error = np.abs(rounded - exact).mean() / np.abs(exact).mean()
  assert 0.01 < error < 2.0  # routes differ too
  # Layer 3 is the second at its position: its experts' scales are its own.
  path = ('layers', '1', 'moe', 'experts', 'down_proj', 'kernel')
  changed = scales | {path: scales[path].at[1].mul(1e-3)}
  again = np.asarray(run(*args, activation_quant=ActivationQuant('nvfp4', changed)))
  assert 0 < np.abs(again - rounded).mean() < np.abs(rounded).mean()


def test_norms_scale_by_one_plus_weight(hybrid, hybrid_params):
  fresh = jax.eval_shape(functools.partial(decoder.init, hybrid), jax.random.key(0))
  assert jax.tree.structure(fresh) == jax.tree.structure(hybrid_params)
  norm = layers.RMSNorm(1e-6, jnp.float32, centred=True)
  x = jnp.array([[3.0, 4.0]])
  y = norm.apply({'params': {'scale': jnp.array([0.5, -1.0])}}, x)
  np.testing.assert_allclose(y, [[1.5 * 3 / np.sqrt(12.5), 0.0]], rtol=1e-6)


def test_partial_rotation_leaves_the_rest(hybrid):
  angles = layers.rope_angles(hybrid.rope, hybrid.rotary_dim, jnp.array([[5]]))
  x = jnp.arange(16.0).reshape(1, 1, 1, 16)
  y = np.asarray(layers.rotate(x, angles))[0, 0, 0]
  # 4 of 16 dimensions rotate: pairs (0, 2) by 5 and (1, 3) by 5 / sqrt(theta).
  np.testing.assert_array_equal(y[4:], np.arange(4, 16))
  for (i, j), angle in (((0, 2), 5.0), ((1, 3), 0.05)):
    turned = (i * np.cos(angle) - j * np.sin(angle), j * np.cos(angle) + i * np.sin(angle))
    np.testing.assert_allclose((y[i], y[j]), turned, rtol=1e-5)
