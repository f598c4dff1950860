import dataclasses

import pytest

from mimo.models.config import ModelConfig, RopeConfig

QWEN3 = {
  'architectures': ['Qwen3ForCausalLM'],
  'model_type': 'qwen3',
  'vocab_size': 151_936,
  'hidden_size': 1024,
  'intermediate_size': 3072,
  'num_hidden_layers': 28,
  'num_attention_heads': 16,
  'num_key_value_heads': 8,
  'head_dim': 128,
  'hidden_act': 'silu',
  'attention_bias': False,
  'max_position_embeddings': 40_960,
  'rms_norm_eps': 1e-6,
  'rope_parameters': {'rope_theta': 1_000_000.0, 'rope_type': 'default'},
  'tie_word_embeddings': True,
  'eos_token_id': [151_645, 151_643],
  'bos_token_id': None,
  'layer_types': ['full_attention'] * 28,
  'dtype': 'bfloat16',
}

LLAMA3 = {
  'factor': 8.0,
  'high_freq_factor': 4.0,
  'low_freq_factor': 1.0,
  'original_max_position_embeddings': 8192,
}

# As transformers 4 wrote it: theta apart from the scaling.
LLAMA = {
  'model_type': 'llama',
  'vocab_size': 128_256,
  'hidden_size': 2048,
  'intermediate_size': 8192,
  'num_hidden_layers': 16,
  'num_attention_heads': 32,
  'num_key_value_heads': 8,
  'max_position_embeddings': 131_072,
  'rms_norm_eps': 1e-5,
  'rope_theta': 500_000.0,
  'rope_scaling': {**LLAMA3, 'rope_type': 'llama3'},
  'tie_word_embeddings': True,
}


def test_reads_qwen3():
  config = ModelConfig.from_hf(QWEN3)
  assert (config.family, config.qk_norm, config.tie_embeddings) == ('qwen3', True, True)
  assert (config.num_layers, config.num_heads, config.num_kv_heads) == (28, 16, 8)
  assert (config.head_dim, config.intermediate_size, config.max_positions) == (128, 3072, 40_960)
  assert config.rope == RopeConfig(1e6, 'default', ())


def test_reads_the_older_form_of_llama():
  config = ModelConfig.from_hf(LLAMA)
  assert (config.head_dim, config.qk_norm, config.rms_norm_eps) == (64, False, 1e-5)
  assert config.rope == RopeConfig(5e5, 'llama3', tuple(sorted(LLAMA3.items())))


@pytest.mark.parametrize('raw', [QWEN3, LLAMA])
def test_round_trip(raw):
  config = ModelConfig.from_hf(raw)
  written = config.to_hf()
  unchanged = set(raw) - {'rope_theta', 'rope_scaling'}
  assert {key: written[key] for key in unchanged} == {key: raw[key] for key in unchanged}
  assert dataclasses.replace(ModelConfig.from_hf(written), extra=()) == dataclasses.replace(
    config, extra=()
  )
  # What is written says everything, so that it is read back as it is.
  assert ModelConfig.from_hf(ModelConfig.from_hf(written).to_hf()).to_hf() == written


def test_writes_rope_parameters_for_the_older_form():
  written = ModelConfig.from_hf(LLAMA).to_hf()
  assert written['rope_parameters'] == {**LLAMA3, 'rope_theta': 5e5, 'rope_type': 'llama3'}
  assert 'rope_theta' not in written
  assert 'rope_scaling' not in written


def test_what_may_be_absent():
  absent = {'num_key_value_heads', 'rope_theta', 'rope_scaling', 'rms_norm_eps'}
  config = ModelConfig.from_hf({key: LLAMA[key] for key in LLAMA.keys() - absent})
  assert (config.num_kv_heads, config.rope.theta, config.rms_norm_eps) == (32, 1e4, 1e-6)
  assert not ModelConfig.from_hf(
    {key: LLAMA[key] for key in LLAMA.keys() - {'tie_word_embeddings'}}
  ).tie_embeddings


def test_older_name_of_the_scaling_type():
  rope = ModelConfig.from_hf(LLAMA | {'rope_scaling': {'type': 'linear', 'factor': 2.0}}).rope
  assert rope == RopeConfig(5e5, 'linear', (('factor', 2.0),))


def test_original_positions_default_to_the_longest():
  scaling = {k: v for k, v in LLAMA['rope_scaling'].items() if not k.startswith('original')}
  rope = ModelConfig.from_hf(LLAMA | {'rope_scaling': scaling}).rope
  assert dict(rope.scaling)['original_max_position_embeddings'] == 131_072


def test_quantization_is_of_the_file_and_not_of_the_model():
  config = ModelConfig.from_hf(QWEN3 | {'quantization_config': {'quant_method': 'fp8'}})
  assert config == ModelConfig.from_hf(QWEN3)


def test_is_hashable():
  assert hash(ModelConfig.from_hf(QWEN3)) == hash(ModelConfig.from_hf(dict(QWEN3)))


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      {'model_type': 'gpt2'},
      r"model_type is 'gpt2'; expected one of \['llama', 'qwen3', 'qwen3_5_moe'",
    ),
    ({'model_type': None}, 'model_type is None'),
    ({'vocab_size': None}, 'lacks vocab_size'),
    ({'head_dim': None}, 'lacks head_dim'),
    ({'hidden_size': '1024'}, "hidden_size is '1024'; expected a positive integer"),
    ({'num_hidden_layers': 0}, 'num_hidden_layers is 0; expected a positive integer'),
    ({'hidden_act': 'gelu'}, "hidden_act is 'gelu'; expected 'silu'"),
    ({'attention_bias': True}, 'attention_bias is True; expected False'),
    ({'use_sliding_window': True}, 'use_sliding_window is True; expected False'),
    ({'layer_types': ['sliding_attention']}, r"layer_types are \['sliding_attention'\]"),
    ({'num_key_value_heads': 3}, 'num_heads is 16; expected a multiple of num_kv_heads, 3'),
    ({'head_dim': 15}, 'head_dim is 15; expected an even number'),
    ({'rope_parameters': 3}, 'rope parameters are 3; expected an object'),
    ({'rope_parameters': {'rope_type': 'yarn'}}, "rope_type is 'yarn'; expected one of"),
    ({'rope_parameters': {'rope_type': 'linear'}}, "rope_type 'linear' lacks factor"),
    ({'rope_parameters': {'full_attention': {}}}, 'rope_parameters hold full_attention'),
    ({'rope_parameters': {'partial_rotary_factor': 0.5}}, 'partial_rotary_factor is 0.5'),
    ({'rope_parameters': {'rope_theta': -1.0}}, 'rope theta is -1.0'),
  ],
)
def test_refusals(change, message):
  with pytest.raises(ValueError, match=message):
    ModelConfig.from_hf(QWEN3 | change)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'family': 'gpt2'}, "model family is 'gpt2'; expected one of"),
    ({'num_kv_heads': 0}, 'num_kv_heads is 0; expected a positive integer'),
    ({'qk_norm': False}, "qk_norm is False; expected True for family 'qwen3'"),
  ],
)
def test_refusals_of_the_record(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(ModelConfig.from_hf(QWEN3), **change)
