"""Experts stored fused or singly, prefixes, and what is carried along: in, through Orbax, out."""

import dataclasses
import errno
import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.table import hf_params, named_tensors, table
from mimo.weights import (
  checkpoints,
  chunked,
  huggingface,
  layouts,
  publication,
  quantise,
  shards,
  views,
)
from mimo.weights.store import FileStore

BF16 = ml_dtypes.bfloat16
TEXT = {
  'model_type': 'qwen3_5_moe_text',
  'vocab_size': 64,
  'hidden_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 2,
  'head_dim': 64,
  'num_experts': 3,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 128,
  'shared_expert_intermediate_size': 128,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 64,
  'linear_value_head_dim': 64,
  'linear_conv_kernel_dim': 4,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-6,
  'layer_types': ['linear_attention', 'full_attention'],
  'tie_word_embeddings': False,
}
MULTIMODAL = {
  'model_type': 'qwen3_5_moe',
  'text_config': TEXT,
  'vision_config': {'depth': 1},
  'image_token_id': 7,
  'tie_word_embeddings': False,
}
QWEN3_MOE = {
  **{key: value for key, value in TEXT.items() if 'linear' not in key and 'shared' not in key},
  'model_type': 'qwen3_moe',
  'layer_types': ['full_attention', 'full_attention'],
  'norm_topk_prob': True,
}
CARRIED = {
  'model.visual.blocks.0.attn.qkv.weight': np.arange(12, dtype=np.float32).reshape(3, 4),
  'model.visual.patch_embed.proj.bias': np.arange(5).astype(BF16),
  'mtp.layers.0.mlp.experts.gate_up_proj': np.ones((2, 3, 4), BF16),
}
FUSED = {'fused_experts': True, 'prefix': 'model.language_model'}

# name -> (config.json, how the checkpoint stores it, what else it holds)
CHECKPOINTS = {
  'published': (MULTIMODAL, FUSED, CARRIED),
  'single': (MULTIMODAL, FUSED | {'fused_experts': False}, CARRIED),
  'text': (TEXT, FUSED | {'prefix': 'model'}, {}),
  'text_of_multimodal': (TEXT, FUSED, {}),
  'tied': (TEXT | {'tie_word_embeddings': True}, FUSED | {'prefix': 'model'}, {}),
  'deep': (TEXT | {'num_hidden_layers': 4, 'layer_types': 2 * TEXT['layer_types']}, FUSED, {}),
  'qwen3_moe': (QWEN3_MOE, {'fused_experts': False, 'prefix': 'model'}, {}),
}


def random_tensors(config):
  rng = np.random.default_rng(0)
  for name, row, _ in hf_params(config):
    yield name, (0.1 * rng.standard_normal(row.hf_shape)).astype(np.float32).astype(BF16)


def write(directory, name):
  """Writes a checkpoint tensor by tensor, as its publisher would: numpy and `write_tensors`."""
  raw, layout, carried = CHECKPOINTS[name]
  config = ModelConfig.from_hf(raw)
  stored = {}
  for tensor, x in random_tensors(config):
    tensor = tensor.replace('model.', f'{layout["prefix"]}.', 1)
    stack, _, rest = tensor.partition('.experts.')
    if not rest or not layout['fused_experts']:
      stored[tensor] = x
      continue
    _, matrix, _ = rest.split('.')
    if matrix == 'down_proj':
      stored.setdefault(f'{stack}.experts.down_proj', []).append(x)
    else:
      stored.setdefault(f'{stack}.experts.gate_up_proj', []).append(x)
  for tensor, x in stored.items():
    if isinstance(x, list) and tensor.endswith('gate_up_proj'):
      x = [np.concatenate(pair) for pair in zip(x[0::2], x[1::2], strict=True)]
    stored[tensor] = np.stack(x) if isinstance(x, list) else x
  directory.mkdir(parents=True)
  shards.write_tensors(directory, sorted((stored | carried).items()), shard_bytes=300_000)
  (directory / 'config.json').write_text(json.dumps(raw | {'dtype': 'bfloat16'}))
  (directory / 'tokenizer.json').write_text('{}')
  return directory


