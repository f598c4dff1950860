"""Config files of the families with experts and delta nets."""

import copy
import dataclasses

import pytest

from mimo.models.config import ATTENTION, DELTA, DeltaConfig, ModelConfig, MoEConfig, RopeConfig

QWEN3_MOE = {
  'architectures': ['Qwen3MoeForCausalLM'],
  'model_type': 'qwen3_moe',
  'vocab_size': 151_936,
  'hidden_size': 2048,
  'intermediate_size': 6144,
  'num_hidden_layers': 48,
  'num_attention_heads': 32,
  'num_key_value_heads': 4,
  'head_dim': 128,
  'hidden_act': 'silu',
  'max_position_embeddings': 40_960,
  'rms_norm_eps': 1e-6,
  'rope_theta': 1_000_000.0,
  'rope_scaling': None,
  'tie_word_embeddings': False,
  'decoder_sparse_step': 1,
  'mlp_only_layers': [],
  'moe_intermediate_size': 768,
  'norm_topk_prob': True,
  'num_experts': 128,
  'num_experts_per_tok': 8,
  'router_aux_loss_coef': 0.001,
}

# As the published config.json has it: the decoder's is one part.
QWEN3_5_MOE = {
  'architectures': ['Qwen3_5MoeForConditionalGeneration'],
  'model_type': 'qwen3_5_moe',
  'image_token_id': 248_056,
  'tie_word_embeddings': False,
  'vision_config': {'depth': 27, 'model_type': 'qwen3_5_moe', 'hidden_size': 1152},
  'text_config': {
    'model_type': 'qwen3_5_moe_text',
    'attention_bias': False,
    'attn_output_gate': True,
    'dtype': 'bfloat16',
    'full_attention_interval': 4,
    'head_dim': 256,
    'hidden_act': 'silu',
    'hidden_size': 2048,
    'layer_types': (['linear_attention'] * 3 + ['full_attention']) * 10,
    'linear_conv_kernel_dim': 4,
    'linear_key_head_dim': 128,
    'linear_num_key_heads': 16,
    'linear_num_value_heads': 32,
    'linear_value_head_dim': 128,
    'max_position_embeddings': 262_144,
    'moe_intermediate_size': 512,
    'mtp_num_hidden_layers': 1,
    'num_attention_heads': 16,
    'num_experts': 256,
    'num_experts_per_tok': 8,
    'num_hidden_layers': 40,
    'num_key_value_heads': 2,
    'rms_norm_eps': 1e-6,
    'rope_parameters': {
      'mrope_interleaved': True,
      'mrope_section': [11, 11, 10],
      'partial_rotary_factor': 0.25,
      'rope_theta': 10_000_000,
      'rope_type': 'default',
    },
    'shared_expert_intermediate_size': 512,
    'vocab_size': 248_320,
  },
}
TEXT = QWEN3_5_MOE['text_config'] | {'tie_word_embeddings': False}


def test_reads_experts():
  config = ModelConfig.from_hf(QWEN3_MOE)
  assert config.moe == MoEConfig(128, 8, 768, 0, True)
  assert (config.pattern, config.delta, config.intermediate_size) == ((ATTENTION,), None, 0)
  assert (config.gated, config.rotary_dim, config.rope.theta) == (False, 128, 1e6)
  absent = {key: QWEN3_MOE[key] for key in QWEN3_MOE.keys() - {'norm_topk_prob', 'head_dim'}}
  config = ModelConfig.from_hf(absent)
  assert (config.moe.norm_topk_prob, config.head_dim) == (False, 64)
  renamed = {key: value for key, value in QWEN3_MOE.items() if key != 'num_experts'}
  assert ModelConfig.from_hf(renamed | {'num_local_experts': 16}).moe.num_experts == 16


@pytest.mark.parametrize('raw', [QWEN3_5_MOE, TEXT])
def test_reads_the_hybrid(raw):
  config = ModelConfig.from_hf(raw)
  assert config.family == raw['model_type']
  assert config.pattern == (DELTA, DELTA, DELTA, ATTENTION)
  assert config.layer_types == config.pattern * 10
  assert config.delta == DeltaConfig(16, 32, 128, 128, 4)
  assert config.moe == MoEConfig(256, 8, 512, 512, True)
  assert config.rope == RopeConfig(1e7, partial_rotary_factor=0.25)
  assert (config.gated, config.rotary_dim, config.max_positions) == (True, 64, 262_144)


