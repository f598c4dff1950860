import dataclasses
import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mimo.models import decoder, table
from mimo.weights import huggingface

TOKENIZER = {'tokenizer.json': b'{"model": 1}', 'tokenizer_config.json': b'{}'}


@pytest.fixture
def checkpoint(tmp_path, config, params):
  huggingface.write_model(tmp_path / 'model', config, params, TOKENIZER)
  return tmp_path / 'model'


@pytest.fixture
def sharded(tmp_path, config, params):
  huggingface.write_model(tmp_path / 'model', config, params, TOKENIZER, shard_bytes=150_000)
  return tmp_path / 'model'


def edit_config(directory, **changes):
  raw = json.loads((directory / 'config.json').read_text())
  (directory / 'config.json').write_text(json.dumps(raw | changes))


def rewrite(directory, change):
  """Rewrites the tensors of a checkpoint of one file."""
  reader = huggingface.TensorReader(directory)
  tensors = {name: reader.read(name) for name in reader.names()}
  change(tensors)
  huggingface.write_tensors(directory, tensors.items())


def assert_same_files(a, b):
  assert sorted(x.name for x in a.iterdir()) == sorted(x.name for x in b.iterdir())
  for file in a.iterdir():
    assert file.read_bytes() == (b / file.name).read_bytes(), file.name


@pytest.mark.parametrize('kind', ['checkpoint', 'sharded'])
def test_round_trip_keeps_every_byte(kind, request, tmp_path, config):
  directory = request.getfixturevalue(kind)
  again, params = huggingface.read_model(directory)
  # What a fresh config leaves open, the file states: once written, it stays as it is.
  assert dataclasses.replace(again, extra=()) == config
  files = huggingface.read_tokenizer_files(directory)
  assert files == TOKENIZER
  shard_bytes = 150_000 if kind == 'sharded' else huggingface.SHARD_BYTES
  huggingface.write_model(tmp_path / 'again', again, params, files, shard_bytes=shard_bytes)
  assert_same_files(directory, tmp_path / 'again')


def test_tensors_are_bf16_and_parameters_float32(checkpoint, config, params):
  reader = huggingface.TensorReader(checkpoint)
  _, read = huggingface.read_model(checkpoint)
  for name, x in table.named_tensors(config, params):
    assert reader.info(name).dtype == 'BF16'
    expected = x.astype(ml_dtypes.bfloat16)
    assert reader.read(name).tobytes() == expected.tobytes()
  assert jax.tree.all(jax.tree.map(lambda x: x.dtype == np.float32, read))


def test_the_file_is_a_safetensors_file(checkpoint):
  """Read by the format's own library."""
  theirs = safetensors.numpy.load_file(checkpoint / 'model.safetensors')
  reader = huggingface.TensorReader(checkpoint)
  assert sorted(theirs) == list(reader.names())
  for name, x in theirs.items():
    assert x.dtype == ml_dtypes.bfloat16
    assert x.tobytes() == reader.read(name).tobytes()


@pytest.mark.parametrize('dtype', [np.float32, np.float16])
def test_other_dtypes(dtype, tmp_path, config, params):
  huggingface.write_model(tmp_path / 'x', config, params, {}, dtype=dtype)
  assert huggingface.read_config(tmp_path / 'x')['dtype'] == np.dtype(dtype).name
  _, read = huggingface.read_model(tmp_path / 'x')
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(np.asarray(a).astype(dtype), b), params, read
  )


def test_place_and_dtype(checkpoint):
  _, params = huggingface.read_model(
    checkpoint, dtype=ml_dtypes.bfloat16, place=lambda row, x: (row.hf_name, x.dtype)
  )
  assert params['final_norm']['scale'] == ('model.norm.weight', ml_dtypes.bfloat16)


def test_tied_by_config_with_another_head(checkpoint, config):
  head = np.ones((config.vocab_size, config.hidden_size), ml_dtypes.bfloat16)
  rewrite(checkpoint, lambda tensors: tensors.update({'lm_head.weight': head}))
  untied, params = huggingface.read_model(checkpoint)
  assert not untied.tie_embeddings
  np.testing.assert_array_equal(decoder.head_matrix(untied, params), 1.0)


def test_tied_by_config_with_the_same_head(checkpoint):
  rewrite(checkpoint, lambda t: t.update({'lm_head.weight': t['model.embed_tokens.weight']}))
  config, params = huggingface.read_model(checkpoint)
  assert config.tie_embeddings
  assert 'head' not in params


def test_tied_by_config_with_the_head_alone(checkpoint):
  embedding = huggingface.read_model(checkpoint)[1]['embed']['embedding']
  rewrite(checkpoint, lambda t: t.update({'lm_head.weight': t.pop('model.embed_tokens.weight')}))
  config, params = huggingface.read_model(checkpoint)
  assert config.tie_embeddings
  np.testing.assert_array_equal(params['embed']['embedding'], embedding)


def test_stale_dtype_names_are_dropped(tmp_path, config, params):
  old = dataclasses.replace(config, extra=(('torch_dtype', '"float32"'),))
  huggingface.write_model(tmp_path / 'x', old, params, {})
  raw = huggingface.read_config(tmp_path / 'x')
  assert raw['dtype'] == 'bfloat16'
  assert 'torch_dtype' not in raw


# Mistakes: one ValueError each, naming the file or tensor.


def refused(directory, message):
  with pytest.raises(ValueError, match=message) as caught:
    huggingface.read_model(directory)
  assert '\n' not in str(caught.value)