@pytest.fixture(params=CHECKPOINTS)
def checkpoint(request, tmp_path):
  return write(tmp_path / 'source', request.param)


@pytest.fixture
def published(tmp_path):
  return write(tmp_path / 'source', 'published')


def load(directory):
  reader = huggingface.TensorReader(directory)
  return {name: reader.read(name) for name in reader.names()}


def assert_same_tensors(got, expected):
  assert got.keys() == expected.keys()
  for name, x in expected.items():
    assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
    assert got[name].tobytes() == x.tobytes(), name


def export(source, out, format='bf16'):
  views.write_view(
    out,
    source.config,
    source.tensors(BF16),
    views.ViewSpec(format),
    tokenizer_files=source.tokenizer_files,
    origin=source.origin,
  )
  return out


def test_through_orbax_and_back_to_the_same_tensors(checkpoint, tmp_path):
  source = huggingface.open_model(checkpoint)
  checkpoints.write_policy(tmp_path / 'orbax', source)
  opened = checkpoints.open_policy(tmp_path / 'orbax')
  assert opened.origin.layout == source.origin.layout
  assert_same_tensors(load(export(opened, tmp_path / 'view')), load(checkpoint))
  ours, theirs = (
    json.loads((d / 'config.json').read_text()) for d in (tmp_path / 'view', checkpoint)
  )
  assert ours.items() >= {k: v for k, v in theirs.items() if k != 'text_config'}.items()
  assert (tmp_path / 'view' / 'tokenizer.json').read_text() == '{}'
  # And as parameters: from the directory, from the step, and from the view.
  trees = [checkpoints.load_policy(d)[1] for d in (checkpoint, tmp_path / 'orbax')]
  trees.append(views.read_view(tmp_path / 'view').params)
  expected = dict(random_tensors(source.config))
  for params in trees:
    got = dict(named_tensors(source.config, params))
    assert got.keys() == expected.keys()
    for name, x in expected.items():
      np.testing.assert_array_equal(got[name], x.astype(np.float32))


def test_a_part_is_not_overwritten_by_the_next(tmp_path):
  source = huggingface.open_model(write(tmp_path / 'source', 'deep'))
  for row in (row for row in table(source.config) if row.lead_shape):
    first = source.weights.part(row, (0,) * len(row.lead_shape))
    bits = first.tobytes()
    source.weights.part(row, tuple(size - 1 for size in row.lead_shape))
    assert first.tobytes() == bits, row.path


@pytest.mark.parametrize('stored', ['hf', 'orbax'])
def test_each_device_reads_its_part(published, tmp_path, stored):
  source = huggingface.open_model(published)
  if stored == 'orbax':
    checkpoints.write_policy(tmp_path / 'orbax', source)
    source = checkpoints.open_policy(tmp_path / 'orbax')
  mesh = jax.make_mesh((2, 2), ('a', 'b'), axis_types=(jax.sharding.AxisType.Auto,) * 2)

  def like(x):
    # The largest dimensions that two devices divide, over one axis or both.
    even = [i for i, size in enumerate(x.shape) if size % 2 == 0]
    spec = [None] * x.ndim
    for i, axis in zip(even[-2:], 'ab', strict=False):
      spec[i] = axis
    return jax.ShapeDtypeStruct(x.shape, np.float32, sharding=jax.NamedSharding(mesh, jax.P(*spec)))

  whole = source.params()
  abstract = jax.tree.map(like, whole)
  placed = source.placed(abstract)
  jax.tree.map(np.testing.assert_array_equal, placed, whole)
  assert jax.tree.all(jax.tree.map(lambda x, a: x.sharding == a.sharding, placed, abstract))


