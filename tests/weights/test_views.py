"""Views written and read back, and every way a directory can fail to be one."""

import dataclasses
import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mimo.models import table
from mimo.weights import formats, huggingface, pipeline, quantise, views

QUANTISED = ('fp8_block', 'fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4')
TOKENIZER = {'tokenizer.json': b'{"x": 1}'}
Q0 = 'model.layers.0.self_attn.q_proj'
GATE1 = 'model.layers.1.mlp.gate_proj'


def spec_of(name, input_scales=None):
  return views.ViewSpec(name, input_scales=input_scales)


@pytest.fixture(scope='module')
def written(tmp_path_factory, config, tensors, input_scales):
  """One view of each format, to be copied before it is harmed."""
  root = tmp_path_factory.mktemp('views')
  for name in formats.FORMATS:
    views.write_view(
      root / name, config, tensors, spec_of(name, input_scales), tokenizer_files=TOKENIZER
    )
  return root


@pytest.fixture
def harmed(written, tmp_path):
  def copy(name):
    return shutil.copytree(written / name, tmp_path / name)

  return copy


def load(path):
  reader = huggingface.TensorReader(path)
  return {name: reader.read(name) for name in reader.names()}


def save(path, tensors):
  (path / huggingface.SINGLE).unlink()
  safetensors.numpy.save_file(tensors, path / huggingface.SINGLE)


@pytest.mark.parametrize('name', list(formats.FORMATS))
def test_read_back_is_each_tensor_decoded_and_nothing_else(written, config, tensors, name):
  view = views.read_view(written / name)
  assert view.format == name
  assert view.config.to_hf().keys() >= config.to_hf().keys()
  assert dataclasses.replace(view.config, extra=()) == dataclasses.replace(config, extra=())
  got = dict(table.named_tensors(view.config, view.params))
  assert list(got) == [tensor for tensor, _ in tensors]
  quantisable = {tensor for tensor, row, _ in table.hf_params(config) if row.quantisable}
  for tensor, weight in tensors:
    assert got[tensor].dtype == np.float32
    exact = np.array_equal(got[tensor], weight.astype(np.float32))
    assert exact == (tensor not in quantisable or name == 'bf16')
    np.testing.assert_array_equal(
      got[tensor], got[tensor].astype(ml_dtypes.bfloat16).astype(np.float32)
    )


def test_a_view_is_an_ordinary_checkpoint_directory(written):
  assert sorted(path.name for path in (written / 'fp8_channel').iterdir()) == [
    'config.json',
    'mimo_view.json',
    'model.safetensors',
    'tokenizer.json',
  ]
  raw = json.loads((written / 'fp8_channel' / 'config.json').read_text())
  assert raw['dtype'] == 'bfloat16'
  assert raw['quantization_config']['ignore'] == ['lm_head']
  assert (written / 'bf16' / 'tokenizer.json').read_bytes() == b'{"x": 1}'
  with safetensors.safe_open(written / 'bf16' / 'model.safetensors', 'np') as file:
    assert file.metadata()['format'] == 'pt'


def test_fused_tensors_share_one_global_scale(written, tensors, input_scales):
  stored = load(written / 'nvfp4_w4a4')
  weights = dict(tensors)
  for module in ('self_attn.{}_proj', 'mlp.{}_proj'):
    parts = 'qkv' if 'attn' in module else ('gate', 'up')
    for layer in range(2):
      names = [f'model.layers.{layer}.{module.format(part)}' for part in parts]
      amax = max(np.abs(weights[f'{n}.weight'].astype(np.float32)).max() for n in names)
      for name in names:
        assert stored[f'{name}.weight_global_scale'] == np.float32(2688) / amax
        expected = min(input_scales[f'{n}.weight'] for n in names)
        assert stored[f'{name}.input_global_scale'] == np.float32(expected)


def test_activation_quant_says_what_the_format_does(written, input_scales):
  kinds = {name: views.read_view(written / name).activation_quant for name in formats.FORMATS}
  assert kinds['bf16'] is None and kinds['nvfp4_w4a16'] is None
  assert kinds['fp8_channel'].kind == 'fp8_token' and kinds['fp8_channel'].scales is None
  assert kinds['fp8_block'].kind == 'fp8_block'
  scales = kinds['nvfp4_w4a4'].scales[('layers', 'mlp', 'down_proj', 'kernel')]
  expected = [input_scales[f'model.layers.{layer}.mlp.down_proj.weight'] for layer in range(2)]
  np.testing.assert_array_equal(scales, np.float32(expected))


