"""A tiny model, and references computed from its full forward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import forward, head_matrix, init
from mimo.types import SamplingParams

VOCAB = 48


@pytest.fixture(scope='session')
def config():
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3',
      'architectures': ['Qwen3ForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 32,
      'intermediate_size': 48,
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 16,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1e4,
      'tie_word_embeddings': True,
      'max_position_embeddings': 64,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


@pytest.fixture(scope='session')
def make_params(config):
  """Params of a seed, scaled so that the distribution over tokens is neither flat nor a point."""

  def make(seed):
    params = init(config, jax.random.key(seed))
    params['embed']['embedding'] = params['embed']['embedding'] * 15.0
    return params

  return make


@pytest.fixture(scope='session')
def reference_logits(config):
  """(params, ids [T]) -> logits [T, V] float64, from one full forward."""

  @jax.jit
  def run(params, tokens, segments):
    positions = jnp.arange(tokens.shape[1])[None]
    hidden = forward(config, params, tokens, segments, positions)
    return hidden @ head_matrix(config, params)

  def logits(params, ids):
    tokens, segments = np.zeros((1, 64), np.int32), np.zeros((1, 64), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    return np.asarray(run(params, tokens, segments))[0, : len(ids)].astype(np.float64)

  return logits


@pytest.fixture(scope='session')
def sampling():
  """Returns SamplingParams, whole vocabulary at temperature 1 unless told otherwise."""

  def make(**changes):
    values = {
      'temperature': 1.0,
      'top_p': 1.0,
      'top_k': 0,
      'candidates': 8,
      'max_turn_tokens': 6,
      'stop_ids': (),
    }
    return SamplingParams(**(values | changes))

  return make
