import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import activations, decoder
from mimo.models.activations import ActivationQuant
from mimo.models.table import leaf, nest, table

# One row holds segments of 5, 4 and 2 tokens and one of padding, as the trainer packs them.
SEGMENTS = np.array([1] * 5 + [2] * 4 + [3] * 2 + [0])
POSITIONS = np.array([*range(5), *range(4), *range(2), 0])

forward = jax.jit(decoder.forward, static_argnums=0, static_argnames=('dtype', 'remat'))
extend = jax.jit(
  decoder.extend,
  static_argnums=0,
  static_argnames=('dtype', 'kv_quant', 'window'),
  donate_argnums=2,
)


def full(config, params, tokens, **kwargs):
  """One segment per row."""
  ones = np.ones(tokens.shape, np.int32)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  return forward(config, params, tokens, ones, positions, **kwargs)


@pytest.fixture(scope='module')
def tokens(config):
  return np.random.default_rng(0).integers(0, config.vocab_size, (3, 12)).astype(np.int32)


@pytest.fixture(scope='module')
def hidden(config, params, tokens):
  return np.asarray(full(config, params, tokens))


def test_init_is_as_stated(config):
  config = dataclasses.replace(config, vocab_size=4096, hidden_size=128)
  params = decoder.init(config, jax.random.key(0))
  assert jax.tree.all(jax.tree.map(lambda x: x.dtype == jnp.float32, params))
  assert np.std(params['embed']['embedding']) == pytest.approx(0.02, rel=0.02)
  assert np.std(params['head']['kernel']) == pytest.approx(0.02, rel=0.02)
  attention = params['layers']['attention']
  assert np.std(attention['q_proj']['kernel']) == pytest.approx(128**-0.5, rel=0.02)
  assert np.std(attention['o_proj']['kernel']) == pytest.approx(64**-0.5, rel=0.02)
  assert np.all(params['layers']['mixer_norm']['scale'] == 1.0)
  # Each layer has a key of its own.
  assert not np.array_equal(*attention['q_proj']['kernel'])


def test_causality_by_gradient(config, params, tokens):
  """The hidden state at one position has no gradient from the tokens after it."""
  one_hot = jax.nn.one_hot(tokens[:1], config.vocab_size)
  table_of_one = jnp.arange(tokens.shape[1])[None]

  def loss(one_hot, t):
    # Row t of the embedding is what token t embeds to.
    embedding = one_hot[0] @ params['embed']['embedding']
    padded = jnp.zeros((config.vocab_size, config.hidden_size)).at[: len(embedding)].set(embedding)
    tied = dict(params) | {'embed': {'embedding': padded}}
    return jnp.sum(full(config, tied, table_of_one)[0, t] ** 2)

  gradient = jax.jit(jax.grad(loss))
  for t in (0, 5, 11):
    size = np.abs(gradient(one_hot, t)[0]).max(axis=-1)
    assert np.all(size[: t + 1] > 0)
    np.testing.assert_array_equal(size[t + 1 :], 0.0)


def packed(config, params, tokens):
  """Each row packed as SEGMENTS says."""
  segments, positions = (np.broadcast_to(x, tokens.shape) for x in (SEGMENTS, POSITIONS))
  return np.asarray(forward(config, params, tokens, segments, positions))


def test_packed_equals_separate(config, params, tokens):
  """Row i of `alone` holds segment i + 1 and padding."""
  alone, present = np.zeros_like(tokens), np.zeros_like(tokens)
  for row, segment in enumerate((1, 2, 3)):
    part = tokens[0, np.equal(SEGMENTS, segment)]
    alone[row, : len(part)], present[row, : len(part)] = part, 1
  positions = np.broadcast_to(np.arange(12), tokens.shape)
  separate = np.asarray(forward(config, params, alone, present, positions))
  together = packed(config, params, tokens)[0]
  expected = np.concatenate([separate[row][present[row] > 0] for row in range(3)])
  np.testing.assert_allclose(together[SEGMENTS > 0], expected, atol=1e-5)


