import dataclasses
import hashlib
import json

import numpy as np
import pytest
import safetensors.numpy

from mimo.samplers.vllm.view_files import check_files, check_layout, read_layout

CONFIG = {'model_type': 'qwen3', 'hidden_size': 4, 'dtype': 'bfloat16'}


@pytest.fixture
def view(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  for name, tensors in {
    'a.safetensors': {'x': np.zeros((2, 3), np.float32), 'y': np.ones(4, np.float16)},
    'b.safetensors': {'z': np.ones(1, np.uint8)},
  }.items():
    safetensors.numpy.save_file(tensors, tmp_path / name)
  return tmp_path


def _files(view):
  contents = {path.name: path.read_bytes() for path in view.iterdir()}
  return {name: (hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}


def test_layout(view):
  layout = read_layout(str(view))
  assert layout.tensors == {'x': ('F32', (2, 3)), 'y': ('F16', (4,)), 'z': ('U8', (1,))}
  assert layout.config == {'model_type': 'qwen3', 'hidden_size': 4}
  check_layout(layout, layout)


@pytest.mark.parametrize('keep_bytes', [0, 4, 20, 150, -1])
def test_a_shard_that_is_cut_short_is_named(view, keep_bytes):
  shard = view / 'a.safetensors'
  shard.write_bytes(shard.read_bytes()[:keep_bytes])
  with pytest.raises(ValueError, match=r'a\.safetensors'):
    read_layout(str(view))


def test_a_tensor_in_two_shards_is_refused(view):
  safetensors.numpy.save_file({'x': np.zeros(1, np.float32)}, view / 'c.safetensors')
  with pytest.raises(ValueError, match='tensor x is in another shard too'):
    read_layout(str(view))


def test_what_is_no_view_is_refused(view):
  (view / 'config.json').write_text('{')
  with pytest.raises(ValueError, match=r'config\.json'):
    read_layout(str(view))
  with pytest.raises(ValueError, match=r'config\.json'):
    read_layout(str(view / 'nowhere'))


@pytest.mark.parametrize(
  ('config', 'tensors', 'message'),
  [
    ({'hidden_size': 8}, {}, 'hidden_size is 8; expected 4'),
    ({'quantization_config': {'a': 1}}, {}, 'quantization_config is {"a": 1}; expected null'),
    ({}, {'x': None}, r'tensor x is missing \(1 such\)'),
    ({}, {'new': ('F32', (1,))}, 'tensor new is not one of this model'),
    ({}, {'x': ('F32', (3, 2))}, 'tensor x is'),
    ({}, {'x': ('BF16', (2, 3))}, 'tensor x is'),
  ],
)
def test_another_layout_is_refused(view, config, tensors, message):
  expected = read_layout(str(view))
  entries = {k: v for k, v in {**expected.tensors, **tensors}.items() if v is not None}
  got = dataclasses.replace(expected, config={**expected.config, **config}, tensors=entries)
  with pytest.raises(ValueError, match=message):
    check_layout(got, expected)


def test_files_as_published(view):
  files = _files(view)
  check_files(str(view), files)
  (view / 'extra').write_bytes(b'')
  with pytest.raises(ValueError, match='extra was not published'):
    check_files(str(view), files)
  (view / 'extra').unlink()
  shard = view / 'a.safetensors'
  content = bytearray(shard.read_bytes())
  content[-1] ^= 1
  shard.write_bytes(content)
  with pytest.raises(ValueError, match=r'a\.safetensors is corrupt'):
    check_files(str(view), files)
  shard.unlink()
  with pytest.raises(ValueError, match=r'a\.safetensors is missing'):
    check_files(str(view), files)
  with pytest.raises(ValueError, match='is not a directory'):
    check_files(str(view / 'nowhere'), files)
