import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mimo.objectives import candidate_logps

N, D, V, K, CHUNK = 44, 12, 60, 5, 8
TEMPERATURE = 0.7


@pytest.fixture(scope='module')
def inputs():
  rng = np.random.default_rng(0)
  ids = rng.integers(-1, V, (N, 1 + K)).astype(np.int32)
  ids[:, 1] = ids[:, 0]  # the sampled token is a candidate as well
  ids[3] = -1
  return {
    'hidden': rng.normal(size=(N, D)).astype(np.float32),
    'head': rng.normal(size=(D, V)).astype(np.float32),
    'ids': ids,
    'dlogps': rng.normal(size=(N, 1 + K)).astype(np.float32),
    'dentropy': rng.normal(size=N).astype(np.float32),
  }


def _weighted(hidden, head, ids, dlogps, dentropy, *, chunk=CHUNK):
  logps, entropy = candidate_logps(hidden, head, ids, temperature=TEMPERATURE, chunk=chunk)
  return jnp.sum(logps * dlogps) + jnp.sum(entropy * dentropy), (logps, entropy)


@functools.partial(jax.jit, static_argnames='chunk')
def _grads(*args, chunk=CHUNK):
  grad = jax.value_and_grad(_weighted, argnums=(0, 1), has_aux=True)
  (_, outputs), grads = grad(*args, chunk=chunk)
  return outputs, grads


def _dense(hidden, head, ids, dlogps, dentropy):
  """The same in float64 numpy: outputs, then gradients by the chain rule."""
  hidden, head, dlogps, dentropy = (np.float64(x) for x in (hidden, head, dlogps, dentropy))
  z = hidden @ head / TEMPERATURE
  z -= z.max(-1, keepdims=True)
  logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
  p = np.exp(logp)
  entropy = -(p * logp).sum(-1)
  logps = np.where(ids >= 0, np.take_along_axis(logp, ids, -1), 0.0)
  dz = -dentropy[:, None] * p * (logp + entropy[:, None])
  for n, k in np.argwhere(ids >= 0):
    dz[n] -= dlogps[n, k] * p[n]
    dz[n, ids[n, k]] += dlogps[n, k]
  dz /= TEMPERATURE
  return (logps, entropy), (dz @ head.T, hidden.T @ dz)


@pytest.mark.parametrize('chunk', [1, 7, 8, 1000])
def test_is_the_dense_version(chunk, inputs):
  want = _dense(*inputs.values())
  got = _grads(*inputs.values(), chunk=chunk)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-5), got, want)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(got))


def test_ids_of_minus_one_give_zero_and_no_gradient(inputs):
  (logps, _), _ = _grads(*inputs.values())
  np.testing.assert_array_equal(logps[inputs['ids'] < 0], 0)
  garbage = np.where(inputs['ids'] < 0, np.nan, inputs['dlogps'])
  got = _grads(*{**inputs, 'dlogps': garbage}.values())[1]
  jax.tree.map(np.testing.assert_array_equal, got, _grads(*inputs.values())[1])
  nothing = {**inputs, 'dentropy': np.zeros(N, np.float32)}
  np.testing.assert_array_equal(_grads(*nothing.values())[1][0][3], 0)


def test_logits_far_apart(inputs):
  far = {**inputs, 'hidden': inputs['hidden'] * 100}
  want = _dense(*far.values())
  got = _grads(*far.values())
  np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-5, atol=1e-3)
  np.testing.assert_allclose(got[0][1], want[0][1], atol=1e-3)
  # Logits reach hundreds, where neighbours in float32 are 3e-5 apart.
  assert (np.asarray(got[0][1]) >= -1e-4).all()
  jax.tree.map(lambda g: np.testing.assert_(np.isfinite(g).all()), got)


def test_bfloat16_operands(inputs):
  """Products of bfloat16 are exact in float32, so only the gradients are rounded."""
  low = {name: jnp.asarray(inputs[name], jnp.bfloat16) for name in ('hidden', 'head')}
  args = {**inputs, **low}
  rounded = {name: np.asarray(x, np.float32) for name, x in args.items() if name in low}
  want = _dense(*{**inputs, **rounded}.values())
  (logps, entropy), grads = _grads(*args.values())
  np.testing.assert_allclose(logps, want[0][0], atol=2e-5)
  np.testing.assert_allclose(entropy, want[0][1], atol=2e-5)
  for got, exact in zip(grads, want[1], strict=True):
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.asarray(got, np.float64) - exact)
    assert error < 5e-3 * np.linalg.norm(exact)