def test_packed_neighbours_do_not_see_each_other(config, params, tokens):
  other = tokens.copy()
  other[:, 5:9] = (other[:, 5:9] + 1) % config.vocab_size
  before, after = packed(config, params, tokens), packed(config, params, other)
  outside = SEGMENTS != 2
  np.testing.assert_array_equal(before[:, outside], after[:, outside])
  assert np.abs(before - after)[:, ~outside].max() > 0.1


def test_padding_gives_zeros(config, params, tokens):
  segments = np.where(np.arange(12) < 7, 1, 0)[None].repeat(3, 0)
  got = forward(config, params, tokens, segments, np.arange(12)[None].repeat(3, 0))
  np.testing.assert_array_equal(got[:, 7:], 0.0)
  np.testing.assert_allclose(got[:, :7], full(config, params, tokens)[:, :7], atol=1e-5)


def test_remat_equals_no_remat(config, params, tokens):
  def loss(params, remat):
    return jnp.sum(full(config, params, tokens, remat=remat) ** 2)

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  gradients = [gradient(params, remat) for remat in (False, True)]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *gradients)
  assert jax.tree.all(jax.tree.map(lambda g: bool(jnp.any(g != 0)), _without_head(gradients[0])))


def _without_head(params):
  return {key: value for key, value in params.items() if key != 'head'}


def test_extend_one_token_at_a_time(config, params, tokens, hidden):
  cache = decoder.init_cache(config, 3, 16, jnp.float32)
  for t in range(12):
    at, one = jnp.full(3, t), jnp.ones(3, jnp.int32)
    got, cache = extend(config, params, cache, tokens[:, t : t + 1], at, one)
    np.testing.assert_allclose(got[:, 0], hidden[:, t], atol=1e-5)


@pytest.mark.parametrize('window', [None, 13])
def test_extend_in_uneven_chunks_with_idle_rows(config, params, tokens, hidden, window):
  """Rows take 0 to 4 tokens a call; what is not counted is junk and changes nothing."""
  cache = decoder.init_cache(config, 3, 16, jnp.float32)
  start = np.zeros(3, np.int32)
  counts = [[4, 0, 1], [0, 3, 4], [4, 4, 0], [1, 2, 4], [3, 3, 3]]
  for count in counts:
    chunk = np.full((3, 4), 7, np.int32)
    for row, n in enumerate(count):
      chunk[row, :n] = tokens[row, start[row] : start[row] + n]
    got, cache = extend(config, params, cache, chunk, start, np.array(count), window=window)
    for row, n in enumerate(count):
      expected = hidden[row, start[row] : start[row] + n]
      np.testing.assert_allclose(got[row, :n], expected, atol=1e-5)
      np.testing.assert_array_equal(got[row, n:], 0.0)
    start += np.array(count, np.int32)
  assert start.tolist() == [12, 12, 12]


def test_extend_writes_only_what_is_counted(config, params, tokens):
  cache = jax.tree.map(lambda x: x + 5, decoder.init_cache(config, 3, 8, jnp.float32))
  count = np.array([2, 0, 3])
  _, cache = extend(config, params, cache, tokens[:, :3], np.array([1, 2, 6]), count)
  written = np.any(np.asarray(cache.kv.values) != 5, axis=(2, 4))  # [L, B, S]
  expected = np.zeros((3, 8), bool)
  expected[0, 1:3] = expected[2, 6:8] = True  # the last token of row 2 is beyond the end
  np.testing.assert_array_equal(written, np.broadcast_to(expected, written.shape))
  np.testing.assert_array_equal(written, np.any(np.asarray(cache.kv.keys) != 5, axis=(2, 3)))


def test_a_row_can_be_used_again(config, params, tokens, hidden):
  """What an earlier sequence left beyond the start of a new one is never seen."""
  cache = decoder.init_cache(config, 3, 16, jnp.float32)
  zero, all_of_it = np.zeros(3, np.int32), np.full(3, 12)
  _, cache = extend(config, params, cache, tokens[::-1].copy(), zero, all_of_it)
  got, _ = extend(config, params, cache, tokens, zero, all_of_it)
  np.testing.assert_allclose(got, hidden, atol=1e-5)


