"""Where arrays go on a mesh, and that a sharded embedding looks up the same rows."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mimo.models import parallel as parallel_lib
from mimo.models.parallel import MESH_AXES, Parallel, constrain, lookup


def _parallel(**sizes: int) -> Parallel:
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  devices = jax.devices()[: int(np.prod(shape))]
  axis_types = (AxisType.Auto,) * len(MESH_AXES)
  return Parallel(jax.make_mesh(shape, MESH_AXES, axis_types=axis_types, devices=devices))


def test_an_axis_shards_one_dimension():
  parallel = _parallel(fsdp=2, expert=2, context=2)
  # A matrix's input over all three; that of an expert over those that its stack leaves.
  assert parallel.param((16, 24), ('embed', 'mlp')) == P(('fsdp', 'expert', 'context'), None)
  stack = parallel.param((3, 4, 16, 24), (None, 'expert', 'embed', 'expert_mlp'))
  assert stack == P(None, ('expert',), ('fsdp', 'context'), None)
  # Where 12 rows do not divide over 8 they are split over the first axes that do.
  assert parallel.param((12, 5), ('embed', None)) == P(('fsdp', 'expert'), None)
  assert parallel.param((5, 5), ('embed', None)) == P(None, None)
  hidden = parallel.activation((6, 8, 16), ('rows', 'context', None))
  assert hidden == P(('fsdp',), ('context',), None)
  assert hash(parallel) == hash(_parallel(fsdp=2, expert=2, context=2))


def test_another_mesh_is_refused():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(AxisType.Auto,))
  with pytest.raises(ValueError, match=r"axes \('data',\); expected"):
    Parallel(mesh)


def test_specs():
  spec = P(('tensor', 'fsdp'), None, 'context')
  assert parallel_lib.spec_axes(spec) == ('tensor', 'fsdp', 'context')
  assert parallel_lib.only(spec, ('tensor', 'context')) == P(('tensor',), None, ('context',))
  x = np.ones((2, 3))
  assert constrain(None, x, 'rows', None) is x


@pytest.mark.parametrize('rows', [4, 3])
def test_lookup(rows):
  rng = np.random.default_rng(0)
  table = rng.normal(size=(32, 6)).astype(np.float32)
  tokens = rng.integers(0, 32, (rows, 8)).astype(np.int32)
  weights = rng.normal(size=(rows, 8, 6)).astype(np.float32)
  gradient = np.zeros((32, 6))
  np.add.at(gradient, tokens, np.float64(weights))

  def loss(parallel):
    def run(x):
      y = lookup(parallel, x, tokens)
      return (y * weights).sum(), y

    return jax.jit(jax.value_and_grad(run, has_aux=True))

  for parallel in (None, _parallel(fsdp=2, context=2, tensor=2)):
    x = table
    if parallel is not None:
      x = jax.device_put(x, parallel.sharding(parallel.param(x.shape, ('vocab', None))))
    (_, y), dx = loss(parallel)(x)
    np.testing.assert_array_equal(y, table[tokens])
    np.testing.assert_allclose(dx, gradient, atol=1e-6)
