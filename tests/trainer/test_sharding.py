"""Every mesh learns the same; every array lives where its rule says."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import sharding_matrix
from mimo import objectives
from mimo.trainer import packing, sharding, update
from mimo.trainer.state import TrainerConfig

CONFIG = TrainerConfig(
  learning_rate=1e-2, eps=1e-6, max_grad_norm=0.0, warmup_updates=0, head_chunk_tokens=16
)
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
    temperature=1.0,
    num_sources=2,
    mesh=sharding.make_mesh(**sizes),
  )
  state = trainer.init_state(params)
  assert jax.tree.map(lambda x: x.sharding, state) == trainer.state_shardings
  state, metrics = trainer.update(state, batch)
  assert jax.tree.map(lambda x: x.sharding, state) == trainer.state_shardings
  return jax.device_get((state, metrics))


@pytest.mark.parametrize(
  'sizes', [{'data': 2, 'fsdp': 2, 'tensor': 2}, {'expert': 2, 'context': 4}]
)
def test_every_mesh_gives_the_same_update(model, params, batch, sizes, capfd):
  state, metrics = _update(model, params, batch, sizes)
  # XLA says so when it replicates an activation for want of a better way.
  assert 'Involuntary full rematerialization' not in capfd.readouterr().err
  expected, expected_metrics = _update(model, params, batch, {})
  np.testing.assert_allclose(metrics['loss'], expected_metrics['loss'], rtol=1e-5)
  np.testing.assert_allclose(metrics['grad_norm'], expected_metrics['grad_norm'], rtol=1e-5)
  for name, leaf in metrics['aux'].items():
    np.testing.assert_allclose(leaf, expected_metrics['aux'][name], rtol=1e-5, err_msg=name)
  for got, want in zip(*map(jax.tree.leaves, (state.params, expected.params)), strict=True):
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.fixture
def quick_to_compile():
  """Compilation takes the time of these tests, not what is compiled."""
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', False)


# The whole matrix is `python -m benchmarks.sharding_matrix`.
@pytest.mark.parametrize(
  ('name', 'meshes'),
  [('dense', ('fsdp=2,context=2,tensor=2',)), ('hybrid', ('expert=4,context=2',))],
)
def test_packed_rows_cross_devices(name, meshes, quick_to_compile):
  case = sharding_matrix.make_case(name)
  shard = sharding_matrix.TOKENS // 8
  ids = case.micro.segment_ids
  assert (ids[:, shard - 1 : -1 : shard] == ids[:, shard::shard]).any()
  want = sharding_matrix.totals(case, '')
  for mesh in meshes:
    errors = sharding_matrix.compare(sharding_matrix.totals(case, mesh), want)
    assert max(errors.loss, errors.gradient) <= 1e-5, (mesh, errors)


def test_rules(model):
  params = sharding.param_shardings(model, sharding.make_mesh(fsdp=2, tensor=4))
  specs = jax.tree.map(lambda x: x.spec, params)
  # The vocabulary over both, the embedding's other dimension whole.
  assert specs['embed']['embedding'] == P(('tensor', 'fsdp'), None)
  attention = specs['layers']['attention']
  assert attention['q_proj']['kernel'] == P(None, ('fsdp',), ('tensor',), None)
  # Two kv heads do not divide over four: replicated.
  assert attention['k_proj']['kernel'] == P(None, ('fsdp',), None, None)
  assert specs['layers']['mlp']['down_proj']['kernel'] == P(None, ('tensor',), ('fsdp',))
  assert specs['layers']['mlp_norm']['scale'] == P(None, None)


def test_micro_batches_split_where_they_divide(batch):
  (micro,) = batch.micro
  mesh = sharding.make_mesh(data=2, expert=2, context=2)
  for rows, spec in ((8, ('data', 'expert')), (6, ('data',)), (3, None)):
    placed = sharding.place(jax.tree.map(lambda x, rows=rows: x[:rows], micro), mesh)
    assert placed.tokens.sharding.spec == P(spec, ('context',))
    assert placed.candidate_ids.sharding.spec == P(spec, ('context',), None)
    np.testing.assert_array_equal(placed.targets, micro.targets[:rows])
  odd = sharding.place(micro._replace(adv=micro.adv[:, :9]), mesh)
  assert odd.adv.sharding.spec == P(('data', 'expert'), None)


def test_refused():
  with pytest.raises(ValueError, match=r'data 0, .* tensor 1; expected sizes of at least 1'):
    sharding.make_mesh(data=0)
  with pytest.raises(ValueError, match=r'fsdp 8, .*: 16 devices; expected at most 8'):
    sharding.make_mesh(data=2, fsdp=8)
