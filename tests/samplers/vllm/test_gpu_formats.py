"""fp8_block and nvfp4_w4a16 have no CPU kernels: what of vLLM runs without a GPU reads them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import init
from mimo.models.table import named_tensors
from mimo.weights.huggingface import TensorReader
from mimo.weights.views import ViewSpec, read_view, write_view

pytestmark = pytest.mark.vllm

NAME = 'model.layers.0.mlp.down_proj'


@pytest.fixture(scope='module')
def wide():
  """A model whose fused parts have rows that are multiples of 128."""
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3',
      'architectures': ['Qwen3ForCausalLM'],
      'vocab_size': 64,
      'hidden_size': 128,
      'intermediate_size': 256,
      'num_hidden_layers': 1,
      'num_attention_heads': 4,
      'num_key_value_heads': 4,
      'head_dim': 32,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1e4,
      'tie_word_embeddings': True,
      'max_position_embeddings': 64,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


def _view(wide, directory, name):
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(wide, jax.random.key(0)))
  write_view(directory, wide, named_tensors(wide, params), ViewSpec(name), tokenizer_files={})
  tensors = named_tensors(wide, read_view(directory, exact=True).params)
  own = {key: np.asarray(value, np.float32) for key, value in tensors}
  return json.loads((directory / 'config.json').read_text()), TensorReader(directory), own


def test_fp8_block(wide, tmp_path):
  import torch
  from vllm.model_executor.layers.quantization.fp8 import Fp8Config
  from vllm.model_executor.layers.quantization.utils.quant_utils import group_broadcast

  config, reader, own = _view(wide, tmp_path / 'view', 'fp8_block')
  read = Fp8Config.from_config(config['quantization_config'])
  assert read.is_checkpoint_fp8_serialized and read.activation_scheme == 'dynamic'
  assert read.weight_block_size == [128, 128]
  assert 'lm_head' in read.ignored_layers
  weight = torch.from_numpy(reader.read(f'{NAME}.weight').view(np.uint8))
  scale = torch.from_numpy(np.array(reader.read(f'{NAME}.weight_scale_inv')))
  values = weight.view(torch.float8_e4m3fn).to(torch.float32)
  decoded = values * group_broadcast(scale, values.shape)
  np.testing.assert_array_equal(decoded.numpy(), own[f'{NAME}.weight'])


def test_nvfp4_w4a16(wide, tmp_path):
  import torch
  from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
  from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    dequantize_to_dtype,
  )

  config, reader, own = _view(wide, tmp_path / 'view', 'nvfp4_w4a16')
  read = compressed_tensors.CompressedTensorsConfig.from_config(config['quantization_config'])
  scheme = read.target_scheme_map['Linear']
  assert scheme['weights'].num_bits == 4 and scheme['weights'].group_size == 16
  assert scheme['input_activations'] is None
  packed = torch.from_numpy(np.array(reader.read(f'{NAME}.weight_packed')))
  scales = torch.from_numpy(reader.read(f'{NAME}.weight_scale').view(np.uint8).copy())
  shared = torch.from_numpy(np.array(reader.read(f'{NAME}.weight_global_scale')))
  decoded = dequantize_to_dtype(
    packed, scales.view(torch.float8_e4m3fn), 1.0 / shared, torch.float32, swizzle=False
  )
  np.testing.assert_allclose(decoded.numpy(), own[f'{NAME}.weight'], rtol=3e-7)
