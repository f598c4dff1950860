import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import blockwise

LENGTH = 44
# Row 0: padding between, before and after; ids that fall. Row 1: one segment, padding at the end.
IDS = np.ones((2, LENGTH), np.int32)
IDS[0, :3], IDS[0, 3:14], IDS[0, 14:15], IDS[0, 15:19], IDS[0, 19:] = 0, 7, 2, 0, 5
IDS[1, 40:] = 0


def arrays(heads=4, kv_heads=2, dim=8, seed=0):
  """float64, each a float32 exactly: q, k, v and the gradient of the output."""
  rng = np.random.default_rng(seed)
  shapes = [(2, LENGTH, n, dim) for n in (heads, kv_heads, kv_heads, heads)]
  return [rng.standard_normal(s).astype(np.float32).astype(np.float64) for s in shapes]


def attend_numpy(q, k, v, mask, dout):
  """One query at a time: the output and, by hand, the gradients of sum(out dout)."""
  out, dq, dk, dv = (np.zeros(x.shape) for x in (q, q, k, v))
  group = q.shape[2] // k.shape[2]
  for b, t, h in np.ndindex(*q.shape[:3]):
    seen, kv = mask[b, t], h // group
    if not seen.any():
      continue
    keys, values = k[b, seen, kv], v[b, seen, kv]
    scores = keys @ q[b, t, h] / np.sqrt(q.shape[-1])
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    out[b, t, h] = weights @ values
    dweights = values @ dout[b, t, h]
    dscores = weights * (dweights - weights @ dweights) / np.sqrt(q.shape[-1])
    dq[b, t, h] = dscores @ keys
    dk[b, seen, kv] += np.outer(dscores, q[b, t, h])
    dv[b, seen, kv] += np.outer(weights, dout[b, t, h])
  return out, (dq, dk, dv)


def causal(ids):
  index = np.arange(ids.shape[1])
  same = ids[:, :, None] == ids[:, None, :]
  return same & (index <= index[:, None]) & (ids > 0)[:, :, None]


def run(attend, q, k, v, dout):
  q, k, v, dout = (jnp.asarray(x, jnp.float32) for x in (q, k, v, dout))
  out, pull = jax.vjp(jax.jit(attend), q, k, v)
  return out, pull(dout)


def check(got, expected):
  for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
  ('block', 'heads', 'kv_heads'), [(64, 4, 2), (16, 4, 2), (11, 6, 2), (5, 3, 1), (43, 2, 2)]
)
def test_attend_against_float64(block, heads, kv_heads):
  q, k, v, dout = arrays(heads, kv_heads)
  attend = functools.partial(blockwise.attend, segment_ids=jnp.asarray(IDS), block=block)
  check(run(attend, q, k, v, dout), attend_numpy(q, k, v, causal(IDS), dout))


@pytest.mark.parametrize('block', [64, 8])
def test_scores_of_hundreds(block):
  q, k, v, dout = arrays()
  q *= 300
  attend = functools.partial(blockwise.attend, segment_ids=jnp.asarray(IDS), block=block)
  out, (dq, dk, dv) = run(attend, q, k, v, dout)
  expected, _ = attend_numpy(q, k, v, causal(IDS), dout)
  np.testing.assert_allclose(out, expected, atol=1e-3)
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize('block', [64, 8])
def test_padding_gives_0_and_no_gradient_whatever_it_holds(block):
  q, k, v, dout = arrays()
  absent = (IDS == 0)[..., None, None]
  other = [np.where(absent, 1e4, x) for x in (q, k, v)]
  attend = functools.partial(blockwise.attend, segment_ids=jnp.asarray(IDS), block=block)
  out, grads = run(attend, *other, dout)
  check((out, grads), attend_numpy(q, k, v, causal(IDS), dout))
  for x in (out, *grads):
    np.testing.assert_array_equal(np.where(absent, x, 0), 0)


def test_rows_of_padding_alone():
  out, grads = run(
    functools.partial(blockwise.attend, segment_ids=jnp.zeros((2, LENGTH), jnp.int32), block=8),
    *arrays(),
  )
  for x in (out, *grads):
    np.testing.assert_array_equal(x, np.zeros(x.shape))


def test_bfloat16_in_bfloat16_out():
  q, k, v, dout = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in arrays())
  expected, _ = attend_numpy(q, k, v, causal(IDS), dout)
  for block in (64, 8):
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = blockwise.attend(*rounded, jnp.asarray(IDS), block=block)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=2**-6)


def visited(ids, block):
  """Blocks of keys that each block of queries reads."""
  ids, (rows, length) = jnp.asarray(ids), ids.shape
  cut = blockwise._Cut(length, length, block)
  x = jnp.zeros((rows, length, 1, 1))
  first, end = blockwise._ranges(cut.queries(x, 1, ids, jnp.arange(length)), cut.keys(x, x, ids))
  return [list(range(*pair)) for pair in zip(first.tolist(), end.tolist(), strict=True)]


def test_blocks_of_other_segments_are_skipped():
  ids = np.array([[1] * 5 + [2] * 3 + [3] * 6 + [0] * 2])
  assert visited(ids, 4) == [[0], [0, 1], [2], [2, 3]]
  both = np.concatenate([ids, [[1] * 16]])
  assert visited(both, 4) == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
  assert visited(0 * ids, 4) == [[], [], [], []]


def test_no_array_grows_with_the_square_of_the_row():
  length, block = 8192, 256
  x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

  def loss(q, k, v, ids):
    return jnp.sum(blockwise.attend(q, k, v, ids, block=block) ** 2)

  compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, ids).compile()
  # 9 arrays of a row's size, and scores of one block against another: no [T, T], of 268 MB.
  assert compiled.memory_analysis().temp_size_in_bytes < 16 * length * 2 * 16 * 4


@pytest.mark.parametrize('heads', [2, 6])
def test_masked_against_float64(heads):
  rng = np.random.default_rng(0)
  q = rng.standard_normal((2, 3, heads, 4)).astype(np.float32)
  k, v = rng.standard_normal((2, 2, 5, 2, 4)).astype(np.float32)
  mask = rng.random((2, 3, 5)) < 0.5
  mask[..., 0] = True
  got = jax.jit(blockwise.masked)(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask)
  expected, _ = attend_numpy(*(x.astype(np.float64) for x in (q, k, v)), mask, np.zeros(q.shape))
  np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_heads_that_do_not_divide_are_refused():
  q, k, v, _ = arrays(heads=4, kv_heads=3)
  with pytest.raises(ValueError, match='4 query heads; expected a multiple of the 3'):
    blockwise.attend(q, k, v, IDS)
