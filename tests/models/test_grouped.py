"""Grouped matmuls against a numpy loop over groups in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import grouped

# Rows per group: none, one, a block and one, a whole number of blocks, and rows of no group last.
SIZES = [0, 1, 9, 16, 0, 5]
ROWS, IN, OUT = 40, 6, 5


@pytest.fixture(scope='module')
def case():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((ROWS, IN))
  w = rng.standard_normal((len(SIZES), IN, OUT))
  return x, w, rng.standard_normal((ROWS, OUT))


def expected(x, w, dy):
  """(product, gradient of x, gradient of w)."""
  y, dx, dw = np.zeros((ROWS, OUT)), np.zeros((ROWS, IN)), np.zeros(w.shape)
  start = 0
  for group, size in enumerate(SIZES):
    rows = slice(start, start + size)
    y[rows], dx[rows] = x[rows] @ w[group], dy[rows] @ w[group].T
    dw[group] = x[rows].T @ dy[rows]
    start += size
  return y, dx, dw


def check(got, wanted):
  for a, b in zip(got, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_product_and_gradients(case):
  x, w, dy = (jnp.asarray(a, jnp.float32) for a in case)
  sizes = jnp.asarray(SIZES, jnp.int32)

  @jax.jit
  def run(x, w, dy):
    y, pull = jax.vjp(lambda x, w: grouped.grouped_matmul(x, w, sizes), x, w)
    return y, *pull(dy)

  check(run(x, w, dy), expected(*case))


@pytest.mark.parametrize(('rows', 'chunk'), [(8, 3), (4, 64)])
def test_by_chunk(case, rows, chunk):
  """What other backends run."""
  x, w, dy = (jnp.asarray(a, jnp.float32) for a in case)
  sizes = jnp.asarray(SIZES, jnp.int32)
  how = {'rows': rows, 'chunk': chunk}

  @jax.jit
  def run(x, w, dy):
    product = functools.partial(grouped.product_by_chunk, **how)
    y = product(x, w, sizes, transpose=False)
    return y, product(dy, w, sizes, transpose=True), grouped.outer_by_chunk(x, dy, sizes, **how)

  check(run(x, w, dy), expected(*case))


def test_bfloat16_sums_gradients_in_float32():
  """512 terms of 1 + 2^-8 and one group: partial sums in bfloat16 would stop at 256."""
  x = jnp.full((512, 1), 1.0, jnp.bfloat16)
  w = jnp.ones((1, 1, 1), jnp.bfloat16)
  sizes = jnp.array([512], jnp.int32)
  dw = jax.jit(jax.grad(lambda w: jnp.sum(grouped.grouped_matmul(x, w, sizes)).astype(float)))(w)
  assert dw.dtype == jnp.bfloat16
  assert float(dw[0, 0, 0]) == 512.0


def test_never_rows_times_groups():
  """No array of the compiled product and its gradients has all rows for each group."""
  num, groups, width = 256, 32, 16
  x, w = jnp.zeros((num, width)), jnp.zeros((groups, width, width))
  sizes = jnp.full(groups, num // groups, jnp.int32)
  run = jax.jit(jax.grad(lambda x, w: jnp.sum(grouped.grouped_matmul(x, w, sizes)), (0, 1)))
  memory = run.lower(x, w).compile().memory_analysis()
  assert memory.temp_size_in_bytes < 4 * num * groups * width / 4
