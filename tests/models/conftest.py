"""Tiny decoders: one of attention and dense feed-forwards, one of everything else.

The first has two layers, grouped heads, is untied and has query and key norms. The hybrid has a
delta net and gated attention in turn, twice, and experts with a shared one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import config as config_lib
from mimo.models import decoder

CONFIG = config_lib.ModelConfig(
  family='qwen3',
  vocab_size=48,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=16,
  rms_norm_eps=1e-6,
  rope=config_lib.RopeConfig(10_000.0),
  qk_norm=True,
  tie_embeddings=False,
  max_positions=64,
)

HYBRID = dataclasses.replace(
  CONFIG,
  family='qwen3_5_moe_text',
  intermediate_size=0,
  num_layers=4,
  rope=config_lib.RopeConfig(10_000.0, partial_rotary_factor=0.25),
  pattern=(config_lib.DELTA, config_lib.ATTENTION),
  delta=config_lib.DeltaConfig(
    num_key_heads=2, num_value_heads=4, key_head_dim=8, value_head_dim=12, conv_size=4
  ),
  moe=config_lib.MoEConfig(
    num_experts=6,
    experts_per_token=2,
    intermediate_size=16,
    shared_intermediate_size=32,
    norm_topk_prob=True,
  ),
)


@pytest.fixture(scope='session')
def config():
  return CONFIG


@pytest.fixture(scope='session')
def hybrid():
  return HYBRID


@pytest.fixture(scope='session')
def hybrid_params(hybrid):
  """As `params`; delta nets remember from a token to hundreds."""
  fresh = decoder.init(hybrid, jax.random.key(0))
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: x + 0.1 * jnp.asarray(rng.standard_normal(x.shape), x.dtype), fresh
  )
  delta = params['layers']['0']['delta']
  delta['A_log'] = jnp.asarray(rng.uniform(-6, 1, delta['A_log'].shape), jnp.float32)
  return params


@pytest.fixture(scope='session')
def params(config):
  """Norm scales are perturbed: at their initial 1, one that is never applied would not show."""
  fresh = decoder.init(config, jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: x + 0.1 * jnp.asarray(rng.standard_normal(x.shape), x.dtype), fresh)
