"""Routers that no update changes: no gradient and no decay."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import MoEConfig
from mimo.models.table import ROUTER, leaf, nest, table
from mimo.trainer.state import TrainerConfig, frozen_paths, hold_frozen, optimizer


@pytest.fixture(scope='module')
def experts(model):
  return dataclasses.replace(
    model, family='qwen3_moe', intermediate_size=0, moe=MoEConfig(4, 2, 8, 0, True)
  )


@pytest.mark.parametrize('freeze', [True, False])
def test_no_gradient_and_no_decay(experts, freeze):
  config = TrainerConfig(
    learning_rate=1.0, warmup_updates=0, weight_decay=0.5, freeze_router=freeze
  )
  rows = table(experts)
  params = nest({row.path: jnp.full(row.leaf_shape, 2.0) for row in rows})

  def total(params):
    return sum(jnp.sum(x) for x in jax.tree.leaves(hold_frozen(experts, config, params)))

  grads = jax.grad(total)(params)
  transformation = optimizer(experts, config)
  nothing = jax.tree.map(jnp.zeros_like, params)
  steps, _ = transformation.update(nothing, transformation.init(params), params)
  for row in rows:
    frozen = freeze and row.path[-2:] == ROUTER
    assert np.all(leaf(grads, row.path) == (0.0 if frozen else 1.0))
    # Half of 2 for matrices, as in every other step of this optimiser.
    decayed = len(row.shape) > 1 and not frozen
    np.testing.assert_allclose(leaf(steps, row.path), 1.0 if decayed else 0.0)


def test_only_routers_are_frozen(experts, model):
  config = TrainerConfig(learning_rate=1.0, warmup_updates=0, freeze_router=True)
  assert frozen_paths(experts, config) == {('layers', 'moe', *ROUTER)}
  assert frozen_paths(model, dataclasses.replace(config, freeze_router=False)) == frozenset()
  with pytest.raises(ValueError, match='freeze_router is True of a qwen3 model; expected one with'):
    frozen_paths(model, config)
