"""The decoder and its checkpoints against transformers, on tiny random models."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.weights import huggingface

pytestmark = pytest.mark.reference

SIZES = {
  'vocab_size': 48,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'max_position_embeddings': 64,
}
LLAMA3 = {
  'rope_theta': 10_000.0,
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
LINEAR = {'rope_theta': 10_000.0, 'rope_type': 'linear', 'factor': 4.0}

# name -> (family, what the config says beside its sizes)
MODELS = {
  'qwen3_tied': ('Qwen3', {'tie_word_embeddings': True}),
  'qwen3_untied': ('Qwen3', {'tie_word_embeddings': False}),
  'qwen3_tied_but_differing': ('Qwen3', {'tie_word_embeddings': True}),
  'qwen3_linear': ('Qwen3', {'rope_parameters': LINEAR, 'tie_word_embeddings': False}),
  'llama': ('Llama', {'tie_word_embeddings': False, 'rms_norm_eps': 1e-5}),
  'llama_llama3': ('Llama', {'rope_parameters': LLAMA3, 'tie_word_embeddings': True}),
}

forward = jax.jit(decoder.forward, static_argnums=0)
extend = jax.jit(decoder.extend, static_argnums=0)


def save(name, directory, dtype='float32'):
  """Saves a random model with transformers, and differing heads where its name says so."""
  import torch
  import transformers

  family, extra = MODELS[name]
  config = getattr(transformers, f'{family}Config')(**SIZES, **extra)
  torch.manual_seed(0)
  model = getattr(transformers, f'{family}ForCausalLM')(config)
  with torch.no_grad():
    for parameter in model.parameters():  # norms start at 1, which would hide one left out
      parameter.add_(0.1 * torch.randn_like(parameter))
  model.to(getattr(torch, dtype)).save_pretrained(directory)
  if name == 'qwen3_tied_but_differing':
    head = np.random.default_rng(1).standard_normal((48, 32)).astype(np.float32)
    reader = huggingface.TensorReader(directory)
    tensors = [(key, reader.read(key)) for key in reader.names()]
    huggingface.write_tensors(directory, [*tensors, ('lm_head.weight', head)])
    assert json.loads((directory / 'config.json').read_text())['tie_word_embeddings']


def reference_logits(directory, tokens):
  import torch
  import transformers

  model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
  with torch.no_grad():
    return model.eval()(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def our_logits(config, params, tokens):
  ones = np.ones(tokens.shape, np.int32)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  hidden = forward(config, params, tokens, ones, positions)
  return np.asarray(hidden @ decoder.head_matrix(config, params))


@pytest.fixture(scope='module')
def tokens():
  return np.random.default_rng(0).integers(0, 48, (2, 60)).astype(np.int32)


@pytest.mark.parametrize('name', MODELS)
def test_logits_both_ways(name, tokens, tmp_path):
  save(name, tmp_path / 'theirs')
  expected = reference_logits(tmp_path / 'theirs', tokens)
  assert np.abs(expected).max() > 1
  config, params = huggingface.read_model(tmp_path / 'theirs')
  assert config.tie_embeddings == (name in ('qwen3_tied', 'llama_llama3'))
  np.testing.assert_allclose(our_logits(config, params, tokens), expected, atol=1e-4, rtol=0)

  huggingface.write_model(
    tmp_path / 'ours', config, params, {}, dtype=np.float32, shard_bytes=20_000
  )
  np.testing.assert_array_equal(reference_logits(tmp_path / 'ours', tokens), expected)


def test_cached_logits(tokens, tmp_path):
  save('llama_llama3', tmp_path)
  expected = reference_logits(tmp_path, tokens)
  config, params = huggingface.read_model(tmp_path)
  cache = decoder.init_cache(config, 2, 60, jnp.float32)
  for start in range(0, 60, 20):
    chunk, at = tokens[:, start : start + 20], np.full(2, start)
    hidden, cache = extend(config, params, cache, chunk, at, np.full(2, 20))
    logits = hidden @ decoder.head_matrix(config, params)
    np.testing.assert_allclose(logits, expected[:, start : start + 20], atol=1e-4, rtol=0)


@pytest.mark.parametrize('name', ['qwen3_untied', 'llama_llama3'])
def test_bf16_round_trip_keeps_every_byte(name, tmp_path):
  save(name, tmp_path / 'theirs', 'bfloat16')
  config, params = huggingface.read_model(tmp_path / 'theirs')
  huggingface.write_model(tmp_path / 'ours', config, params, {})
  theirs, ours = (huggingface.TensorReader(tmp_path / side) for side in ('theirs', 'ours'))
  assert ours.names() == theirs.names()
  for tensor in theirs.names():
    assert ours.info(tensor).dtype == theirs.info(tensor).dtype == 'BF16'
    assert ours.read(tensor).tobytes() == theirs.read(tensor).tobytes()


@pytest.mark.parametrize('name', MODELS)
def test_config_is_read_back_by_transformers(name, tmp_path):
  """What transformers reads from our config.json is what it wrote."""
  import transformers

  save(name, tmp_path)
  (tmp_path / 'config.json').rename(tmp_path / 'theirs.json')
  before = transformers.AutoConfig.from_pretrained(tmp_path / 'theirs.json').to_dict()
  config = ModelConfig.from_hf(json.loads((tmp_path / 'theirs.json').read_text()))
  huggingface.write_config(tmp_path, config.to_hf())
  after = transformers.AutoConfig.from_pretrained(tmp_path / 'config.json').to_dict()
  assert before.pop('_name_or_path') != after.pop('_name_or_path')
  assert after == before
