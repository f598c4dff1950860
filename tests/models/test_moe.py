"""Experts against a float64 loop over tokens, written out in numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import activations, moe

EXPERTS, DIM, WIDE = 5, 32, 16


def numpy_experts(x, ids, weights, gate, up, down, rounded=lambda x, e, part: x):
  """One token and one expert at a time."""
  y = np.zeros_like(x)
  for n, k in np.ndindex(*ids.shape):
    e = ids[n, k]
    if 0 <= e < len(gate):
      a, b = rounded(x[n], e, 'gate') @ gate[e], rounded(x[n], e, 'up') @ up[e]
      y[n] += weights[n, k] * (rounded(a / (1 + np.exp(-a)) * b, e, 'down') @ down[e])
  return y


@pytest.fixture(scope='module')
def case():
  """The last expert gets nothing; token 3 is absent, and token 4 goes to one expert of none."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((9, DIM))
  ids = np.stack([rng.permutation(EXPERTS - 1)[:2] for _ in range(9)])
  ids[3], ids[4, 1] = EXPERTS, -1
  weights = rng.uniform(0.1, 1, (9, 2))
  kernels = [rng.standard_normal(s) / 4 for s in ((EXPERTS, DIM, WIDE),) * 2]
  return x, ids, weights, *kernels, rng.standard_normal((EXPERTS, WIDE, DIM)) / 4


def f32(arrays):
  return [jnp.asarray(a, jnp.int32 if a.dtype.kind == 'i' else jnp.float32) for a in arrays]


def test_experts_and_their_gradients(case):
  """Gradients by central differences of the numpy version, along one direction for each input."""
  x, ids, *rest = f32(case)

  @jax.jit
  def run(x, *rest):
    def total(x, *rest):
      y = moe.experts(x, ids, *rest)
      return jnp.sum(y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)), y

    return jax.grad(total, argnums=range(5), has_aux=True)(x, *rest)

  grads, y = run(x, *rest)
  np.testing.assert_allclose(y, numpy_experts(*case), atol=1e-5)
  assert np.all(y[3] == 0)
  probe = np.cos(np.arange(case[0].size)).reshape(case[0].shape)
  rng = np.random.default_rng(1)
  inputs = [case[0], *case[2:]]
  for i, grad in enumerate(grads):
    direction = rng.standard_normal(inputs[i].shape)
    sides = []
    for sign in (1, -1):
      moved = list(inputs)
      moved[i] = moved[i] + sign * 1e-5 * direction
      sides.append(np.sum(probe * numpy_experts(moved[0], case[1], *moved[1:])))
    expected = (sides[0] - sides[1]) / 2e-5
    assert np.sum(np.asarray(grad) * direction) == pytest.approx(expected, rel=1e-3)


def test_no_array_of_tokens_times_experts(case):
  """Nothing in the traced forward and backward pass has tokens x experts x features."""
  count, experts, dim, wide, k = 64, 32, 24, 20, 2
  shapes = ((experts, dim, wide), (experts, dim, wide), (experts, wide, dim))
  kernels = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
  x = jax.ShapeDtypeStruct((count, dim), jnp.float32)
  ids = jax.ShapeDtypeStruct((count, k), jnp.int32)
  weights = jax.ShapeDtypeStruct((count, k), jnp.float32)

  def loss(x, weights, kernels, ids):
    return jnp.sum(moe.experts(x, ids, weights, *kernels))

  step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
  compiled = step.lower(x, weights, kernels, ids).compile().as_text()
  sizes = [
    np.prod([int(n) for n in dims.split(',')])
    for dims in re.findall(r'\b(?:f32|bf16|s32|pred)\[([\d,]+)\]', compiled)
  ]
  # Whole blocks of rows beyond the assignments, and the stacks themselves.
  assert max(sizes) <= max(experts * dim * wide, (count * k + 32) * max(dim, wide))
  assert max(sizes) < count * experts * wide


