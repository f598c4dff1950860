"""Neither micro-batches, nor packing, nor the mesh change the loss or its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mimo.objectives import arm, candidate_logps, merge_aux, policy_loss

N, D, V, K, CHUNK = 64, 16, 128, 9, 16
ARM = arm('sc_mis_topp').correction


@pytest.fixture(scope='module')
def problem():
  """Hidden states, a head, and records of a sampler that is somewhat off the policy."""
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(N, D)).astype(np.float32)
  head = rng.normal(0, 0.5, (D, V)).astype(np.float32)
  z = hidden @ head + rng.normal(0, 1.2, (N, V))
  logq = (z - np.log(np.exp(z).sum(-1, keepdims=True))).astype(np.float32)
  order = np.argsort(-logq, axis=-1)[:, :K].astype(np.int32)
  full = np.arange(N) % 2 == 0
  record = np.take_along_axis(logq, order, -1)
  record[full] -= np.log(np.exp(record[full]).sum(-1, keepdims=True))
  at = rng.integers(0, K, N)
  rows = {
    'hidden': hidden,
    'token': order[np.arange(N), at],
    'candidate_ids': order,
    'logp_sampler': record[np.arange(N), at],
    'logp_sampler_candidates': record,
    'full_support': full,
    'adv': rng.normal(size=N).astype(np.float32),
    'mask': rng.random(N) < 0.8,
    'source': (np.arange(N) % 3).astype(np.int32),
  }
  return head, rows


@functools.partial(jax.jit, static_argnames='chunk')
def _update(head, rows, denominator, chunk=CHUNK):
  """Returns loss, aux, and gradients in the head and the hidden states."""

  def loss(head, hidden):
    rest = {name: x for name, x in rows.items() if name not in ('hidden', 'token')}
    ids = jnp.concatenate([rows['token'][:, None], rows['candidate_ids']], axis=-1)
    logps, _ = candidate_logps(hidden, head, ids, temperature=1.0, chunk=chunk)
    return policy_loss(
      logp_trainer=logps[:, 0],
      logp_trainer_candidates=logps[:, 1:],
      correction=ARM,
      denominator=denominator,
      num_sources=3,
      **rest,
    )

  grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (value, aux), (dhead, dhidden) = grad(head, rows['hidden'])
  return value, aux, dhead, dhidden


def _close(got, want):
  """Within 1e-5 of the whole array's size."""
  got, want = np.float64(got), np.float64(want)
  assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.fixture(scope='module')
def whole(problem):
  head, rows = problem
  out = _update(head, rows, None)
  _, aux, dhead, dhidden = out
  for name in ('masked_low', 'masked_high', 'cut_tokens', 'head_tokens'):
    assert np.sum(aux[name]) > 0, name  # the corrections are at work
  assert np.linalg.norm(dhead) > 0.01 and np.linalg.norm(dhidden) > 0.01
  return out


@pytest.mark.parametrize('sizes', [(32, 32), (8,) * 8, (1,) * 64])
def test_micro_batches(sizes, problem, whole):
  head, rows = problem
  count = float(rows['mask'].sum())
  parts, start = [], 0
  for size in sizes:
    part = {name: x[start : start + size] for name, x in rows.items()}
    parts.append(_update(head, part, count))
    start += size
  _close(sum(part[0] for part in parts), whole[0])
  _close(sum(part[2] for part in parts), whole[2])
  _close(np.concatenate([part[3] for part in parts]), whole[3])
  for name, leaf in functools.reduce(merge_aux, (part[1] for part in parts)).items():
    np.testing.assert_allclose(leaf, whole[1][name], rtol=1e-5, err_msg=name)


def test_packing(problem, whole):
  """Rows shuffled among padding that holds garbage."""
  head, rows = problem
  rng = np.random.default_rng(5)
  at = rng.permutation(N + 16)[:N]
  packed = {}
  for name, x in rows.items():
    filler = np.nan if x.dtype == np.float32 else 1
    packed[name] = np.full((N + 16, *x.shape[1:]), filler, x.dtype)
    packed[name][at] = x
  packed['hidden'] = np.nan_to_num(packed['hidden'])
  packed['mask'] &= np.isin(np.arange(N + 16), at)
  loss, aux, dhead, dhidden = _update(head, packed, None)
  _close(loss, whole[0])
  _close(dhead, whole[2])
  _close(np.asarray(dhidden)[at], whole[3])
  for name, leaf in aux.items():
    np.testing.assert_allclose(leaf, whole[1][name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize('shape', [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)])
def test_any_mesh(shape, problem, whole):
  head, rows = problem
  mesh = jax.make_mesh(shape, ('data', 'fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 3)
  place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
  head = place(head, 'fsdp', 'tensor')
  rows = {name: place(x, ('data', 'fsdp')) for name, x in rows.items()}
  loss, aux, dhead, dhidden = _update(head, rows, None)
  _close(loss, whole[0])
  _close(dhead, whole[2])
  _close(dhidden, whole[3])
  for name, leaf in aux.items():
    np.testing.assert_allclose(leaf, whole[1][name], rtol=1e-5, err_msg=name)