@pytest.mark.parametrize('raw', [QWEN3_MOE, QWEN3_5_MOE, TEXT])
def test_round_trip_of_experts(raw):
  """Every key comes back, nested as it was, but for the older form of the rotary embedding."""
  config = ModelConfig.from_hf(raw)
  written = config.to_hf()

  def held(got, stated):
    for key, value in stated.items():
      if key in ('rope_theta', 'rope_scaling'):
        continue
      if isinstance(value, dict):
        held(got[key], value)
      else:
        assert got[key] == value, key

  held(written, raw)
  assert ModelConfig.from_hf(written).to_hf() == written
  assert dataclasses.replace(ModelConfig.from_hf(written), extra=()) == dataclasses.replace(
    config, extra=()
  )


def test_layer_types_follow_from_the_interval():
  raw = {key: value for key, value in TEXT.items() if key != 'layer_types'}
  assert ModelConfig.from_hf(raw).pattern == (DELTA, DELTA, DELTA, ATTENTION)
  del raw['full_attention_interval']
  assert ModelConfig.from_hf(raw).pattern == (DELTA, DELTA, DELTA, ATTENTION)
  kinds = ['linear_attention', 'full_attention', 'full_attention'] * 2
  odd = ModelConfig.from_hf(raw | {'layer_types': kinds[:5], 'num_hidden_layers': 5})
  assert odd.pattern == tuple(kinds[:5])


def test_partial_rotary_factor_may_stand_apart():
  raw = copy.deepcopy(TEXT)
  del raw['rope_parameters']['partial_rotary_factor']
  assert ModelConfig.from_hf(raw).rope.partial_rotary_factor == 0.25
  config = ModelConfig.from_hf(raw | {'partial_rotary_factor': 0.5})
  assert config.rope.partial_rotary_factor == 0.5
  assert config.to_hf()['rope_parameters']['partial_rotary_factor'] == 0.5


def test_reads_qwen3_next():
  raw = TEXT | {'model_type': 'qwen3_next', 'norm_topk_prob': False}
  config = ModelConfig.from_hf(raw)
  assert (config.fused_delta, config.moe.norm_topk_prob) == (True, False)
  assert config.to_hf()['norm_topk_prob'] is False


@pytest.mark.parametrize(
  ('raw', 'change', 'message'),
  [
    (QWEN3_MOE, {'mlp_only_layers': [0]}, r'mlp_only_layers is \[0\]; expected \[\]'),
    (QWEN3_MOE, {'decoder_sparse_step': 2}, 'decoder_sparse_step is 2; expected 1'),
    (QWEN3_MOE, {'num_experts': None}, 'num_experts is None; expected a positive integer'),
    (QWEN3_MOE, {'num_experts_per_tok': 129}, 'experts_per_token is 129; expected at most'),
    (QWEN3_MOE, {'moe_intermediate_size': None}, 'lacks moe_intermediate_size'),
    (TEXT, {'attn_output_gate': False}, 'attn_output_gate is False; expected True'),
    (TEXT, {'output_gate_type': 'sigmoid'}, "output_gate_type is 'sigmoid'; expected 'swish'"),
    (TEXT, {'norm_topk_prob': False}, 'norm_topk_prob is False; expected True'),
    (TEXT, {'linear_num_key_heads': 5}, 'num_value_heads is 32; expected a multiple of'),
    (TEXT, {'linear_conv_kernel_dim': None}, 'lacks linear_conv_kernel_dim'),
    (TEXT, {'layer_types': ['full_attention']}, 'layer_types are 1 of .*; expected 40'),
    (TEXT, {'layer_types': ['sliding_attention'] * 40}, "40 of \\['sliding_attention'\\]"),
    (TEXT, {'head_dim': 12}, '0.25 of head_dim 12 is 3; expected a positive even number'),
    (QWEN3_5_MOE, {'text_config': None}, 'text_config is None; expected an object'),
    (QWEN3_5_MOE, {'text_config': QWEN3_MOE}, "model_type of text_config is 'qwen3_moe'"),
  ],
)
def test_refusals_of_experts(raw, change, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig.from_hf(raw | change)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'pattern': (DELTA, DELTA)}, 'expected the shortest that 40 layers repeat'),
    ({'pattern': (DELTA, 'other')}, 'expected kinds of'),
    ({'pattern': (ATTENTION,)}, r"pattern \('full_attention',\) got delta"),
    ({'moe': None}, "family 'qwen3_5_moe_text' got moe: None"),
    ({'intermediate_size': 8}, 'intermediate_size is 8; expected 0'),
    ({'moe': MoEConfig(8, 2, 16, 0, True)}, 'got shared_intermediate_size 0'),
  ],
)
def test_refusals_of_the_hybrid_record(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(ModelConfig.from_hf(TEXT), **change)