def test_missing_directory(tmp_path):
  refused(tmp_path / 'nowhere', 'nowhere is not a directory; expected a Hugging Face checkpoint')
  with pytest.raises(ValueError, match='nowhere is not a directory'):
    huggingface.TensorReader(tmp_path / 'nowhere')


def test_missing_config(checkpoint):
  (checkpoint / 'config.json').unlink()
  refused(checkpoint, r'config\.json is missing')


@pytest.mark.parametrize(
  ('text', 'message'), [('{"a"', r'config\.json is not JSON'), ('[1]', 'holds a list')]
)
def test_malformed_config(checkpoint, text, message):
  (checkpoint / 'config.json').write_text(text)
  refused(checkpoint, message)


def test_unknown_family(checkpoint):
  edit_config(checkpoint, model_type='gpt2')
  refused(checkpoint, r"config\.json: model_type is 'gpt2'; expected one of \['llama', 'qwen3'")


def test_quantised_checkpoint(checkpoint):
  edit_config(checkpoint, quantization_config={'quant_method': 'fp8'})
  refused(checkpoint, 'has a quantization_config; expected plain weights')


def test_missing_shard(sharded):
  file = min(sharded.glob('*.safetensors'))
  file.unlink()
  refused(sharded, f'{file.name} is missing')


def test_missing_tensor(checkpoint):
  rewrite(checkpoint, lambda tensors: tensors.pop('model.norm.weight'))
  refused(checkpoint, r'tensor model\.norm\.weight is missing; expected shape \[128\]')


def test_wrong_shape(checkpoint):
  edit_config(checkpoint, intermediate_size=64)
  refused(checkpoint, r'gate_proj\.weight has shape \[128, 128\]; expected \[64, 128\]')


@pytest.mark.parametrize(
  'name', ['model.layers.2.mlp.up_proj.weight', 'model.layers.0.self_attn.q_proj.bias']
)
def test_a_tensor_left_over_is_refused(checkpoint, name):
  rewrite(checkpoint, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
  refused(checkpoint, rf'tensor {name} is not one that the config implies \(1 such\)')


def test_rotary_frequencies_of_old_checkpoints_are_ignored(checkpoint):
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  rewrite(checkpoint, lambda tensors: tensors.update({name: np.zeros(3, np.float32)}))
  huggingface.read_model(checkpoint)


def test_untied_config_without_a_head(checkpoint):
  edit_config(checkpoint, tie_word_embeddings=False)
  refused(checkpoint, r'tensor lm_head\.weight is missing; expected shape \[48, 128\]')


def test_tensor_of_integers(checkpoint):
  def change(tensors):
    tensors['model.norm.weight'] = np.zeros(128, np.int32)

  rewrite(checkpoint, change)
  refused(checkpoint, r"tensor model\.norm\.weight is stored as I32; expected one of \['BF16'")


# Writing: whole or not at all.


def test_an_occupied_target_is_refused(checkpoint, config, params):
  before = sorted(checkpoint.iterdir())
  with pytest.raises(ValueError, match='model exists and is not empty'):
    huggingface.write_model(checkpoint, config, params, {})
  assert sorted(checkpoint.iterdir()) == before
  file = checkpoint / 'config.json'
  with pytest.raises(ValueError, match=r'config\.json exists and is not empty'):
    huggingface.write_model(file, config, params, {})


def test_an_empty_target_is_taken(tmp_path, config, params):
  (tmp_path / 'model').mkdir()
  huggingface.write_model(tmp_path / 'model', config, params, {})
  assert (tmp_path / 'model' / 'config.json').is_file()


def test_a_failure_leaves_nothing(tmp_path, config, params):
  broken = {key: value for key, value in params.items() if key != 'final_norm'}
  with pytest.raises(KeyError):
    huggingface.write_model(tmp_path / 'a' / 'model', config, broken, {})
  assert list((tmp_path / 'a').iterdir()) == []


def test_the_directory_appears_at_the_end(tmp_path):
  with huggingface.new_directory(tmp_path / 'x') as temporary:
    (temporary / 'file').write_text('1')
    assert not (tmp_path / 'x').exists()
  assert [x.name for x in tmp_path.iterdir()] == ['x']
  assert (tmp_path / 'x' / 'file').read_text() == '1'


def test_the_directory_has_ordinary_permissions(tmp_path):
  (tmp_path / 'ordinary').mkdir()
  with huggingface.new_directory(tmp_path / 'x'):
    pass
  modes = [(tmp_path / name).stat().st_mode for name in ('x', 'ordinary')]
  assert modes[0] == modes[1]


def test_a_target_that_fills_up_meanwhile_is_not_replaced(tmp_path):
  with (
    pytest.raises(OSError, match='not empty'),
    huggingface.new_directory(tmp_path / 'x') as temporary,
  ):
    (temporary / 'mine').touch()
    (tmp_path / 'x').mkdir()
    (tmp_path / 'x' / 'theirs').touch()
  assert [x.name for x in (tmp_path / 'x').iterdir()] == ['theirs']


def test_files_are_readable_by_a_server_of_another_user(tmp_path):
  mask = os.umask(0o022)
  try:
    with huggingface.new_directory(tmp_path / 'made') as directory:
      (directory / 'private').write_bytes(b'')
      (directory / 'private').chmod(0o600)
  finally:
    os.umask(mask)
  assert (tmp_path / 'made').stat().st_mode & 0o777 == 0o755
  assert (tmp_path / 'made' / 'private').stat().st_mode & 0o777 == 0o644
