"""Calibrated input scales against amax measured here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import decoder, table
from mimo.models.config import MoEConfig
from mimo.weights import calibration

SEQUENCES = [
  np.array([1, 2, 3, 4, 5], np.int32),
  np.array([7, 8], np.int32),
  np.array([9], np.int32),
]


@pytest.fixture(scope='module')
def scales(config, params):
  return calibration.calibrate(config, params, SEQUENCES, batch=2)


def test_first_projection_by_hand(config, params, scales):
  # The input of layer 0's queries is the normalised embedding of each token.
  norm = params['layers']['mixer_norm']['scale'][0]
  tokens = np.concatenate(SEQUENCES)
  x = np.asarray(params['embed']['embedding'], np.float64)[tokens]
  x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-6) * np.asarray(norm)
  expected = 448 * 6 / np.abs(x).max()
  assert scales['model.layers.0.self_attn.q_proj.weight'] == pytest.approx(expected, rel=1e-5)


def test_every_projection_has_one_and_fused_ones_share_it(config, scales):
  quantisable = [name for name, row, _ in table.hf_params(config) if row.quantisable]
  assert list(scales) == quantisable
  for layer in range(2):
    attention = {scales[f'model.layers.{layer}.self_attn.{p}_proj.weight'] for p in 'qkv'}
    mlp = {scales[f'model.layers.{layer}.mlp.{p}_proj.weight'] for p in ('gate', 'up')}
    assert len(attention) == len(mlp) == 1
  assert len(set(scales.values())) == 8


def test_batching_and_padding_change_nothing(config, params, scales):
  # All in one row, as segments.
  tokens = jnp.asarray(np.concatenate(SEQUENCES))[None]
  segment_ids = jnp.asarray([[1, 1, 1, 1, 1, 2, 2, 3]], jnp.int32)
  positions = jnp.asarray([[0, 1, 2, 3, 4, 0, 1, 0]], jnp.int32)
  measure = jax.jit(functools.partial(decoder.input_amax, config))
  amax = measure(params, tokens, segment_ids, positions)
  down = amax['layers', 'mlp', 'down_proj', 'kernel']
  for layer in range(2):
    name = f'model.layers.{layer}.mlp.down_proj.weight'
    assert scales[name] == pytest.approx(448 * 6 / float(down[layer]), rel=1e-4)


def test_zeros_give_one(config, params):
  dead = {**params, 'embed': {'embedding': jnp.zeros_like(params['embed']['embedding'])}}
  scales = calibration.calibrate(config, dead, SEQUENCES[2:], batch=1)
  assert set(scales.values()) == {1.0}


@pytest.mark.parametrize('sequences', [[], [np.zeros(0, np.int32)]])
def test_nothing_to_calibrate_on(config, params, sequences):
  with pytest.raises(ValueError, match='expected at least one and none empty'):
    calibration.calibrate(config, params, sequences)


def test_an_expert_never_reached_gets_what_its_layer_met(config):
  """Two layers of three experts; the second expert of layer 0 saw no token, and layer 1 only it."""
  moe = MoEConfig(3, 1, 128, 0, True)
  model = dataclasses.replace(config, family='qwen3_moe', intermediate_size=0, moe=moe)
  amax = {row.path: np.ones(row.lead_shape, np.float32) for row in table.table(model)}
  stack = ('layers', 'moe', 'experts')
  for name in ('gate_proj', 'up_proj'):
    amax[*stack, name, 'kernel'] = np.array([[2, 0, 4], [0, 8, 0]], np.float32)
  scales = calibration._scales(model, amax)
  expected = [[2, 4, 4], [8, 8, 8]]
  for layer, expert in np.ndindex(2, 3):
    at = f'model.layers.{layer}.mlp.experts.{expert}'
    for name in ('gate_proj', 'up_proj'):
      assert scales[f'{at}.{name}.weight'] == pytest.approx(448 * 6 / expected[layer][expert])
    assert scales[f'{at}.down_proj.weight'] == 448 * 6
