"""The formats' names and config.json entries."""

import dataclasses

import pytest

from mimo.weights import formats


@dataclasses.dataclass(frozen=True)
class Row:
  hf_name: str
  quantisable: bool
  in_dims: int
  layers: tuple[int, ...] | None = None
  shape: tuple[int, ...] = (4, 4)


ROWS = (
  Row('model.embed_tokens.weight', False, 0),
  Row('model.layers.{layer}.self_attn.q_proj.weight', True, 1),
  Row('model.layers.{layer}.input_layernorm.weight', False, 0, (0, 1)),
  Row('model.layers.{layer}.mlp.gate.weight', False, 1, (0, 1)),
  Row('model.layers.{layer}.linear_attn.conv1d.weight', False, 0, (1,), (8, 1, 4)),
  Row('model.norm.weight', False, 0),
  Row('lm_head.weight', False, 1),
)


@pytest.mark.parametrize(
  ('precision', 'name', 'expected'),
  [
    ('bf16', None, 'bf16'),
    ('fp8', None, 'fp8_block'),
    ('nvfp4', None, 'nvfp4_w4a16'),
    (None, 'nvfp4_w4a4', 'nvfp4_w4a4'),
    ('fp8', 'fp8_channel', 'fp8_channel'),
  ],
)
def test_resolve_format(precision, name, expected):
  assert formats.resolve_format(precision=precision, format=name) == expected


@pytest.mark.parametrize(
  ('precision', 'name', 'message'),
  [
    ('fp4', None, "unknown precision 'fp4'.*nvfp4"),
    (None, 'fp8_chanel', "did you mean 'fp8_channel'"),
    ('fp8', 'nvfp4_w4a4', "'nvfp4_w4a4' is not of precision 'fp8'"),
    (None, None, 'neither precision nor format'),
  ],
)
def test_resolve_format_names_the_mistake(precision, name, message):
  with pytest.raises(ValueError, match=message):
    formats.resolve_format(precision=precision, format=name)


def test_unknown_block_scale_rule():
  with pytest.raises(ValueError, match="did you mean 'four_over_six'"):
    formats.check_block_scale('4_over_six')


def test_ignored_modules_name_every_linear_module_that_stays_bf16():
  assert formats.ignored_modules(ROWS) == [
    'lm_head',
    'model.layers.0.mlp.gate',
    'model.layers.1.mlp.gate',
    'model.layers.1.linear_attn.conv1d',
  ]


@pytest.mark.parametrize('name', sorted(formats.FORMATS))
def test_config_states_its_format(name):
  stated = formats.quantization_config(name, ['lm_head'])
  config = {'model_type': 'qwen3'} | ({} if stated is None else {'quantization_config': stated})
  assert formats.detect_format(config) == name


def test_foreign_quantisation_is_refused():
  with pytest.raises(ValueError, match=r"quant_method 'gptq'.*expected one of"):
    formats.detect_format({'quantization_config': {'quant_method': 'gptq', 'bits': 4}})
  stated = formats.quantization_config('nvfp4_w4a16', ())
  stated['config_groups']['group_0']['weights']['group_size'] = 32
  with pytest.raises(ValueError, match='none of the known layouts'):
    formats.detect_format({'quantization_config': stated})
  stated = formats.quantization_config('nvfp4_w4a16', ())
  stated['config_groups']['group_1'] = stated['config_groups']['group_0']
  with pytest.raises(ValueError, match='none of the known layouts'):
    formats.detect_format({'quantization_config': stated})


@pytest.mark.reference
@pytest.mark.parametrize(
  ('name', 'preset'),
  [('fp8_channel', 'FP8_DYNAMIC'), ('nvfp4_w4a16', 'NVFP4A16'), ('nvfp4_w4a4', 'NVFP4')],
)
def test_compressed_tensors_reads_our_config_as_its_own_preset(name, preset):
  quantization = pytest.importorskip('compressed_tensors.quantization')
  ours = quantization.QuantizationConfig.model_validate(
    formats.quantization_config(name, ['lm_head'])
  )
  theirs = quantization.QuantizationConfig(config_groups={preset: ['Linear']})
  scheme = ours.config_groups['group_0'].model_dump(exclude={'format'})
  assert scheme == theirs.config_groups[preset].model_dump(exclude={'format'})
  assert ours.ignore == ['lm_head']
  assert ours.quantization_status == 'compressed'


@pytest.mark.reference
def test_transformers_reads_our_fp8_config():
  pytest.importorskip('torch')
  quantisers = pytest.importorskip('transformers.quantizers.auto')
  stated = formats.quantization_config('fp8_block', ['lm_head'])
  config = quantisers.AutoQuantizationConfig.from_dict(stated)
  assert type(config).__name__ == 'FineGrainedFP8Config'
  assert list(config.weight_block_size) == [128, 128]
  assert config.activation_scheme == 'dynamic'
  assert config.modules_to_not_convert == ['lm_head']
