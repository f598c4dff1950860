"""A tiny model that vLLM serves on CPU, as views of two seeds in each format that it runs there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import init
from mimo.models.table import named_tensors
from mimo.weights.calibration import calibrate
from mimo.weights.views import ViewSpec, write_view

VOCAB = 512


@pytest.fixture(scope='session')
def config():
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3',
      'architectures': ['Qwen3ForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 64,
      'intermediate_size': 128,
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 32,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1e4,
      'tie_word_embeddings': True,
      'max_position_embeddings': 512,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


def _params(config, seed):
  """Norm weights as a trained model's: all ones leave many values exactly between two codes."""
  leaves, structure = jax.tree.flatten_with_path(init(config, jax.random.key(seed)))
  keys = jax.random.split(jax.random.key(100 + seed), len(leaves))
  out = []
  for key, (path, x) in zip(keys, leaves, strict=True):
    name = jax.tree_util.keystr(path)
    if 'norm' in name:
      x = x * jnp.exp(0.3 * jax.random.normal(key, x.shape))
    elif 'embed' in name:
      x = x * 8.0  # neither a flat distribution nor a point
    out.append(x)
  return jax.tree.unflatten(structure, out)


@pytest.fixture(scope='session')
def views(config, tmp_path_factory):
  """(format, seed) -> view directory, for seeds 0 and 1."""
  root = tmp_path_factory.mktemp('views')
  sequences = np.random.default_rng(1).integers(0, VOCAB, (8, 48), dtype=np.int32)
  scales = calibrate(config, _params(config, 0), list(sequences))
  found = {}
  for seed in (0, 1):
    snapshot = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params(config, seed))
    for name in ('bf16', 'fp8_channel', 'nvfp4_w4a4'):
      found[name, seed] = root / f'{name}_{seed}'
      write_view(
        found[name, seed],
        config,
        named_tensors(config, snapshot),
        ViewSpec(name, input_scales=scales if name == 'nvfp4_w4a4' else None),
        tokenizer_files={},
      )
  return found