@pytest.mark.parametrize('kind', ['fp8_token', 'nvfp4'])
def test_inputs_are_rounded_for_each_expert(case, kind):
  scales = np.array([3.0, 50.0, 400.0, 2000.0, 9.0], np.float32)
  parts = {'gate': scales, 'up': scales * 2, 'down': scales / 3}
  given = {part: jnp.asarray(s) if kind == 'nvfp4' else None for part, s in parts.items()}
  quant = moe.ExpertQuant(kind, **given)

  def rounded(x, e, part):
    scale = None if kind != 'nvfp4' else jnp.float32(parts[part][e])
    return np.asarray(activations.rounded(jnp.asarray(x, jnp.float32), kind, scale), np.float64)

  got = jax.jit(functools.partial(moe.experts, quant=quant))(*f32(case))
  expected = numpy_experts(*case, rounded)
  # A hidden value that lies on a rounding boundary may fall to its other side.
  assert np.abs(got - expected).max() < 0.02 * np.abs(expected).max()
  plain = numpy_experts(*case)
  assert np.abs(got - plain).mean() > 5 * np.abs(got - expected).mean()


def test_amax_is_of_the_tokens_an_expert_gets(case):
  x, ids, _, gate, up, _ = f32(case)
  wide, narrow = jax.jit(moe.expert_amax)(x, ids, gate, up)
  for e in range(EXPERTS):
    rows = case[0][np.any(case[1] == e, axis=1)]
    a, b = rows @ case[3][e], rows @ case[4][e]
    hidden = a / (1 + np.exp(-a)) * b
    assert wide[e] == pytest.approx(np.abs(rows).max(initial=0), rel=1e-5)
    assert narrow[e] == pytest.approx(np.abs(hidden).max(initial=0), rel=1e-4)
  assert wide[-1] == narrow[-1] == 0


def test_dispatch_by_hand():
  sent = jax.jit(functools.partial(moe.dispatch, num_experts=3))(
    jnp.array([[2, 0], [0, 5], [-1, 2]], jnp.int32)
  )
  # Assignments 0 to 5; none for 3 and 4, which come last.
  assert sent.order.tolist() == [1, 2, 0, 5, 3, 4]
  assert sent.expert.tolist() == [0, 0, 2, 2, 3, 3]
  assert sent.sizes.tolist() == [2, 0, 2]
  assert sent.order[sent.inverse].tolist() == list(range(6))


LOGITS = np.log(np.array([[0.1, 0.4, 0.3, 0.2]], np.float32))


@pytest.mark.parametrize(('normalise', 'expected'), [(True, [4 / 7, 3 / 7]), (False, [0.4, 0.3])])
def test_route_by_hand(normalise, expected):
  ids, weights = moe.route(jnp.asarray(LOGITS), 2, normalise=normalise)
  assert ids.tolist() == [[1, 2]]
  np.testing.assert_allclose(weights[0], expected, rtol=1e-6)


def test_equal_logits_go_to_the_lower_ids():
  """torch leaves open which of equals it takes, so only that it is always the same matters."""
  ids, weights = moe.route(jnp.zeros((2, 6)), 3, normalise=True)
  assert ids.tolist() == [[0, 1, 2]] * 2
  np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


def test_given_routes_are_weighed_by_these_logits():
  given = jnp.array([[[3, 0], [-1, -1]]], jnp.int32)
  logits = jnp.asarray(np.repeat(LOGITS[None], 2, axis=1))
  ids, weights = moe.route(logits, 2, normalise=True, given=given)
  assert ids.tolist() == [[[3, 0], [1, 2]]]
  np.testing.assert_allclose(weights[0], [[2 / 3, 1 / 3], [4 / 7, 3 / 7]], rtol=1e-6)


def test_weights_have_the_gradient_of_a_softmax_over_the_chosen():
  """d log w_1 / d logits = onehot_1 - w over the chosen; 0 outside."""

  def log_weight(logits):
    return jnp.log(moe.route(logits, 2, normalise=True)[1][0, 0])

  np.testing.assert_allclose(
    jax.grad(log_weight)(jnp.asarray(LOGITS))[0], [0, 1 - 4 / 7, -3 / 7, 0], atol=1e-6
  )


def test_where_others_are_given_than_the_logits_choose():
  """The order is of no matter; what is not given differs from nothing."""
  given = jnp.array([[2, 1], [1, 2], [1, 3], [3, 0], [-1, -1]], jnp.int16)
  different = moe.differs(jnp.asarray(np.repeat(LOGITS, 5, axis=0)), given)
  assert different.tolist() == [False, False, True, True, False]