@pytest.mark.parametrize('format', ['fp8_block', 'fp8_channel', 'nvfp4_w4a16'])
def test_quantised_views_name_experts_singly_and_leave_the_rest(published, tmp_path, format):
  source = huggingface.open_model(published)
  stored = load(export(source, tmp_path / 'view', format))
  raw = json.loads((tmp_path / 'view' / 'config.json').read_text())['quantization_config']
  ignore = raw['modules_to_not_convert' if format == 'fp8_block' else 'ignore']
  block = 'model.language_model.layers.0'
  assert set(ignore) == {
    'lm_head',
    *(f'{block}.linear_attn.{name}' for name in ('in_proj_a', 'in_proj_b', 'conv1d')),
    *(f'model.language_model.layers.{i}.mlp.gate' for i in (0, 1)),
    *(f'model.language_model.layers.{i}.mlp.shared_expert_gate' for i in (0, 1)),
    'model.visual.blocks.0.attn.qkv',
    'mtp.layers.0.mlp.experts',
  }
  assert_same_tensors({name: stored[name] for name in CARRIED}, CARRIED)
  expected = dict(random_tensors(source.config))
  for name, row, _ in hf_params(source.config):
    if not row.quantisable:
      place = name.replace('model.', 'model.language_model.', 1)
      assert stored[place].tobytes() == expected[name].tobytes()
  # Gate and up of one expert share a scale, with nobody else.
  experts = 'model.layers.1.mlp.experts'
  for e in range(3):
    group = [expected[f'{experts}.{e}.{m}_proj.weight'] for m in ('gate', 'up')]
    for matrix, parts in zip(('gate', 'up'), quantise.encode(format, group), strict=True):
      for suffix, x in parts.items():
        name = f'model.language_model.layers.1.mlp.experts.{e}.{matrix}_proj.{suffix}'
        assert stored[name].tobytes() == x.tobytes()
  view = views.read_view(tmp_path / 'view')
  got = dict(named_tensors(view.config, view.params))
  down = f'{experts}.2.down_proj.weight'
  (parts,) = quantise.encode(format, [expected[down]])
  np.testing.assert_array_equal(got[down], quantise.decode(format, parts).astype(np.float32))


def test_chunks_are_one_layer_or_one_expert(published, tmp_path):
  checkpoints.write_policy(tmp_path / 'orbax', huggingface.open_model(published))
  tree = chunked.ChunkReader(tmp_path / 'orbax' / '0' / 'state').tree['params']
  kernel = tree['layers']['1']['moe']['experts']['gate_proj']['kernel']
  assert (kernel.shape, kernel.dtype) == ((1, 3, 128, 128), BF16)
  assert kernel.storage.chunk_shape == (1, 1, 128, 128)
  assert tree['layers']['0']['delta']['in_proj_z']['kernel'].storage.chunk_shape == (1, 128, 4, 64)


def rewritten(directory, change):
  tensors = load(directory)
  change(tensors)
  for file in directory.glob('*.safetensors*'):
    file.unlink()
  shards.write_tensors(directory, tensors.items())
  return directory


STACK = 'model.language_model.layers.0.mlp.experts'


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (
      lambda t: t.update({f'{STACK}.down_proj': t[f'{STACK}.down_proj'][:-1]}),
      r'experts\.down_proj has shape \[2, 128, 128\]; expected \[3, 128, 128\] for this config',
    ),
    (
      lambda t: t.update({f'{STACK}.gate_up_proj': t[f'{STACK}.gate_up_proj'][:, :128]}),
      r'gate_up_proj has shape \[3, 128, 128\]; expected \[3, 256, 128\] for this config',
    ),
    (
      lambda t: t.pop(f'{STACK}.gate_up_proj'),
      r'layers\.0\.mlp\.experts\.gate_up_proj is missing; expected shape \[3, 256, 128\]',
    ),
    (
      lambda t: t.update({f'{STACK}.gate_up_proj': np.zeros((3, 256, 128), np.int32)}),
      r'gate_up_proj is stored as I32; expected one of',
    ),
    (
      lambda t: t.update({'model.language_model.layers.2.input_layernorm.weight': np.ones(128)}),
      r'layers\.2\.input_layernorm\.weight is not one that the config implies \(1 such\)',
    ),
    (
      lambda t: t.update({'model.audio.proj.weight': np.ones(3)}),
      r'model\.audio\.proj\.weight is not one that the config implies',
    ),
  ],
)
def test_checkpoints_of_something_else_are_refused_by_name(published, tmp_path, change, message):
  with pytest.raises(ValueError, match=message):
    huggingface.open_model(rewritten(published, change))


