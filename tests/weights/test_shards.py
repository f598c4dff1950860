"""Shards filled in any order, against the safetensors library."""

import concurrent.futures
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mimo.weights import shards

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
RNG = np.random.default_rng(0)
ARRAYS = {
  'a': RNG.standard_normal((4, 3)).astype(BF16),
  'b': RNG.standard_normal((5, 2)).astype(np.float32),
  'c': RNG.standard_normal((7, 2)).astype(E4M3),
  'd': np.array([1, 255, 3], np.uint8),
  'e': np.array(3.5, np.float32),
  'f': np.zeros((0, 4), np.float16),
}
EVERY_DTYPE = {
  f'{dtype}.{i}': np.arange(3).astype(dtype)
  for i in (1, 0)
  for dtype in (
    *('float64', 'float32', 'float16', 'int64', 'int32', 'int16', 'int8', 'uint8', 'bool'),
    *(BF16, E4M3, ml_dtypes.float8_e5m2),
  )
}


def files_of(directory):
  return sorted(directory.glob('*.safetensors'))


def plan_of(arrays):
  return [shards.TensorSpec(name, x.dtype, x.shape) for name, x in arrays.items()]


@pytest.mark.parametrize('arrays', [ARRAYS, EVERY_DTYPE, {'ü"\n': np.zeros(2, np.uint8)}])
def test_the_file_is_the_librarys_byte_for_byte(tmp_path, arrays):
  shards.write_tensors(tmp_path, arrays.items())
  safetensors.numpy.save_file(arrays, tmp_path / 'theirs', metadata={'format': 'pt'})
  assert (tmp_path / 'model.safetensors').read_bytes() == (tmp_path / 'theirs').read_bytes()


def test_shards_and_index(tmp_path):
  shards.write_tensors(tmp_path, ARRAYS.items(), shard_bytes=40)
  files = files_of(tmp_path)
  assert [f.name for f in files] == [f'model-0000{i}-of-00003.safetensors' for i in (1, 2, 3)]
  index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  assert index['metadata']['total_size'] == 24 + 40 + 14 + 3 + 4
  held = [{name for name, _ in safetensors.deserialize(f.read_bytes())} for f in files]
  assert held == [{'a'}, {'b'}, {'c', 'd', 'e', 'f'}]
  assert index['weight_map'] == {
    name: files[i].name for i, names in enumerate(held) for name in sorted(names)
  }


def test_a_tensor_above_the_limit_has_a_shard_of_its_own(tmp_path):
  arrays = [(name, np.zeros(n, np.uint8)) for name, n in (('a', 10), ('b', 99), ('c', 10))]
  shards.write_tensors(tmp_path, arrays, shard_bytes=20)
  assert [list(safetensors.numpy.load_file(f)) for f in files_of(tmp_path)] == [['a'], ['b'], ['c']]


def test_parts_in_any_order_from_several_threads(tmp_path):
  whole = np.arange(2 * 3 * 8 * 5, dtype=np.float32).reshape(2, 3, 8, 5)
  spec = shards.TensorSpec('stack', whole.dtype, whole.shape)
  last = shards.TensorSpec('z', np.dtype(np.float32), (4,))
  parts = [((i, j), row) for i in (1, 0) for j in (2, 0, 1) for row in (3, 0)]

  def write(part):
    index, row = part
    rows = slice(3, 8) if row else slice(0, 3)
    writer.write('stack', whole[index][rows], index, row)

  with (
    shards.TensorWriter(tmp_path, [last, spec]) as writer,
    concurrent.futures.ThreadPoolExecutor(4) as pool,
  ):
    writer.write('z', np.ones(4, np.float32))
    list(pool.map(write, parts))
  got = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  np.testing.assert_array_equal(got['stack'], whole)
  np.testing.assert_array_equal(got['z'], 1.0)


@pytest.mark.parametrize(
  ('writes', 'message'),
  [
    ([('a', 0)], r'tensor b was not written whole \(1 such\)'),
    ([('a', 0), ('a', 0), ('b', 0)], 'tensor a came twice'),
    ([('x', 0)], 'tensor x is not one of the plan'),
    ([('a', 1)], r'a is uint8 \[4\] at \[1\]; expected uint8 within \[4\]'),
  ],
)
def test_mistakes_by_name(tmp_path, writes, message):
  plan = plan_of({'a': np.zeros(4, np.uint8), 'b': np.zeros(4, np.uint8)})
  with (
    pytest.raises(ValueError, match=message),
    shards.TensorWriter(tmp_path, plan) as writer,
  ):
    for name, row in writes:
      writer.write(name, np.zeros(4, np.uint8), (), row)


def test_a_plan_that_names_a_tensor_twice(tmp_path):
  with pytest.raises(ValueError, match='tensor a came twice'):
    shards.write_tensors(tmp_path, [('a', np.zeros(1)), ('a', np.zeros(1))])


def test_wrong_dtype(tmp_path):
  with (
    pytest.raises(ValueError, match=r'a is float32 \[4\] at \[0\]; expected uint8 within \[4\]'),
    shards.TensorWriter(tmp_path, plan_of({'a': np.zeros(4, np.uint8)})) as writer,
  ):
    writer.write('a', np.zeros(4, np.float32))
