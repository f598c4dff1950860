"""The head over a mesh: the numbers of one device, and one sum of its gradient."""

import functools
import re

import jax
import numpy as np
import pytest

from mimo.models.parallel import Parallel
from mimo.trainer import sharding
from mimo.trainer.head import trained_logps

B, T, D, V, M, K = 4, 16, 8, 64, 6, 3


@pytest.fixture(scope='module')
def inputs():
  rng = np.random.default_rng(0)
  ids = rng.integers(-1, V, (B, M, 1 + K)).astype(np.int32)
  return (
    rng.normal(size=(B, T, D)).astype(np.float32),
    rng.normal(size=(D, V)).astype(np.float32),
    rng.integers(0, T, (B, M)).astype(np.int32),
    ids,
    rng.normal(size=ids.shape).astype(np.float32),
    rng.normal(size=(B, M)).astype(np.float32),
  )


def _dense(hidden, head, predict, ids):
  """float64: log-probs and entropy from whole rows of logits, divided by a temperature of 0.7."""
  rows = np.take_along_axis(np.float64(hidden), predict[..., None], axis=1)
  z = rows @ np.float64(head) / 0.7
  logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
  picked = np.take_along_axis(logp, np.maximum(ids, 0), axis=-1)
  return np.where(ids >= 0, picked, 0), -(np.exp(logp) * logp).sum(-1)


def _program(parallel, weights, entropy_weights):
  run = functools.partial(trained_logps, parallel, temperature=0.7, chunk=2)

  def loss(hidden, head, predict, ids):
    logps, entropy = run(hidden, head, predict, ids)
    return (logps * weights).sum() + (entropy * entropy_weights).sum(), (logps, entropy)

  return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def _on_mesh(inputs, **sizes):
  parallel = Parallel(sharding.make_mesh(**sizes))
  hidden, head, predict, ids, *weights = inputs
  place = lambda x, spec: jax.device_put(x, parallel.sharding(spec))
  rows = ('rows', 'context', None)
  args = (
    place(hidden, parallel.activation(hidden.shape, rows)),
    place(head, parallel.param(head.shape, (None, 'vocab'))),
    place(predict, parallel.activation(predict.shape, rows[:2])),
    place(ids, parallel.activation(ids.shape, rows)),
  )
  compiled = _program(parallel, *weights).lower(*args).compile()
  return jax.device_get(compiled(*args)), compiled.as_text()


# Six trained tokens are no multiple of four devices, and rows of 4 none of 8.
@pytest.mark.parametrize(
  'sizes',
  [
    {'fsdp': 2, 'context': 2, 'tensor': 2},
    {'data': 2, 'context': 4},
    {'data': 2, 'fsdp': 4},
  ],
)
def test_any_mesh(inputs, sizes):
  (_, (logps, entropy)), grads = _on_mesh(inputs)[0]
  want_logps, want_entropy = _dense(*inputs[:4])
  np.testing.assert_allclose(logps, want_logps, atol=1e-5)
  np.testing.assert_allclose(entropy, want_entropy, atol=1e-5)
  ((_, (got_logps, got_entropy)), got_grads), text = _on_mesh(inputs, **sizes)
  np.testing.assert_allclose(got_logps, logps, atol=1e-5)
  np.testing.assert_allclose(got_entropy, entropy, atol=1e-5)
  for got, want in zip(got_grads, grads, strict=True):
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
  # Nothing of the head's size is sent within a loop: a loop's body is a computation of its own.
  for body in re.split(r'\n\n', text):
    if body.startswith('ENTRY'):
      continue
    for found in re.findall(r'= \(?f32\[(\d+),(\d+)\]\S* (?:all-|reduce-sc|collective)', body):
      assert D not in map(int, found) or V // sizes.get('tensor', 1) not in map(int, found), found
