import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import delta

# Row 0: three segments, one of a single token, padding between two and inside the last.
# Row 1: padding on the left and on the right.
LENGTH = 75


def segments():
  ids = np.ones((2, LENGTH), np.int32)
  ids[0, 21:22], ids[0, 22:50], ids[0, 50:55], ids[0, 55:] = 2, 9, 0, 4
  ids[0, 60:63] = 0
  ids[1, :5], ids[1, 64:] = 0, 0
  return ids


def arrays(seed=0, *, kv_heads=2, heads=4, key_dim=8, value_dim=6, decay=1.0):
  """float64, each a float32 exactly: q, k, v, log_decay, beta, state."""
  rng = np.random.default_rng(seed)
  q = rng.standard_normal((2, LENGTH, kv_heads, key_dim))
  k = rng.standard_normal((2, LENGTH, kv_heads, key_dim))
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  v = rng.standard_normal((2, LENGTH, heads, value_dim))
  log_decay = -decay * np.exp(2 * rng.standard_normal((2, LENGTH, heads)))
  beta = rng.random((2, LENGTH, heads))
  state = rng.standard_normal((2, heads, key_dim, value_dim))
  return [x.astype(np.float32).astype(np.float64) for x in (q, k, v, log_decay, beta, state)]


def token_scan(q, k, v, log_decay, beta, segment_ids, state, dout, dstate):
  """One token at a time: outputs, and by hand the gradients of sum(out dout) + sum(state dstate).

  Returns ((out, state), gradients of q, k, v, log_decay, beta and the state before).
  """
  batch, length, heads = log_decay.shape
  group = heads // k.shape[2]
  out, state, dstate = np.zeros(v.shape), state.copy(), dstate.copy()
  grads = [np.zeros(x.shape) for x in (q, k, v, log_decay, beta)]
  dq, dk, dv, dlog, dbeta = grads
  for b, h in np.ndindex(batch, heads):
    tokens = [t for t in range(length) if segment_ids[b, t]]
    s, trail, previous = state[b, h].copy(), [], None
    for t in tokens:
      reset = previous is not None and segment_ids[b, t] != previous
      previous = segment_ids[b, t]
      before = np.zeros_like(s) if reset else s
      decayed = before * np.exp(log_decay[b, t, h])
      rest = v[b, t, h] - decayed.T @ k[b, t, h // group]
      s = decayed + np.outer(k[b, t, h // group], beta[b, t, h] * rest)
      out[b, t, h] = s.T @ q[b, t, h // group]
      trail.append((t, reset, before, decayed, rest, s))
    state[b, h] = s
    ds = dstate[b, h]
    for t, reset, before, decayed, rest, s in reversed(trail):
      key, kv = k[b, t, h // group], h // group
      ds = ds + np.outer(q[b, t, kv], dout[b, t, h])
      dq[b, t, kv] += s @ dout[b, t, h]
      drest = beta[b, t, h] * (ds.T @ key)
      dbeta[b, t, h] = rest @ (ds.T @ key)
      dk[b, t, kv] += ds @ (beta[b, t, h] * rest) - decayed @ drest
      dv[b, t, h] = drest
      ds = (ds - np.outer(key, drest)) * np.exp(log_decay[b, t, h])
      dlog[b, t, h] = np.sum(ds * before)
      ds = np.zeros_like(ds) if reset else ds
    dstate[b, h] = ds
  return (out, state), (*grads, dstate)


def pulls(values, seed=1):
  rng = np.random.default_rng(seed)
  v, state = values[2], values[5]
  return rng.standard_normal(v.shape), rng.standard_normal(state.shape)


def run(rule, values, segment_ids, dout, dstate):
  """`token_scan`'s results out of a function of jax arrays."""
  values = [jnp.asarray(x, jnp.float32) for x in values]
  primal = lambda *xs: rule(*xs[:5], segment_ids, xs[5])
  results, pull = jax.vjp(jax.jit(primal), *values)
  return results, pull(tuple(jnp.asarray(x, jnp.float32) for x in (dout, dstate)))


def check(got, expected, rtol=1e-5):
  for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=rtol * np.abs(theirs).max() + 1e-30)


@pytest.mark.parametrize(
  ('chunk', 'group', 'heads'), [(16, 2, 4), (64, 16, 4), (128, 16, 2), (8, 1, 6)]
)
def test_chunked_against_a_float64_token_scan(monkeypatch, chunk, group, heads):
  monkeypatch.setattr(delta, '_GROUP', group)
  values, ids = arrays(heads=heads), segments()
  expected = token_scan(*values[:5], ids, values[5], *pulls(values))
  rule = functools.partial(delta.chunked, chunk=chunk)
  check(run(rule, values, jnp.asarray(ids), *pulls(values)), expected)


def test_a_head_that_forgets_all_at_one_token_remembers_at_the_next():
  values, ids = arrays(decay=0.01), np.ones((2, LENGTH), np.int32)
  values[3][:, ::7] = -300.0
  expected = token_scan(*values[:5], ids, values[5], *pulls(values))
  check(run(delta.chunked, values, jnp.asarray(ids), *pulls(values)), expected)


def test_repeated_keys_that_overwrite_without_decay():
  values, ids = arrays(), np.ones((2, LENGTH), np.int32)
  values[1][:] = values[1][:1, :1]
  values[3][:], values[4][:] = 0.0, 1.0
  (out, _), _ = expected = token_scan(*values[:5], ids, values[5], *pulls(values))
  scale = np.einsum('bthd,bthd->bth', values[0], values[1])  # each token reads what it wrote
  orthogonal = values[0] - scale[..., None] * values[1]
  kept = np.einsum('bthd,bhde->bthe', np.repeat(orthogonal, 2, axis=2), values[5])
  np.testing.assert_allclose(out, np.repeat(scale, 2, 2)[..., None] * values[2] + kept, atol=1e-5)
  check(run(delta.chunked, values, jnp.asarray(ids), *pulls(values)), expected)


def test_step_against_a_float64_token_scan():
  values = arrays()
  ids = np.ones((2, LENGTH), np.int32)
  (out, state), _ = token_scan(*values[:5], ids, values[5], *pulls(values))
  step, now = jax.jit(delta.step), jnp.asarray(values[5], jnp.float32)
  for t in range(LENGTH):
    got, now = step(*(jnp.asarray(x[:, t], jnp.float32) for x in values[:5]), now)
    np.testing.assert_allclose(got, out[:, t], atol=2e-5)
  np.testing.assert_allclose(now, state, atol=1e-5)


def test_step_keeps_the_state_of_an_idle_row():
  values = [jnp.asarray(x[:, 0], jnp.float32) for x in arrays()[:5]]
  state = jnp.asarray(arrays()[5], jnp.float32)
  idle = jnp.array([[1.0], [0.0]])
  _, got = delta.step(*values[:3], values[3] * idle, values[4] * idle, state)
  np.testing.assert_array_equal(got[1], state[1])
  assert np.abs(got[0] - state[0]).max() > 0.1


def test_rows_in_two_parts_are_the_rows_whole():
  values, ids = arrays(), segments()
  values = [jnp.asarray(x, jnp.float32) for x in values]
  cut = 30  # within a segment of row 0, and where row 1's has begun
  rule = jax.jit(delta.chunked)
  whole, state = rule(*values[:5], ids, values[5])
  first, between = rule(*(x[:, :cut] for x in values[:5]), ids[:, :cut], values[5])
  second, after = rule(*(x[:, cut:] for x in values[:5]), ids[:, cut:], between)
  np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=1e-5)
  np.testing.assert_allclose(after, state, atol=1e-5)


def test_padding_alone_changes_nothing():
  values = [jnp.asarray(x, jnp.float32) for x in arrays()]
  out, state = delta.chunked(*values[:5], jnp.zeros((2, LENGTH), jnp.int32), values[5])
  np.testing.assert_array_equal(out, np.zeros(out.shape))
  np.testing.assert_array_equal(state, values[5])


def test_what_padding_holds_does_not_matter():
  values, ids = [jnp.asarray(x, jnp.float32) for x in arrays()], segments()
  absent = ids[..., None, None] == 0
  other = [jnp.where(absent if x.ndim == 4 else absent[..., 0], 1e4, x) for x in values[:5]]
  for got, expected in zip(
    delta.chunked(*other, ids, values[5]), delta.chunked(*values[:5], ids, values[5]), strict=True
  ):
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize('length', [1, 2, 63, 64, 65])
def test_lengths_around_a_chunk(length):
  values = [x[:, :length] for x in arrays()[:5]] + [arrays()[5]]
  ids = np.ones((2, length), np.int32)
  dout, dstate = pulls(values)
  expected = token_scan(*values[:5], ids, values[5], dout, dstate)
  check(run(delta.chunked, values, jnp.asarray(ids), dout, dstate), expected)


def test_bfloat16_in_bfloat16_out_with_a_float32_state():
  values, ids = arrays(), np.ones((2, LENGTH), np.int32)
  values = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in values]
  (out, state), _ = token_scan(*values[:5], ids, values[5], *pulls(values))
  rounded = [jnp.asarray(x, jnp.bfloat16) for x in values]
  got, got_state = delta.chunked(*rounded[:5], jnp.asarray(ids), rounded[5])
  assert (got.dtype, got_state.dtype) == (jnp.bfloat16, jnp.float32)
  np.testing.assert_allclose(got.astype(jnp.float32), out, rtol=2**-8, atol=1e-4)
  np.testing.assert_allclose(got_state, state, atol=1e-5)


def test_starts():
  ids = jnp.array([[0, 0, 3, 3, 0, 3, 1, 0], [5, 2, 2, 0, 0, 7, 7, 1]])
  expected = [[0, 0, 0, 0, 0, 0, 1, 0], [0, 1, 0, 0, 0, 1, 0, 1]]
  np.testing.assert_array_equal(delta.starts(ids), np.array(expected, bool))


@pytest.mark.parametrize('size', [1, 4, 8, 64])
def test_unit_lower_inverse_and_its_gradient(size):
  rng = np.random.default_rng(0)
  a = np.tril(rng.standard_normal((3, size, size)) / size**0.5, -1).astype(np.float32)
  pull = rng.standard_normal(a.shape).astype(np.float32)
  inverse = np.linalg.inv(np.eye(size) + a.astype(np.float64))
  got, back = jax.vjp(delta.unit_lower_inverse, jnp.asarray(a))
  np.testing.assert_allclose(got, inverse, atol=1e-5)
  turned = inverse.transpose(0, 2, 1)
  np.testing.assert_allclose(back(pull)[0], np.tril(-turned @ pull @ turned, -1), atol=1e-4)


def test_inverse_of_a_triangle_of_ones():
  ones = jnp.tril(jnp.ones((64, 64)), -1)
  np.testing.assert_array_equal(delta.unit_lower_inverse(ones), np.eye(64) - np.eye(64, k=-1))


def test_unit():
  x = jnp.array([[3.0, 4.0], [0.0, 0.0], [1e-3, 0.0]])
  np.testing.assert_allclose(delta.unit(x), [[0.6, 0.8], [0, 0], [2**-0.5, 0]], rtol=1e-6)
  assert delta.unit(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_heads_that_do_not_divide_and_a_chunk_that_is_no_power_of_two_are_refused():
  values = [jnp.asarray(x, jnp.float32) for x in arrays(kv_heads=3)[:5]]
  with pytest.raises(ValueError, match='4 value heads; expected a multiple of the 3'):
    delta.chunked(*values, segments())
  values = [jnp.asarray(x, jnp.float32) for x in arrays()[:5]]
  with pytest.raises(ValueError, match='chunk is 48; expected a power of two'):
    delta.chunked(*values, segments(), chunk=48)


def convolve(x, kernel, ids, initial):
  """One output at a time: (y, tail)."""
  batch, length, _ = x.shape
  size = kernel.shape[1]
  y, tail = np.zeros(x.shape), np.zeros(initial.shape)
  for b in range(batch):
    first = next((i for i in ids[b] if i), None)
    inputs = [(first, row) for row in initial[b]]  # (segment, value)
    for t in range(length):
      inputs.append((ids[b, t], x[b, t]))
      if ids[b, t]:
        window = inputs[-size:]
        y[b, t] = sum(kernel[:, i] * row for i, (s, row) in enumerate(window) if s == ids[b, t])
    while len(inputs) > size - 1 and inputs[-1][0] == 0:
      inputs.pop()
    last = inputs[-1][0]
    tail[b] = [row if s == last else 0 * row for s, row in inputs[1 - size :]]
  return y, tail


def conv_values():
  rng = np.random.default_rng(0)
  x, initial = rng.standard_normal((3, 12, 5)), rng.standard_normal((3, 3, 5))
  kernel = rng.standard_normal((5, 4))
  return [a.astype(np.float32) for a in (x, kernel, initial)]


CONV_IDS = np.array(
  [
    [4, 4, 1, 1, 1, 1, 1, 2, 3, 3, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
    [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
  ]
)


def test_conv_against_one_output_at_a_time():
  x, kernel, initial = conv_values()
  y, tail = jax.jit(delta.conv)(x, kernel, CONV_IDS, initial)
  expected = convolve(x, kernel, CONV_IDS, initial)
  np.testing.assert_allclose(y, expected[0], atol=1e-5)
  np.testing.assert_allclose(tail, expected[1], atol=1e-6)


def test_conv_without_tokens_before_the_row():
  x, kernel, initial = conv_values()
  got = delta.conv(x, kernel, CONV_IDS)
  for ours, theirs in zip(got, delta.conv(x, kernel, CONV_IDS, 0 * initial), strict=True):
    np.testing.assert_array_equal(ours, theirs)
  np.testing.assert_allclose(got[0][1, 0], kernel[:, 3] * x[1, 0], rtol=1e-5)


def test_conv_of_padding_alone_keeps_the_tail():
  x, kernel, initial = conv_values()
  y, tail = delta.conv(x, kernel, 0 * CONV_IDS, initial)
  np.testing.assert_array_equal(y, np.zeros(y.shape))
  np.testing.assert_array_equal(tail, initial.astype(np.float32))


def test_conv_in_two_parts_is_the_conv_whole():
  x, kernel, initial = conv_values()
  whole, last = delta.conv(x, kernel, CONV_IDS, initial)
  for cut in (2, 7):
    first, tail = delta.conv(x[:, :cut], kernel, CONV_IDS[:, :cut], initial)
    # The second part's first token must be of the tail's segment: only row 1 is for every cut.
    second, end = delta.conv(x[:, cut:], kernel, CONV_IDS[:, cut:], tail)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1)[1], whole[1], atol=1e-6)
    np.testing.assert_allclose(end[1], last[1], atol=1e-6)
