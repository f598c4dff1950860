"""Right values: the functions on whole rows, which have their own tests against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mimo.models import blockwise, context_parallel, delta

ROWS, LENGTH = 2, 48
# Row 0: segments that cross devices, one of them several; padding that does. Row 1: ids that fall.
IDS = np.ones((ROWS, LENGTH), np.int32)
IDS[0, :2], IDS[0, 7:33], IDS[0, 33:41], IDS[0, 41:] = 0, 2, 0, 3
IDS[1, :12], IDS[1, 12:13], IDS[1, 40:] = 9, 5, 0


def mesh(rows, context):
  auto = (jax.sharding.AxisType.Auto,) * 2
  return jax.make_mesh((rows, context), ('rows', 'context'), axis_types=auto)


def spread(mesh, function, *replicated):
  """`function` of arrays [B, T, ...] under shard_map; arguments of these places are whole."""

  def run(*args):
    specs = tuple(P() if i in replicated else P('rows', 'context') for i in range(len(args)))
    local = functools.partial(function, axis_name='context')
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P('rows', 'context'))(*args)

  return run


def check(local, whole, args, mesh, *replicated):
  """Equal results and gradients of all arguments but the last, the segment ids."""
  pull = np.random.default_rng(9).standard_normal(whole(*args).shape).astype(np.float32)

  def run(function):
    loss = lambda *xs: (lambda y: (jnp.sum(y * pull), y))(function(*xs, *args[len(xs) :]))
    floats = tuple(i for i, x in enumerate(args) if x.dtype == jnp.float32)
    (_, out), grads = jax.jit(jax.value_and_grad(loss, floats, has_aux=True))(*args)
    return out, *grads

  for got, expected in zip(run(spread(mesh, local, *replicated)), run(whole), strict=True):
    scale = np.abs(expected).max()
    assert scale > 0.1
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * scale)


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize(
  ('rows', 'context', 'length', 'block'), [(1, 8, 48, 4), (2, 4, 44, 4), (1, 8, 48, 256)]
)
def test_attention(rows, context, length, block):
  # 44 tokens on 4 devices: an odd number each.
  shapes = ((ROWS, length, 4, 8), (ROWS, length, 2, 8), (ROWS, length, 2, 8))
  args = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
  check(
    functools.partial(context_parallel.attend, block=block),
    blockwise.attend,
    (*args, jnp.asarray(IDS[:, :length])),
    mesh(rows, context),
  )


def test_attention_work_is_even():
  """With pieces i and 15 - i of 16, every device reads as many keys."""
  args = [jnp.ones((1, 64, 1, 1))] * 3 + [jnp.ones((1, 64), jnp.int32)]
  seen = []
  attend_at = blockwise.attend_at

  def spy(block, q, k, v, q_ids, k_ids, at):
    jax.debug.callback(lambda at: seen.append(np.sort(at).tolist()), at)
    return attend_at(block, q, k, v, q_ids, k_ids, at)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(blockwise, 'attend_at', spy)
    jax.block_until_ready(spread(mesh(1, 8), context_parallel.attend)(*args))
    jax.effects_barrier()
  halves = [[*range(4 * i, 4 * i + 4), *range(60 - 4 * i, 64 - 4 * i)] for i in range(8)]
  assert sorted(seen) == halves


@pytest.mark.parametrize(('rows', 'context', 'chunk'), [(1, 8, 4), (2, 4, 64)])
def test_delta_rule(rows, context, chunk):
  q, k = (normal(ROWS, LENGTH, 2, 8, seed=i) for i in range(2))
  args = (
    q,
    delta.unit(k),
    normal(ROWS, LENGTH, 4, 6, seed=2),
    -jnp.exp(normal(ROWS, LENGTH, 4, seed=3) - 2),
    jax.nn.sigmoid(normal(ROWS, LENGTH, 4, seed=4)),
    jnp.asarray(IDS),
  )
  check(
    functools.partial(context_parallel.chunked, chunk=chunk),
    lambda *xs: delta.chunked(*xs)[0],
    args,
    mesh(rows, context),
  )


def test_delta_rule_remembers_across_all_devices():
  """What the first token writes is read by the last, with no decay between."""
  one = jnp.zeros((1, LENGTH, 1, 4)).at[:, 0, 0, 1].set(1)
  args = (
    one[:, ::-1],
    one,
    3 * one,
    jnp.zeros((1, LENGTH, 1)),
    jnp.ones((1, LENGTH, 1)),
    jnp.ones((1, LENGTH), jnp.int32),
  )
  out = spread(mesh(1, 8), context_parallel.chunked)(*args)
  np.testing.assert_allclose(out, (3 * one)[:, ::-1], atol=1e-6)


@pytest.mark.parametrize(('rows', 'context'), [(1, 8), (2, 4)])
def test_convolution(rows, context):
  args = (normal(ROWS, LENGTH, 5), normal(5, 4, seed=1), jnp.asarray(IDS))
  check(context_parallel.conv, lambda *xs: delta.conv(*xs)[0], args, mesh(rows, context), 1)


def test_convolution_wider_than_a_device_is_refused():
  args = (normal(1, 16, 5), normal(5, 4), jnp.ones((1, 16), jnp.int32))
  with pytest.raises(ValueError, match='2 tokens a device; a kernel of 4 expects 3'):
    spread(mesh(1, 8), context_parallel.conv, 1)(*args)