def test_a_missing_expert(tmp_path):
  directory = write(tmp_path / 'source', 'qwen3_moe')
  name = 'model.layers.1.mlp.experts.2.up_proj.weight'
  with pytest.raises(ValueError, match=r'experts\.2\.up_proj\.weight is missing; expected shape'):
    huggingface.open_model(rewritten(directory, lambda t: t.pop(name)))


def test_a_fused_tensor_cut_off_in_its_file(published):
  for file in published.glob('*.safetensors'):
    file.write_bytes(file.read_bytes()[:-100])
  with pytest.raises(ValueError, match='is corrupt'):
    huggingface.open_model(published)


def test_an_expert_that_is_not_finite_is_named_and_leaves_nothing(published, tmp_path):
  def change(tensors):
    tensors[f'{STACK}.gate_up_proj'][1, 200, 5] = np.nan

  source = huggingface.open_model(rewritten(published, change))
  message = r'layers\.0\.mlp\.experts\.1\.up_proj\.weight holds NaN or infinity; expected finite'
  with pytest.raises(ValueError, match=message):
    checkpoints.write_policy(tmp_path / 'orbax', source)
  with pytest.raises(ValueError, match=message):
    export(source, tmp_path / 'view', 'nvfp4_w4a16')
  assert [path.name for path in tmp_path.iterdir()] == ['source']


