"""A tiny model whose shapes every format can hold."""

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo.models import config as config_lib
from mimo.models import decoder, table

CONFIG = config_lib.ModelConfig(
  family='qwen3',
  vocab_size=48,
  hidden_size=128,
  intermediate_size=128,
  num_layers=2,
  num_heads=8,
  num_kv_heads=4,
  head_dim=32,
  rms_norm_eps=1e-6,
  rope=config_lib.RopeConfig(10_000.0),
  qk_norm=True,
  tie_embeddings=True,
  max_positions=64,
)


@pytest.fixture(scope='session')
def config():
  return CONFIG


@pytest.fixture(scope='session')
def params(config):
  return decoder.init(config, jax.random.key(0))


@pytest.fixture(scope='session')
def tensors(config, params):
  """The BF16 snapshot: (Hugging Face name, tensor)."""
  named = table.named_tensors(config, params)
  return [(name, np.asarray(x).astype(ml_dtypes.bfloat16)) for name, x in named]


@pytest.fixture(scope='session')
def input_scales(config):
  names = (name for name, row, _ in table.hf_params(config) if row.quantisable)
  return {name: 100.0 + i for i, name in enumerate(names)}