def test_shards_and_any_order_of_tensors(tmp_path, config, tensors, written):
  views.write_view(
    tmp_path / 'v',
    config,
    reversed(tensors),
    spec_of('nvfp4_w4a16'),
    tokenizer_files={},
    shard_bytes=40_000,
  )
  assert len(list((tmp_path / 'v').glob('model-*-of-*.safetensors'))) > 2
  one, many = load(written / 'nvfp4_w4a16'), load(tmp_path / 'v')
  assert one.keys() == many.keys()
  for name, tensor in one.items():
    np.testing.assert_array_equal(tensor.view(np.uint8), many[name].view(np.uint8))


def test_memory_is_bounded_whatever_the_size_of_shards(tmp_path, config, monkeypatch):
  deep = dataclasses.replace(config, num_layers=24)

  def stream():
    for name, row, _ in table.hf_params(deep):
      yield name, np.ones(row.hf_shape, ml_dtypes.bfloat16)

  def peak(budget_bytes):
    monkeypatch.setattr(pipeline, 'BUDGET_BYTES', budget_bytes)
    tracemalloc.start()
    views.write_view(
      tmp_path / str(budget_bytes), deep, stream(), spec_of('fp8_channel'), tokenizer_files={}
    )
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most

  assert peak(1 << 40) > 3_000_000  # the view itself
  assert peak(600_000) < 1_700_000


def test_a_format_that_can_not_hold_the_model_is_refused(tmp_path, config, tensors):
  narrow = dataclasses.replace(config, num_kv_heads=2)
  with pytest.raises(ValueError, match=r'k_proj\.weight has 64 rows.*multiple of 128'):
    views.write_view(tmp_path / 'v', narrow, tensors, spec_of('fp8_block'), tokenizer_files={})
  thin = dataclasses.replace(config, hidden_size=24)
  with pytest.raises(ValueError, match=r'has 24 columns; expected a multiple of 16'):
    views.check_format(thin, 'nvfp4_w4a16')
  views.check_format(thin, 'fp8_channel')
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda t: t[:-1], r'model\.norm\.weight is missing \(1 such\)'),
    (lambda t: [*t, t[3]], 'is not one of this model, or came twice'),
    (lambda t: [(t[0][0], t[0][1][:-1]), *t[1:]], r'shape \[47, 128\]; expected \[48, 128\]'),
    (lambda t: [(t[0][0], t[0][1].astype(np.float32)), *t[1:]], 'float32; expected bfloat16'),
  ],
)
def test_tensors_of_another_model_leave_nothing_behind(tmp_path, config, tensors, change, message):
  with pytest.raises(ValueError, match=message):
    views.write_view(tmp_path / 'v', config, change(tensors), spec_of('bf16'), tokenizer_files={})
  assert not list(tmp_path.iterdir())


def test_w4a4_needs_its_input_scales(tmp_path, config, tensors, input_scales):
  with pytest.raises(ValueError, match='needs calibrated input scales'):
    spec_of('nvfp4_w4a4')
  partial = {k: v for k, v in input_scales.items() if 'down_proj' not in k}
  with pytest.raises(ValueError, match=r'down_proj\.weight has no calibrated input scale'):
    views.write_view(
      tmp_path / 'v', config, tensors, spec_of('nvfp4_w4a4', partial), tokenizer_files={}
    )


def test_block_scale_rule_is_used_and_noted(tmp_path, config, tensors, written):
  views.write_view(
    tmp_path / 'v',
    config,
    tensors,
    views.ViewSpec('nvfp4_w4a16', 'four_over_six'),
    tokenizer_files={},
  )
  assert json.loads((tmp_path / 'v' / views.NOTE).read_text())['block_scale'] == 'four_over_six'
  weight = dict(tensors)[f'{Q0}.weight'].astype(np.float64)

  def error(path):
    tensors = dict(table.named_tensors(config, views.read_view(path).params))
    return np.square(tensors[f'{Q0}.weight'] - weight).sum()

  assert error(tmp_path / 'v') < 0.95 * error(written / 'nvfp4_w4a16')


def test_truncated_shard(harmed):
  path = harmed('fp8_channel')
  shard = path / huggingface.SINGLE
  shard.write_bytes(shard.read_bytes()[:-10])
  with pytest.raises(ValueError, match=r'model\.safetensors is corrupt'):
    views.read_view(path)


def test_missing_scale(harmed):
  path = harmed('nvfp4_w4a16')
  tensors = load(path)
  del tensors[f'{GATE1}.weight_scale']
  save(path, tensors)
  with pytest.raises(ValueError, match=rf'nvfp4_w4a16: tensor {GATE1}\.weight_scale is missing'):
    views.read_view(path)


def test_missing_norm(harmed):
  path = harmed('fp8_block')
  tensors = load(path)
  del tensors['model.norm.weight']
  save(path, tensors)
  with pytest.raises(ValueError, match=r'tensor model\.norm\.weight is missing'):
    views.read_view(path)


