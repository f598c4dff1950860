"""Mixtures of experts in and out, against transformers and compressed-tensors."""

import json

import ml_dtypes
import numpy as np
import pytest

from mimo.models.table import hf_params, named_tensors
from mimo.weights import checkpoints, huggingface, shards, views

pytestmark = pytest.mark.reference

BF16 = ml_dtypes.bfloat16
SIZES = {
  'vocab_size': 64,
  'hidden_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 2,
  'head_dim': 64,
  'num_experts': 3,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 128,
  'max_position_embeddings': 64,
}
HYBRID = SIZES | {
  'shared_expert_intermediate_size': 128,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 64,
  'linear_value_head_dim': 64,
  'layer_types': ['linear_attention', 'full_attention'],
}
VISION = {
  'depth': 1,
  'hidden_size': 32,
  'intermediate_size': 32,
  'num_heads': 2,
  'out_hidden_size': 128,
  'patch_size': 4,
  'num_position_embeddings': 16,
}


def make(family, tied):
  import torch
  import transformers

  torch.manual_seed(0)
  if family == 'qwen3_moe':
    config = transformers.Qwen3MoeConfig(**SIZES, tie_word_embeddings=tied)
    model = transformers.Qwen3MoeForCausalLM(config)
  elif family == 'qwen3_5_moe_text':
    config = transformers.Qwen3_5MoeTextConfig(**HYBRID, tie_word_embeddings=tied)
    model = transformers.Qwen3_5MoeForCausalLM(config)
  else:
    config = transformers.Qwen3_5MoeConfig(
      text_config=HYBRID | {'tie_word_embeddings': tied},
      vision_config=VISION,
      tie_word_embeddings=tied,
    )
    model = transformers.Qwen3_5MoeForConditionalGeneration(config)
  with torch.no_grad():
    for parameter in model.parameters():  # norms start at 0 or 1, which would hide one left out
      parameter.add_(0.05 * torch.randn_like(parameter))
  return model.to(torch.bfloat16)


def logits(family, directory):
  import torch
  import transformers

  loader = transformers.AutoModelForCausalLM
  if family == 'qwen3_5_moe':
    loader = transformers.Qwen3_5MoeForConditionalGeneration
  model, loaded = loader.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
  assert not loaded['missing_keys'] and not loaded['unexpected_keys']
  with torch.no_grad():
    return model.eval()(torch.arange(24)[None]).logits.numpy()


def write_fused(model, directory):
  """Its parameters by the names of its modules, which is how the publisher stores them."""
  import torch

  directory.mkdir()
  held = {name: x.view(torch.uint16).numpy().view(BF16) for name, x in model.state_dict().items()}
  if model.config.tie_word_embeddings:
    del held['lm_head.weight']
  shards.write_tensors(directory, held.items())
  model.config.save_pretrained(directory)


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('stored', ['fused', 'single'])
@pytest.mark.parametrize('family', ['qwen3_moe', 'qwen3_5_moe_text', 'qwen3_5_moe'])
def test_transformers_loads_what_went_through_orbax_with_the_same_logits(
  family, stored, tied, tmp_path
):
  model = make(family, tied)
  if stored == 'fused':
    if family == 'qwen3_moe':
      pytest.skip('published checkpoints of this family name experts singly')
    write_fused(model, tmp_path / 'theirs')
  else:
    model.save_pretrained(tmp_path / 'theirs')
  checkpoints.write_policy(tmp_path / 'orbax', huggingface.open_model(tmp_path / 'theirs'))
  source = checkpoints.open_policy(tmp_path / 'orbax')
  assert source.origin.layout.fused_experts == (stored == 'fused')
  assert source.config.tie_embeddings == tied
  views.write_view(
    tmp_path / 'ours',
    source.config,
    source.tensors(BF16),
    views.ViewSpec('bf16'),
    tokenizer_files={},
    origin=source.origin,
  )
  ours, theirs = (huggingface.TensorReader(tmp_path / side) for side in ('ours', 'theirs'))
  assert ours.names() == theirs.names()
  for name in theirs.names():
    assert ours.read(name).tobytes() == theirs.read(name).tobytes()
  np.testing.assert_array_equal(
    logits(family, tmp_path / 'ours'), logits(family, tmp_path / 'theirs')
  )


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  directory = tmp_path_factory.mktemp('reference') / 'theirs'
  write_fused(make('qwen3_5_moe', tied=False), directory)
  return huggingface.open_model(directory)


def write(source, directory, format):
  views.write_view(
    directory,
    source.config,
    source.tensors(BF16),
    views.ViewSpec(format),
    tokenizer_files={},
    origin=source.origin,
  )
  reader = huggingface.TensorReader(directory)
  view = views.read_view(directory)
  return reader, dict(named_tensors(view.config, view.params))


def stored_name(name):
  return name.replace('model.', 'model.language_model.', 1)


@pytest.mark.parametrize('format', ['fp8_channel', 'nvfp4_w4a16'])
def test_compressed_tensors_decodes_every_expert_to_the_same_bits(source, tmp_path, format):
  torch = pytest.importorskip('torch')
  quantization = pytest.importorskip('compressed_tensors.quantization')
  compressors = pytest.importorskip('compressed_tensors.compressors')
  safetensors_torch = pytest.importorskip('safetensors.torch')
  _, ours = write(source, tmp_path / 'view', format)
  raw = json.loads((tmp_path / 'view' / 'config.json').read_text())
  stated = quantization.QuantizationConfig.model_validate(raw['quantization_config'])
  compressor = compressors.BaseCompressor.get_value_from_registry(stated.format)
  stored = safetensors_torch.load_file(tmp_path / 'view' / 'model.safetensors')
  experts = 0
  for name, row, _ in hf_params(source.config):
    module = stored_name(name).removesuffix('.weight')
    parts = {
      key.removeprefix(f'{module}.'): x for key, x in stored.items() if key.startswith(f'{module}.')
    }
    if not row.quantisable:
      assert module in stated.ignore or len(row.hf_shape) == 1 or 'embed_tokens' in module
      continue
    assert module not in stated.ignore
    experts += '.experts.' in module
    theirs = compressor.decompress(parts, stated.config_groups['group_0'])['weight']
    np.testing.assert_array_equal(theirs.to(torch.bfloat16).float().numpy(), ours[name])
  assert experts == 2 * 3 * 3


def test_transformers_decodes_every_expert_of_fp8_block_to_the_same_bits(source, tmp_path):
  torch = pytest.importorskip('torch')
  fp8 = pytest.importorskip('transformers.integrations.finegrained_fp8')
  reader, ours = write(source, tmp_path / 'view', 'fp8_block')
  raw = json.loads((tmp_path / 'view' / 'config.json').read_text())['quantization_config']
  for name, row, _ in hf_params(source.config):
    module = stored_name(name).removesuffix('.weight')
    assert not row.quantisable or module not in raw['modules_to_not_convert']
    if row.quantisable:
      values = torch.from_numpy(reader.read(f'{module}.weight').view(np.uint8))
      scale = torch.from_numpy(reader.read(f'{module}.weight_scale_inv'))
      theirs = fp8.Fp8Dequantize(None)._dequantize_one(
        values.view(torch.float8_e4m3fn), scale, torch.bfloat16
      )
      np.testing.assert_array_equal(theirs.float().numpy(), ours[name])