def test_uniform_entropy_by_hand():
  logps, entropy = candidate_logps(
    jnp.zeros((2, D)), jnp.ones((D, V)), jnp.array([[0], [-1]]), temperature=1.0, chunk=1
  )
  np.testing.assert_allclose(entropy, np.log(V), rtol=1e-6)
  np.testing.assert_allclose(logps, [[-np.log(V)], [0]], rtol=1e-6)


def test_an_id_outside_the_vocabulary_is_loud(inputs):
  ids = np.where(inputs['ids'] == inputs['ids'].max(), V, inputs['ids'])
  (logps, _), _ = _grads(*{**inputs, 'ids': ids}.values())
  np.testing.assert_array_equal(np.isnan(logps), ids == V)


def test_no_tokens():
  logps, entropy = candidate_logps(
    jnp.zeros((0, D)), jnp.ones((D, V)), jnp.zeros((0, 3), int), temperature=1.0, chunk=4
  )
  assert (logps.shape, entropy.shape) == ((0, 3), (0,))


def _sizes(jaxpr):
  for eqn in jaxpr.eqns:
    for var in (*eqn.invars, *eqn.outvars):
      yield getattr(var.aval, 'size', 0)
    for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
      inner = getattr(param, 'jaxpr', param)
      if hasattr(inner, 'eqns'):
        yield from _sizes(inner)


def _compiled_sizes(text):
  for dims in re.findall(r'\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]', text):
    yield int(np.prod([int(dim) for dim in dims.split(',')]))


def test_nothing_is_as_large_as_the_logits():
  """Neither in the jaxpr nor in the compiled program, forward or backward."""
  n, d, v, k, chunk = 256, 16, 512, 6, 16
  shapes = ((n, d), (d, v), (n, 1 + k), (n, 1 + k), (n,))
  dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.float32)
  args = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True)]
  traced = _grads.trace(*args, chunk=chunk)
  largest = max(d * v, chunk * v, n * d, n * (1 + k))
  assert max(_sizes(traced.jaxpr.jaxpr)) == largest
  compiled = traced.lower().compile()
  sizes = list(_compiled_sizes(compiled.as_text()))
  assert max(sizes) == largest < n * v / 8
  dense = jax.jit(jax.grad(_dense_loss, argnums=(0, 1))).lower(*args).compile()
  assert max(_compiled_sizes(dense.as_text())) >= n * v  # the search does find it
  temporary = compiled.memory_analysis().temp_size_in_bytes
  assert temporary <= dense.memory_analysis().temp_size_in_bytes / 8


def _dense_loss(hidden, head, ids, dlogps, dentropy):
  logp = jax.nn.log_softmax(hidden @ head / TEMPERATURE)
  picked = jnp.take_along_axis(logp, ids, -1)
  return jnp.sum(picked * dlogps) - jnp.sum(jnp.sum(jnp.exp(logp) * logp, -1) * dentropy)


TOKENS = PartitionSpec(('data', 'fsdp'))


