"""What is published is what the trainer computes with."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mimo.models import decoder
from mimo.models.table import from_named_tensors, table
from mimo.trainer import rounding
from mimo.weights.publication import Snapshot


def test_rounding_under_jit_is_the_cast_to_bf16():
  # Ties to even both ways, a carry into the exponent, subnormals, signed zeros, infinity.
  special = [1 + 2**-8, 1 + 3 * 2**-8, 1.9999999, -(2**-130), 1e-40, 0.0, -0.0, np.inf, 3.38e38]
  random = (
    np.random.default_rng(0).normal(size=4096) * 10.0 ** np.arange(-20, 20).repeat(103)[:4096]
  )
  x = np.concatenate([special, random]).astype(np.float32)
  with np.errstate(over='ignore'):
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
  got = np.asarray(jax.jit(rounding.policy_params)(x))
  assert got.dtype == np.float32
  # Subnormals may be flushed to zero on a device; no weight that matters is one.
  normal = np.abs(x) >= np.finfo(np.float32).tiny
  np.testing.assert_array_equal(got[normal], expected[normal])
  assert (got[normal] != x[normal]).mean() > 0.9


def test_read_back_computes_the_same_bit_for_bit(model, params):
  tensors = dict(Snapshot(model, params))
  assert {x.dtype for x in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
  stacked = sum(row.layers is not None for row in table(model))
  assert len(tensors) == stacked * model.num_layers + len(table(model)) - stacked
  assert tensors['model.layers.1.mlp.down_proj.weight'].shape == (16, 24)
  read = from_named_tensors(model, tensors.__getitem__, np.float32)

  tokens = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
  segments = jnp.array([[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]])
  positions = jnp.array([[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]])

  @jax.jit
  def trainer(params):
    policy = rounding.policy_params(params)
    return decoder.forward(model, policy, tokens, segments, positions)

  @jax.jit
  def reader(params):
    return decoder.forward(model, params, tokens, segments, positions)

  np.testing.assert_array_equal(trainer(params), reader(read))
  assert (np.asarray(trainer(params)) != np.asarray(reader(params))).any()
