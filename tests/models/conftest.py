"""A tiny decoder: two layers, grouped heads, untied and with query and key norms."""

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


@pytest.fixture(scope='session')
def config():
  return CONFIG


@pytest.fixture(scope='session')
def params(config):
  """Norm scales are perturbed: at their initial 1, one that is never applied would not show."""
  fresh = decoder.init(config, jax.random.key(0))
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda x: x + 0.1 * jnp.asarray(rng.standard_normal(x.shape), x.dtype), fresh)
