"""On any mesh, what mixes tokens and the routed experts give what one device gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from mimo.models import parallel_mixers
from mimo.models.parallel import MESH_AXES, Parallel

B, T = 4, 16


def _parallel(**sizes: int) -> Parallel:
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  devices = jax.devices()[: int(np.prod(shape))]
  axis_types = (AxisType.Auto,) * len(MESH_AXES)
  return Parallel(jax.make_mesh(shape, MESH_AXES, axis_types=axis_types, devices=devices))


def _check(function, args, parallel, rtol=1e-5):
  """Value and gradients of a function (parallel, *args), all float, against one device."""
  rng = np.random.default_rng(9)
  shape = jax.eval_shape(functools.partial(function, None), *args).shape
  weights = rng.normal(size=shape).astype(np.float32)

  def run(parallel):
    def loss(args):
      y = function(parallel, *args)
      return (y * weights).sum(), y

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(args)

  (_, want), want_grads = run(None)
  (_, got), got_grads = run(parallel)
  for x, y in zip((got, *got_grads), (want, *want_grads), strict=True):
    assert np.linalg.norm(x - y) <= rtol * np.linalg.norm(y)


def _segments(rng) -> np.ndarray:
  """Segments of random lengths, with padding at the end of the last row."""
  ids = np.cumsum(rng.random((B, T)) < 0.2, axis=1).astype(np.int32) + 1
  ids[-1, -3:] = 0
  return ids


def _naive_experts(x, ids, weights, gate, up, down):
  """Every expert on every token, then those that are asked for: the dense definition."""
  hidden = jax.nn.silu(jnp.einsum('nd,edf->nef', x, gate)) * jnp.einsum('nd,edf->nef', x, up)
  y = jnp.einsum('nef,efd->ned', hidden, down)
  chosen = jax.nn.one_hot(ids, len(gate), dtype=x.dtype) * weights[..., None]
  return jnp.einsum('nke,ned->nd', chosen, y)


@pytest.mark.parametrize(
  ('sizes', 'rows', 'chunk'),
  [
    ({'expert': 4, 'context': 2}, B, 12),  # tokens move, in chunks that don't divide them
    ({'expert': 2, 'context': 2, 'tensor': 2}, 3, 99),  # rows do not divide: only results move
    ({'data': 2, 'fsdp': 2, 'tensor': 2}, B, 99),  # experts are whole everywhere
  ],
)
def test_experts(sizes, rows, chunk):
  rng = np.random.default_rng(0)
  d, f, e, k = 8, 6, 8, 3
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  ids = np.argsort(rng.random((rows, T, e)))[..., :k].astype(np.int32)
  ids[0, 3:5] = e  # to none
  args = (normal(rows, T, d), normal(rows, T, k), normal(e, d, f), normal(e, d, f), normal(e, f, d))

  def function(parallel, x, weights, *kernels):
    return parallel_mixers.experts(
      parallel, _naive_experts, x, jnp.asarray(ids), weights, kernels, chunk=chunk
    )

  _check(function, args, _parallel(**sizes))


def test_tokens_that_no_chunk_divides_go_through_in_few():
  rng = np.random.default_rng(3)
  x, weights = rng.normal(size=(7, 2)).astype(np.float32), rng.random((7, 1)).astype(np.float32)
  ids = np.arange(7, dtype=np.int32)[:, None]
  sizes = []

  def function(part):
    x, ids, weights = part
    sizes.append(len(x))
    return jnp.where(ids >= 0, x * weights + ids, 0)

  # 7 is prime: chunks of a size that divides it would hold one token each.
  y = parallel_mixers._in_chunks(function, tuple(map(jnp.asarray, (x, ids, weights))), 4)
  np.testing.assert_allclose(y, x * weights + ids, rtol=1e-6)
  assert set(sizes) == {4}


# Two key heads: split with the queries, or one picked by each device, of two or four.
@pytest.mark.parametrize(
  'sizes', [{'context': 4, 'tensor': 2}, {'fsdp': 2, 'tensor': 4}, {'context': 2, 'tensor': 4}]
)
def test_attend(sizes):
  rng = np.random.default_rng(1)
  args = tuple(rng.normal(size=(B, T, h, 4)).astype(np.float32) for h in (8, 2, 2))
  ids = jnp.asarray(_segments(rng))
  _check(lambda p, *a: parallel_mixers.attend(p, *a, ids), args, _parallel(**sizes))


@pytest.mark.parametrize('sizes', [{'context': 4, 'tensor': 2}, {'expert': 4, 'tensor': 2}])
def test_delta_rule_and_convolution(sizes):
  rng = np.random.default_rng(2)
  ids = jnp.asarray(_segments(rng))
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  q, k = normal(B, T, 2, 4), normal(B, T, 2, 4)
  k /= np.linalg.norm(k, axis=-1, keepdims=True)
  beta = rng.random((B, T, 4)).astype(np.float32)
  args = (q, k, normal(B, T, 4, 4), -np.abs(normal(B, T, 4)), beta)
  parallel = _parallel(**sizes)
  _check(lambda p, *a: parallel_mixers.chunked(p, *a, ids), args, parallel)
  x = (normal(B, T, 6), normal(6, 4))
  _check(lambda p, x, kernel: parallel_mixers.conv(p, x, kernel, ids), x, parallel)