def test_cached_keys_and_values_are_rounded(config, params, tokens):
  caches = {}
  for kv_quant in (None, 'bf16', 'fp8'):
    cache = decoder.init_cache(config, 3, 12, jnp.float32)
    zero, all_of_it = np.zeros(3, np.int32), np.full(3, 12)
    got, cache = extend(config, params, cache, tokens, zero, all_of_it, kv_quant=kv_quant)
    caches[kv_quant] = got, jax.tree.map(np.asarray, cache.kv)
  for kv_quant, rounded in (('bf16', activations.bf16), ('fp8', activations.fp8_static)):
    (exact, plain), (got, cache) = caches[None], caches[kv_quant]
    # Later layers differ: their inputs have seen the rounding.
    for name in ('keys', 'values'):
      np.testing.assert_array_equal(
        getattr(cache, name)[0], rounded(jnp.asarray(getattr(plain, name)[0]))
      )
      np.testing.assert_array_equal(
        getattr(cache, name), rounded(jnp.asarray(getattr(cache, name)))
      )
    error = np.abs(got - exact).mean() / np.abs(exact).mean()
    assert 1e-4 < error < 0.1


def test_activation_quant_reaches_every_projection(config, params, tokens, hidden):
  """Each projection's rounding moves the result by itself."""
  fp8 = full(config, params, tokens, activation_quant=ActivationQuant('fp8_token'))
  assert 1e-3 < np.abs(fp8 - hidden).mean() / np.abs(hidden).mean() < 0.3
  coarse, fine = jnp.full(2, 0.02), jnp.full(2, 300.0)
  paths = [row.path for row in table(config) if row.quantisable]
  assert len(paths) == 7
  base = dict.fromkeys(paths, fine)
  results = [
    np.asarray(full(config, params, tokens, activation_quant=ActivationQuant('nvfp4', scales)))
    for scales in (base, *(base | {path: coarse} for path in paths))
  ]
  assert len({x.tobytes() for x in results}) == len(results)


def test_nvfp4_scales_are_of_their_layer(config, params, tokens):
  paths = [row.path for row in table(config) if row.quantisable]
  rng = np.random.default_rng(0)
  scales = {path: jnp.asarray(rng.uniform(50, 500, 2), jnp.float32) for path in paths}
  one = {path: scale[1:] for path, scale in scales.items()}
  swapped = {path: scale[::-1] for path, scale in scales.items()}
  got, same, other = (
    full(config, params, tokens, activation_quant=ActivationQuant('nvfp4', s))
    for s in (scales, dict(scales), swapped)
  )
  np.testing.assert_array_equal(got, same)
  assert np.abs(got - other).max() > 0
  # A model of layer 1 alone takes layer 1's scales.
  single = dataclasses.replace(config, num_layers=1)
  last = dict(params) | {'layers': jax.tree.map(lambda x: x[1:], params['layers'])}
  alone = full(single, last, tokens, activation_quant=ActivationQuant('nvfp4', one))
  both = dict(params) | {
    'layers': jax.tree.map(lambda x: x.at[0].set(0.0), params['layers'])
  }  # layer 0 adds nothing
  np.testing.assert_allclose(
    full(config, both, tokens, activation_quant=ActivationQuant('nvfp4', scales)), alone, atol=1e-5
  )


def test_extend_rounds_activations_as_forward_does(config, params, tokens):
  quant = ActivationQuant('fp8_token')
  cache = decoder.init_cache(config, 3, 12, jnp.float32)
  zero, all_of_it = np.zeros(3, np.int32), np.full(3, 12)
  got, _ = extend(config, params, cache, tokens, zero, all_of_it, activation_quant=quant)
  expected = full(config, params, tokens, activation_quant=quant)
  # A last-bit difference can fall on the other side of a rounding boundary now and then.
  assert np.mean(np.abs(got - expected) > 1e-4) < 0.05