@pytest.mark.parametrize(
  ('shape', 'head_spec'),
  [
    ((1, 1, 8), (None, 'tensor')),
    ((2, 2, 2), (None, 'tensor')),
    ((2, 2, 2), ('fsdp', 'tensor')),
    ((1, 4, 2), ('fsdp', None)),
  ],
)
def test_any_mesh(shape, head_spec):
  """The same numbers, and no collective carries a chunk's logits."""
  rng = np.random.default_rng(1)
  n, d, v, k, chunk = 128, 16, 256, 5, 32
  ids = rng.integers(-1, v, (n, 1 + k)).astype(np.int32)
  args = (
    rng.normal(size=(n, d)).astype(np.float32),
    rng.normal(size=(d, v)).astype(np.float32),
    ids,
    rng.normal(size=ids.shape).astype(np.float32),
    rng.normal(size=n).astype(np.float32),
  )
  mesh = jax.make_mesh(shape, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
  specs = (TOKENS, PartitionSpec(*head_spec), TOKENS, TOKENS, TOKENS)
  placed = [
    jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)
  ]
  compiled = _grads.lower(*placed, chunk=chunk).compile()
  (logps, entropy), grads = compiled(*placed)
  want = _dense(*args)
  np.testing.assert_allclose(logps, want[0][0], atol=2e-5)
  np.testing.assert_allclose(entropy, want[0][1], atol=2e-5)
  for got, exact in zip(grads, want[1], strict=True):
    assert np.linalg.norm(np.float64(got) - exact) <= 1e-5 * np.linalg.norm(exact)
  if head_spec[1]:
    collective = r'= f32\[(\d+),(\d+)\]\S* (?:all-|collective-|reduce-sc)'
    moved = re.findall(collective, compiled.as_text())
    assert moved
    rows = {chunk, chunk // (shape[0] * shape[1])}
    assert not [size for size in moved if int(size[0]) in rows and int(size[1]) > d]


def test_split_vocabulary():
  """Inside shard_map, each device holding a part of the vocabulary, edges and all."""
  rng = np.random.default_rng(2)
  n, d, v = 12, 8, 32
  hidden = rng.normal(size=(n, d)).astype(np.float32)
  head = rng.normal(size=(d, v)).astype(np.float32)
  ids = rng.integers(-1, v, (n, 5)).astype(np.int32)
  ids[0] = [0, 7, 8, v - 1, -1]
  wlogps, went = rng.normal(size=ids.shape), rng.normal(size=n)
  mesh = jax.make_mesh((4,), ('tensor',), axis_types=(AxisType.Auto,))

  @functools.partial(jax.jit, static_argnames='axis')
  def grads(hidden, head, ids, axis):
    run = functools.partial(candidate_logps, temperature=0.7, chunk=5, vocab_axis=axis)
    if axis:
      specs = (PartitionSpec(), PartitionSpec(None, axis), PartitionSpec())
      run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())

    def loss(hidden, head):
      logps, entropy = run(hidden, head, ids)
      return (logps * wlogps).sum() + (entropy * went).sum(), (logps, entropy)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)

  (_, (logps, entropy)), got = grads(hidden, head, ids, 'tensor')
  (_, want), expected = grads(hidden, head, ids, None)
  np.testing.assert_allclose(logps, want[0], atol=1e-5)
  np.testing.assert_allclose(entropy, want[1], atol=1e-5)
  for x, y in zip(got, expected, strict=True):
    assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)
  ids[3, 2] = v
  (_, (logps, _)), _ = grads(hidden, head, ids, 'tensor')
  assert np.argwhere(np.isnan(logps)).tolist() == [[3, 2]]


def test_vmap(inputs):
  batched = lambda h, ids: candidate_logps(h, inputs['head'], ids, temperature=1.0, chunk=8)
  stack = inputs['hidden'].reshape(4, 11, D), inputs['ids'].reshape(4, 11, 1 + K)
  got, _ = jax.jit(jax.vmap(batched))(*stack)
  want, _ = jax.jit(batched)(inputs['hidden'], inputs['ids'])
  np.testing.assert_allclose(got.reshape(N, 1 + K), want, atol=1e-5)


@pytest.mark.parametrize('temperature', [0, -1.0, np.nan, np.inf])
def test_refuses_a_temperature(temperature, inputs):
  with pytest.raises(ValueError, match=r'temperature is .*; expected a finite'):
    candidate_logps(
      inputs['hidden'], inputs['head'], inputs['ids'], temperature=temperature, chunk=8
    )


def test_refuses_a_chunk_and_shapes(inputs):
  hidden, head, ids = inputs['hidden'], inputs['head'], inputs['ids']
  with pytest.raises(ValueError, match='chunk is 0; expected at least 1'):
    candidate_logps(hidden, head, ids, temperature=1.0, chunk=0)
  with pytest.raises(AssertionError):
    candidate_logps(hidden, head.T, ids, temperature=1.0, chunk=8)
  with pytest.raises(AssertionError):
    candidate_logps(hidden, head, ids[1:], temperature=1.0, chunk=8)
