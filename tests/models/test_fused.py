"""The kernel itself needs a GPU: XLA's implementation of the same function stands in for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import blockwise, fused

WHOLE = np.array([[3] * 20, [1] * 13 + [0] * 7, [0] * 20])


def arrays(ids):
  rng = np.random.default_rng(0)
  shapes = [(*ids.shape, heads, 8) for heads in (4, 2, 2, 4)]
  return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def results(attend, ids):
  q, k, v, dout = arrays(ids)
  out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, jnp.asarray(ids)), q, k, v)
  return out, *pull(dout)


def check(got, expected):
  for ours, theirs in zip(got, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_applies_to_rows_of_one_segment_and_padding_after_it():
  assert fused.applies(WHOLE)
  for other in ([1] * 9 + [2] * 11, [0] + [1] * 19, [1] * 9 + [0] + [1] * 10):
    assert not fused.applies(np.array([[1] * 20, other]))


def test_attend_equals_the_dense_form():
  attend = functools.partial(fused.attend, implementation='xla')
  check(results(attend, WHOLE), results(blockwise.attend, WHOLE))


def test_no_kernel_without_a_gpu():
  assert not fused.serves(jnp.zeros((1, 1, 1, 64), jnp.bfloat16))


@pytest.mark.parametrize('gpu', [False, True])
def test_rows_take_the_form_that_can_do_them(monkeypatch, gpu):
  """As on a machine with a GPU, in programs for it and for its CPU."""
  calls = []

  def kernel(*args):
    jax.debug.callback(lambda: calls.append('kernel'))
    return attend(*args, implementation='xla')

  attend = fused.attend
  monkeypatch.setattr(fused, 'attend', kernel)
  monkeypatch.setattr(fused, 'serves', lambda q: True)
  if gpu:
    pick = lambda *args, cuda, default: cuda(*args)
    monkeypatch.setattr(jax.lax, 'platform_dependent', pick)
  packed = np.array([[1] * 9 + [2] * 11, [1] * 20, [1] * 20])
  for ids, used in ((WHOLE, gpu), (packed, False)):
    calls.clear()
    got = results(functools.partial(blockwise.attend, block=7), ids)
    jax.effects_barrier()
    assert bool(calls) == used
    check(got, results(functools.partial(blockwise.attend, block=64), ids))
