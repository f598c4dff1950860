"""Every mesh learns the same; every array lives where its rule says."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mimo import objectives
from mimo.trainer import packing, sharding, update
from mimo.trainer.state import TrainerConfig

CONFIG = TrainerConfig(learning_rate=1e-2, eps=1e-6, head_chunk_tokens=16)
LENGTHS = [9, 12, 7, 8, 12, 7, 8, 10]


@pytest.fixture(scope='module')
def batch(make_trajectories):
  return packing.pack(
    make_trajectories(LENGTHS),
    [1.0, -0.5, 0.0, 2.0, -1.0, 0.25, 0.5, -2.0],
    buckets=[packing.Bucket(rows=8, tokens=12, trained=10)],
    num_candidates=4,
    sources=('a', 'b'),
    temperature=1.0,
  )


def _update(model, params, batch, sizes):
  trainer = update.Trainer(
    model,
    CONFIG,
    correction=objectives.arm('sc_mis').correction,
    num_sources=2,
    mesh=sharding.make_mesh(*sizes),
  )
  state = trainer.init_state(params)
  assert jax.tree.map(lambda x: x.sharding, state) == trainer.state_shardings
  state, metrics = trainer.update(state, batch)
  assert jax.tree.map(lambda x: x.sharding, state) == trainer.state_shardings
  return jax.device_get((state, metrics))


@pytest.fixture(scope='module')
def single(model, params, batch):
  return _update(model, params, batch, (1, 1, 1))


@pytest.mark.parametrize('sizes', [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4)])
def test_every_mesh_gives_the_same_update(model, params, batch, single, sizes, capfd):
  state, metrics = _update(model, params, batch, sizes)
  # XLA says so when it replicates an activation for want of a better way.
  assert 'Involuntary full rematerialization' not in capfd.readouterr().err
  expected, expected_metrics = single
  np.testing.assert_allclose(metrics['loss'], expected_metrics['loss'], rtol=1e-5)
  np.testing.assert_allclose(metrics['grad_norm'], expected_metrics['grad_norm'], rtol=1e-5)
  for name, leaf in metrics['aux'].items():
    np.testing.assert_allclose(leaf, expected_metrics['aux'][name], rtol=1e-5, err_msg=name)
  for got, want in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_rules(model):
  params = sharding.param_shardings(model, sharding.make_mesh(1, 2, 4))
  specs = jax.tree.map(lambda x: x.spec, params)
  # The vocabulary over tensor, the embedding's other dimension whole.
  assert specs['embed']['embedding'] == P(('tensor',), None)
  attention = specs['layers']['attention']
  assert attention['q_proj']['kernel'] == P(None, ('fsdp',), ('tensor',), None)
  # Two kv heads do not divide over four: replicated.
  assert attention['k_proj']['kernel'] == P(None, ('fsdp',), None, None)
  assert specs['layers']['mlp']['down_proj']['kernel'] == P(None, ('tensor',), ('fsdp',))
  assert specs['layers']['mlp_norm']['scale'] == P(None, None)


def test_rows_split_where_they_divide(batch):
  (micro,) = batch.micro
  mesh = sharding.make_mesh(2, 4, 1)
  for rows, spec in ((8, ('data', 'fsdp')), (6, ('data',)), (3, None)):
    placed = sharding.place(packing.MicroBatch(*(x[:rows] for x in micro)), mesh)
    assert placed.tokens.sharding.spec == P(spec)
    assert placed.candidate_ids.sharding.spec == P(spec)
    np.testing.assert_array_equal(placed.targets, micro.targets[:rows])


def test_refused():
  with pytest.raises(ValueError, match=r'is \(0, 1, 1\); expected sizes of at least 1'):
    sharding.make_mesh(0, 1, 1)
  with pytest.raises(ValueError, match=r'is \(2, 8, 1\), 16 devices; expected at most 8'):
    sharding.make_mesh(2, 8, 1)