@pytest.mark.parametrize('format', ['bf16', 'nvfp4_w4a16'])
def test_a_disk_that_fills_up_leaves_nothing_half_written(published, tmp_path, monkeypatch, format):
  write_file, left = os.pwrite, [200_000]

  def pwrite(handle, data, offset):
    if left[0] <= 0:
      raise OSError(errno.ENOSPC, 'No space left on device')
    left[0] -= len(data)
    return write_file(handle, data[: max(1, len(data) // 2)], offset)  # and in two goes

  monkeypatch.setattr(os, 'pwrite', pwrite)
  with pytest.raises(OSError, match='No space left'):
    export(huggingface.open_model(published), tmp_path / 'view', format)
  assert [path.name for path in tmp_path.iterdir()] == ['source']


def test_an_import_that_fails_leaves_nothing_half_written(published, tmp_path, monkeypatch):
  write_one, calls = chunked._write, []

  def fail(array, value):
    calls.append(value)
    if len(calls) == 5:
      raise OSError(errno.ENOSPC, 'No space left on device')
    write_one(array, value)

  monkeypatch.setattr(chunked, '_write', fail)
  with pytest.raises(OSError, match='No space left'):
    checkpoints.write_policy(tmp_path / 'orbax', huggingface.open_model(published))
  assert [path.name for path in tmp_path.iterdir()] == ['source']


def test_a_run_keeps_the_layout_and_what_is_carried(published, tmp_path):
  source = huggingface.open_model(published)
  store = checkpoints.Checkpoints(
    tmp_path / 'run' / 'checkpoints',
    keep=1,
    stacks=checkpoints.stacks_of(source.config),
    carried=source.origin.carried,
  )
  meta = checkpoints.policy_meta(source.config, source.tokenizer_files, source.origin.layout)
  params = source.params()
  for step in (1, 2):
    store.save(step, {'params': params, 'opt_state': ({'mu': params},)}, meta)
  store.close()
  reader = chunked.ChunkReader(tmp_path / 'run' / 'checkpoints' / '2' / 'state')
  for tree in (reader.tree['params'], reader.tree['opt_state'][0]['mu']):
    kernel = tree['layers']['0']['moe']['experts']['down_proj']['kernel']
    assert kernel.storage.chunk_shape == (1, 1, 128, 128)
  opened = checkpoints.open_policy(tmp_path / 'run')
  assert_same_tensors(load(export(opened, tmp_path / 'view')), load(published))
  again = checkpoints.Checkpoints(store.directory, keep=1, carried=opened.origin.carried)
  again.close()
  fewer = dataclasses.replace(opened.origin.carried, names=opened.origin.carried.names[1:])
  with pytest.raises(ValueError, match='holds 3 tensors; expected the 2 that the policy carries'):
    checkpoints.Checkpoints(store.directory, keep=1, carried=fewer)
  (store.directory / 'carried').rename(tmp_path / 'elsewhere')
  with pytest.raises(ValueError, match='carried is missing; expected the tensors that it carries'):
    checkpoints.open_policy(tmp_path / 'run')


def test_publications_carry_it_too(published, tmp_path):
  source = huggingface.open_model(published)
  store = FileStore(tmp_path / 'store')
  specs = {name: views.ViewSpec(name) for name in ('bf16', 'nvfp4_w4a16')}
  publisher = publication.Publisher(store, source.config, {}, specs, 0, origin=source.origin)
  snapshot = publication.Snapshot(source.config, source.params())
  version = publisher.publish(0, snapshot)
  assert not publisher.failures
  held = {name: load(publication.ViewFollower(store, name).open(version)) for name in specs}
  assert_same_tensors(held['bf16'], load(published))
  assert_same_tensors({name: held['nvfp4_w4a16'][name] for name in CARRIED}, CARRIED)


def test_a_sharded_save_has_one_layer_per_chunk_too(tmp_path):
  mesh = jax.make_mesh((4,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))
  x = np.arange(2 * 8 * 6, dtype=np.float32).reshape(2, 8, 6)
  placed = jax.device_put(x, jax.NamedSharding(mesh, jax.P(None, 'fsdp')))
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=1, stacks={('x',): 1})
  store.save(0, {'x': placed}, {})
  store.close()
  reader = chunked.ChunkReader(tmp_path / 'c' / '0' / 'state')
  assert reader.tree['x'].storage.chunk_shape == (1, 2, 6)
  np.testing.assert_array_equal(reader.read(('x',), (1,)), x[1])


def test_a_checkpoint_saved_in_one_chunk_is_read_too(tmp_path):
  x = np.arange(3 * 4 * 6, dtype=np.float32).reshape(3, 4, 6)
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=1)
  store.save(0, {'x': x}, {})
  store.close()
  reader = chunked.ChunkReader(tmp_path / 'c' / '0' / 'state')
  assert reader.tree['x'].storage.chunk_shape == (3, 4, 6)
  for index in ((2, 1), (0, 3), (1, 0)):
    np.testing.assert_array_equal(reader.read(('x',), index), x[index])
    np.testing.assert_array_equal(reader.read(('x',), index[:1]), x[index[0]])


def test_large_leaves_are_read_by_slices(tmp_path, monkeypatch):
  monkeypatch.setattr(chunked, 'CHUNK_BYTES', 2**20)
  x = np.arange(4096 * 256, dtype=np.float32).reshape(4096, 256)
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=1)
  store.save(0, {'x': x}, {})
  store.close()
  reader = chunked.ChunkReader(tmp_path / 'c' / '0' / 'state')
  assert reader.tree['x'].storage.chunk_shape == (1024, 256)
  got = reader.read(('x',), (slice(1000, 1100), slice(None)))
  np.testing.assert_array_equal(got, x[1000:1100])


def test_layout_of_a_meta_that_is_none():
  with pytest.raises(ValueError, match='expected fused_experts and a prefix'):
    layouts.Layout.from_json({'fused_experts': True, 'prefix': 'transformer'})