def test_input_amax(config, params, tokens):
  """The first layer's queries, keys and values read the normalised embedding."""
  segments = np.where(np.arange(12) < 7, 1, 0)[None].repeat(3, 0)
  positions = np.arange(12)[None].repeat(3, 0)
  amax = jax.jit(decoder.input_amax, static_argnums=0)(config, params, tokens, segments, positions)
  assert set(amax) == {row.path for row in table(config) if row.quantisable}
  assert all(x.shape == (2,) and np.all(x > 0) for x in amax.values())
  x = np.asarray(params['embed']['embedding'], np.float64)[tokens[:, :7]]
  x /= np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
  x *= params['layers']['mixer_norm']['scale'][0]
  for name in ('q_proj', 'k_proj', 'v_proj'):
    got = amax['layers', 'attention', name, 'kernel'][0]
    assert got == pytest.approx(np.abs(x).max(), rel=1e-5)


def test_bf16_computation(config, params, tokens, hidden):
  got = full(config, params, tokens, dtype=jnp.bfloat16)
  assert got.dtype == jnp.bfloat16
  error = np.abs(got.astype(np.float32) - hidden).mean() / np.abs(hidden).mean()
  assert 1e-4 < error < 0.05


def test_head_matrix(config, params):
  assert decoder.head_matrix(config, params) is params['head']['kernel']
  tied = dataclasses.replace(config, tie_embeddings=True)
  np.testing.assert_array_equal(decoder.head_matrix(tied, params), params['embed']['embedding'].T)


def test_unknown_kv_quant(config, params, tokens):
  cache = decoder.init_cache(config, 3, 12, jnp.float32)
  with pytest.raises(ValueError, match="kv_quant is 'int8'; expected one of"):
    decoder.extend(config, params, cache, tokens, tokens[:, 0], tokens[:, 0], kv_quant='int8')


def test_unknown_activation_quant(config, params, tokens):
  with pytest.raises(ValueError, match="activation quantisation is 'int8'"):
    decoder.forward(
      config, params, tokens, tokens, tokens, activation_quant=ActivationQuant('int8')
    )


def test_sharded_equals_unsharded(config, params, tokens):
  """Loss and gradients over 8 devices, parameters and batch sharded."""
  mesh = jax.make_mesh(
    (2, 2, 2), ('data', 'fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 3
  )
  rules = {
    'vocab': ('fsdp', 'tensor'), 'embed': 'fsdp', 'heads': 'tensor', 'kv_heads': 'tensor',
    'mlp': 'tensor', None: None,
  }  # fmt: skip
  shardings = nest(
    {
      row.path: jax.NamedSharding(mesh, jax.P(*(rules[axis] for axis in row.leaf_axes)))
      for row in table(config)
    }
  )
  rows = jax.NamedSharding(mesh, jax.P(('data', 'fsdp')))
  batch = np.concatenate([tokens, tokens[:1]])
  segments, positions = (np.broadcast_to(x, (4, 12)) for x in (SEGMENTS, POSITIONS))

  def loss(params, tokens, segments, positions):
    hidden = decoder.forward(config, params, tokens, segments, positions, remat=True)
    return jnp.mean(jax.nn.logsumexp(hidden @ decoder.head_matrix(config, params), axis=-1))

  expected = jax.jit(jax.value_and_grad(loss))(params, batch, segments, positions)
  step = jax.jit(
    jax.value_and_grad(loss),
    in_shardings=(shardings, rows, rows, rows),
    out_shardings=(jax.NamedSharding(mesh, jax.P()), shardings),
  )
  got = step(jax.device_put(params, shardings), batch, segments, positions)
  q_proj = got[1]['layers']['attention']['q_proj']['kernel']
  assert q_proj.addressable_shards[0].data.size * 4 == q_proj.size
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, expected)


def test_one_trace_per_shape(config, params, tokens):
  """New scales, positions and parameters compile nothing."""
  traces = []

  def run(params, quant, tokens):
    traces.append(1)
    ones = jnp.ones_like(tokens)
    return decoder.forward(config, params, tokens, ones, ones, activation_quant=quant)

  run = jax.jit(run)
  paths = [row.path for row in table(config) if row.quantisable]
  for scale in (100.0, 200.0):
    run(params, ActivationQuant('nvfp4', dict.fromkeys(paths, jnp.full(2, scale))), tokens)
  assert len(traces) == 1
  assert leaf(params, paths[0]).shape[0] == 2
