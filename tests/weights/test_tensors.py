import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from mimo.weights import shards, tensors

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)
ARRAYS = {
  'a': RNG.standard_normal((4, 3)).astype(BF16),
  'b': RNG.standard_normal((5, 2)).astype(np.float32),
  'c': RNG.standard_normal((7, 2)).astype(E4M3),
  'd': np.array([1, 255, 3], np.uint8),
  'e': np.float32(3.5).reshape(()),
  'f': np.zeros((0, 4), np.float16),
}


@pytest.fixture
def single(tmp_path):
  shards.write_tensors(tmp_path, ARRAYS.items())
  return tmp_path


@pytest.fixture
def sharded(tmp_path):
  shards.write_tensors(tmp_path, ARRAYS.items(), shard_bytes=40)
  return tmp_path


def files_of(directory):
  return sorted(directory.glob('*.safetensors'))


def refused(directory, message):
  with pytest.raises(ValueError, match=message) as caught:
    tensors.TensorReader(directory)
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('kind', ['single', 'sharded'])
def test_round_trip_keeps_dtype_shape_and_bits(kind, request):
  reader = tensors.TensorReader(request.getfixturevalue(kind))
  assert reader.names() == tuple(ARRAYS)
  for name, x in ARRAYS.items():
    got = reader.read(name)
    assert (got.dtype, got.shape, got.tobytes()) == (x.dtype, x.shape, x.tobytes())
    assert reader.info(name).shape == x.shape


def test_the_file_is_a_safetensors_file(single):
  """Read by the format's own library, and told to be PyTorch's, as transformers demands."""
  with safetensors.safe_open(single / 'model.safetensors', 'np') as file:
    assert file.metadata() == {'format': 'pt'}
    assert sorted(file.keys()) == list(ARRAYS)
  parts = safetensors.deserialize((single / 'model.safetensors').read_bytes())
  assert {name: (part['dtype'], part['shape'], part['data']) for name, part in parts} == {
    'a': ('BF16', [4, 3], ARRAYS['a'].tobytes()),
    'b': ('F32', [5, 2], ARRAYS['b'].tobytes()),
    'c': ('F8_E4M3', [7, 2], ARRAYS['c'].tobytes()),
    'd': ('U8', [3], b'\x01\xff\x03'),
    'e': ('F32', [], ARRAYS['e'].tobytes()),
    'f': ('F16', [0, 4], b''),
  }


def test_unknown_names_are_key_errors(single):
  reader = tensors.TensorReader(single)
  assert 'a' in reader
  assert 'nothing' not in reader
  for method in (reader.read, reader.info):
    with pytest.raises(KeyError, match='nothing'):
      method('nothing')


def test_parts_are_read_alone(tmp_path):
  stack = RNG.standard_normal((3, 6, 4)).astype(BF16)
  shards.write_tensors(tmp_path, [('stack', stack), ('vector', stack[0, 0])])
  reader = tensors.TensorReader(tmp_path)
  for index in ((), (2,), (1, 5)):
    assert reader.read('stack', index).tobytes() == stack[index].tobytes()
  got = reader.read('stack', (1,), slice(2, 5))
  assert got.shape == (3, 4) and got.tobytes() == stack[1, 2:5].tobytes()
  assert reader.read('vector', (), slice(1, 99)).tobytes() == stack[0, 0, 1:].tobytes()
  scratch = tensors.Scratch()
  first = reader.read('stack', (0,), scratch=scratch)
  assert first.tobytes() == stack[0].tobytes()
  assert reader.read('stack', (2,), scratch=scratch).tobytes() == stack[2].tobytes()
  assert first.tobytes() == stack[2].tobytes()
  for index in ((3,), (-1,), (0, 0, 0, 0)):
    with pytest.raises(IndexError, match='tensor stack of shape'):
      reader.read('stack', index)


@pytest.mark.parametrize('cpu', [True, False])
@pytest.mark.parametrize('dtype', [BF16, E4M3, np.float32, np.float64])
def test_contiguous_copies_of_transposed_matrices(dtype, cpu, monkeypatch):
  if not cpu:
    monkeypatch.setattr(tensors, '_cpu', lambda: None)
  x = RNG.standard_normal((70, 130)).astype(dtype)
  for view in (x, x.T, x[::2].T, x.reshape(70, 10, 13), x[0]):
    got = tensors.contiguous(view)
    assert got.flags.c_contiguous and got.dtype == dtype and got.shape == view.shape
    assert got.tobytes() == view.tobytes()


# Mistakes: one ValueError each, naming the file.


def test_missing_directory(tmp_path):
  refused(tmp_path / 'nowhere', 'nowhere is not a directory; expected a Hugging Face checkpoint')


def test_no_weights(tmp_path):
  refused(tmp_path, r'holds neither model\.safetensors nor model\.safetensors\.index\.json')


def test_missing_shards_are_named_together(sharded):
  files = files_of(sharded)
  files[0].unlink()
  files[2].unlink()
  refused(sharded, rf'{files[0].name} is missing; .*{files[2].name} is missing')


@pytest.mark.parametrize('size', [0, 4, 50, -1])
def test_truncated_shard(sharded, size):
  file = files_of(sharded)[1]
  file.write_bytes(file.read_bytes()[:size])
  refused(sharded, rf'{file.name} is corrupt')


def test_padded_file(single):
  file = single / 'model.safetensors'
  file.write_bytes(file.read_bytes() + b'0')
  refused(single, r'model\.safetensors is corrupt: \d+ bytes; expected \d+')


@pytest.mark.parametrize(
  'header',
  [
    b'not json',
    b'[]',
    b'{"a": 3}',
    b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [1]}}',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
    b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}',
    b'\xff\xfe',
  ],
)
def test_corrupt_header(tmp_path, header):
  content = struct.pack('<Q', len(header)) + header + b'\0' * 4
  (tmp_path / 'model.safetensors').write_bytes(content)
  refused(tmp_path, r'model\.safetensors is corrupt: its header is no safetensors header')


def test_file_that_shrinks_while_it_is_read(single):
  reader = tensors.TensorReader(single)
  file = single / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:-30])
  with pytest.raises(ValueError, match=r'model\.safetensors ends inside tensor'):
    for name in reader.names():
      reader.read(name)


@pytest.mark.parametrize(
  'text', ['{}', '[]', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', 'x']
)
def test_malformed_index(sharded, text):
  (sharded / 'model.safetensors.index.json').write_text(text)
  refused(sharded, r'model\.safetensors\.index\.json')


def test_index_that_points_out_of_the_directory(sharded):
  (sharded / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "../x"}}')
  refused(sharded, r'index\.json')


def test_index_that_places_a_tensor_elsewhere(sharded):
  path = sharded / 'model.safetensors.index.json'
  index = json.loads(path.read_text())
  index['weight_map']['a'] = files_of(sharded)[1].name
  path.write_text(json.dumps(index))
  refused(sharded, rf'{files_of(sharded)[1].name} lacks tensor a, which')