def test_leftover_tensor(harmed):
  path = harmed('bf16')
  save(path, load(path) | {'model.layers.2.extra.weight': np.ones(3, np.float32)})
  with pytest.raises(
    ValueError, match=r'layers\.2\.extra\.weight is not one of this model in bf16'
  ):
    views.read_view(path)


def test_wrong_dtype_names_the_module(harmed):
  path = harmed('fp8_channel')
  tensors = load(path)
  tensors[f'{Q0}.weight'] = tensors[f'{Q0}.weight'].view(np.uint8)
  save(path, tensors)
  with pytest.raises(ValueError, match=rf'{Q0}: weight is uint8; expected float8_e4m3fn'):
    views.read_view(path)


def test_view_of_another_model(harmed):
  path = harmed('bf16')
  raw = json.loads((path / 'config.json').read_text())
  (path / 'config.json').write_text(json.dumps(raw | {'vocab_size': 50}))
  with pytest.raises(ValueError, match=r'embed_tokens.weight has shape \[48, 128\]; expected \[50'):
    views.read_view(path)
  (path / 'config.json').write_text(json.dumps(raw | {'model_type': 'mamba'}))
  with pytest.raises(ValueError, match=r"config\.json: model_type is 'mamba'"):
    views.read_view(path)


def test_config_of_another_format(harmed):
  path = harmed('bf16')
  raw = json.loads((path / 'config.json').read_text())
  stated = formats.quantization_config('nvfp4_w4a16', ['lm_head'])
  (path / 'config.json').write_text(json.dumps(raw | {'quantization_config': stated}))
  with pytest.raises(ValueError, match='weight_packed is missing; nvfp4_w4a16 needs it'):
    views.read_view(path)
  stated = stated | {'quant_method': 'awq'}
  (path / 'config.json').write_text(json.dumps(raw | {'quantization_config': stated}))
  with pytest.raises(ValueError, match=r"config\.json: .*'awq' has none of the known layouts"):
    views.read_view(path)


@pytest.mark.reference
@pytest.mark.parametrize('name', ['fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4'])
def test_compressed_tensors_decodes_the_view_to_what_we_compute_with(written, name):
  torch = pytest.importorskip('torch')
  quantization = pytest.importorskip('compressed_tensors.quantization')
  compressors = pytest.importorskip('compressed_tensors.compressors')
  safetensors_torch = pytest.importorskip('safetensors.torch')
  raw = json.loads((written / name / 'config.json').read_text())
  stated = quantization.QuantizationConfig.model_validate(raw['quantization_config'])
  compressor = compressors.BaseCompressor.get_value_from_registry(stated.format)
  stored = safetensors_torch.load_file(written / name / huggingface.SINGLE)
  view = views.read_view(written / name)
  ours = dict(table.named_tensors(view.config, view.params))
  compressed = 0
  for tensor, values in ours.items():
    module = tensor.removesuffix('.weight')
    parts = {
      key.removeprefix(f'{module}.'): x for key, x in stored.items() if key.startswith(f'{module}.')
    }
    if len(parts) > 1:
      compressed += 1
      assert module not in stated.ignore
      theirs = compressor.decompress(parts, stated.config_groups['group_0'])['weight']
    else:
      assert module in stated.ignore or module.endswith(('norm', 'embed_tokens'))
      theirs = parts['weight']
    np.testing.assert_array_equal(theirs.to(torch.bfloat16).float().numpy(), values)
  assert compressed == 14


@pytest.mark.reference
@pytest.mark.parametrize('name', ['bf16', 'fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4'])
def test_transformers_serves_the_directory_with_our_weights(written, name):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  # Under bfloat16, transformers rounds the float32 scales of fp8_channel first; vLLM does not.
  dtype = torch.float32 if name == 'fp8_channel' else torch.bfloat16
  model = transformers.AutoModelForCausalLM.from_pretrained(written / name, dtype=dtype)
  with torch.no_grad():
    model(torch.arange(8)[None])  # the first call decompresses
  view = views.read_view(written / name)
  theirs = dict(model.named_parameters())
  for tensor, values in table.named_tensors(view.config, view.params):
    np.testing.assert_array_equal(theirs[tensor].bfloat16().detach().float().numpy(), values)


def test_decoding_is_by_quantise(written):
  stored = load(written / 'fp8_block')
  parts = {suffix: stored[f'{Q0}.{suffix}'] for suffix in ('weight', 'weight_scale_inv')}
  view = views.read_view(written / 'fp8_block')
  ours = dict(table.named_tensors(view.config, view.params))[f'{Q0}.weight']
  np.testing.assert_array_equal(ours, quantise.decode('fp8_block', parts).astype(np.float32))
