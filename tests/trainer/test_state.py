"""Settings that make no sense are refused by name."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.trainer import state


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'learning_rate': 0.0}, 'learning_rate is 0.0; expected a number > 0'),
    ({'learning_rate': float('nan')}, 'learning_rate is nan'),
    ({'eps': -1e-8}, 'eps is -1e-08'),
    ({'learning_rate': 1e30}, 'learning_rate is 1e+30; expected a number > 0 and <= 1'),
    ({'max_grad_norm': float('inf')}, 'max_grad_norm is inf'),
    ({'rows': 0}, 'rows is 0; expected a whole number >= 1'),
    ({'row_tokens': 1e3}, 'row_tokens is 1000.0; expected a whole number'),
    ({'rows': 64, 'row_tokens': 2**20}, 'rows is 64 and row_tokens 1048576; expected at most'),
    ({'row_trained_tokens': 2**25}, 'row_trained_tokens is 33554432'),
    ({'weight_decay': -0.1}, 'weight_decay is -0.1; expected a number >= 0'),
    ({'max_grad_norm': -1.0}, 'max_grad_norm is -1.0'),
    ({'warmup_updates': -1}, 'warmup_updates is -1'),
    ({'b1': 1.0}, r'b1 is 1.0; expected a number >= 0 and < 1'),
    ({'b2': -0.1}, 'b2 is -0.1'),
    ({'head_chunk_tokens': 0}, 'head_chunk_tokens is 0; expected a whole number >= 1'),
    ({'offload': ('moment',)}, "offload is 'moment'; expected one of residuals, moments"),
    ({'offload': ('residuals',)}, 'offload holds residuals and remat is False; expected True'),
    ({'compute_dtype': 'float16'}, "compute_dtype is 'float16'; expected one of float32, bfloat16"),
  ],
)
def test_refused(change, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    state.TrainerConfig(**({'learning_rate': 1e-3} | change))


@pytest.mark.parametrize(
  ('text', 'sizes'),
  [
    ('', {}),
    ('fsdp=4,context=2', {'fsdp': 4, 'context': 2}),
    (' expert = 4 , data=1,', {'expert': 4, 'data': 1}),
  ],
)
def test_mesh_sizes(text, sizes) -> None:
  assert state.TrainerConfig(mesh=text).mesh_sizes() == sizes


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('contxt=2', r"^mesh is 'contxt'; expected one of .*; did you mean 'context'"),
    ('fsdp', r"^mesh is 'fsdp'; expected one size of fsdp, a whole number"),
    ('fsdp=two', r"^mesh is 'fsdp=two'; expected one size of fsdp"),
    ('fsdp=-1', r"^mesh is 'fsdp=-1'; expected one size of fsdp"),
    ('fsdp=²', r"^mesh is 'fsdp=²'; expected one size of fsdp"),
    ('fsdp=2,fsdp=4', r"^mesh is 'fsdp=2,fsdp=4'; expected one size of fsdp"),
  ],
)
def test_mesh_sizes_names_what_is_wrong(text, message) -> None:
  with pytest.raises(ValueError, match=message):
    state.TrainerConfig(mesh=text)


def test_the_study_is_the_default():
  config = state.TrainerConfig(learning_rate=1e-6)
  assert (config.b1, config.b2, config.weight_decay) == (0.9, 0.98, 0.1)
  hash(config)


def test_warm_up_then_constant():
  config = state.TrainerConfig(learning_rate=0.4, warmup_updates=4)
  rates = [float(state.learning_rate(config, jnp.int32(n))) for n in range(6)]
  np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, 0.4, 0.4], rtol=1e-6)
  config = state.TrainerConfig(learning_rate=0.4, warmup_updates=0)
  np.testing.assert_allclose(state.learning_rate(config, jnp.int32(0)), 0.4, rtol=1e-6)


def test_new_state_is_float32_and_counts_from_zero(model, params):
  new = state.new_state(model, state.TrainerConfig(learning_rate=1e-3), params)
  floats = [x for x in jax.tree.leaves(new) if x.ndim]
  assert {x.dtype for x in floats} == {np.dtype('float32')}
  # Masters and two moments.
  assert sum(x.size for x in floats) == 3 * sum(x.size for x in jax.tree.leaves(params))
  assert (int(new.update), int(new.skipped)) == (0, 0)
