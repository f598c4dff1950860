import ast
import itertools
import pathlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mimo import keys
from mimo.evaluation.evaluate import sample_key

_WORD = st.integers(0, 2**32 - 1)


def _seed_seq(words):
  """O'Neill's seed_seq_fe128, as numpy documents it for SeedSequence: [2] uint32 of its output."""
  word = 2**32
  const = 0x43B0D7E5

  def hashed(value):
    nonlocal const
    value ^= const
    const = const * 0x931E8875 % word
    value = value * const % word
    return value ^ (value >> 16)

  def mix(x, y):
    mixed = (0xCA01F9DD * x - 0x4973F715 * y) % word
    return mixed ^ (mixed >> 16)

  pool = [hashed(value) for value in (words + [0] * 4)[:4]]
  for src in range(4):
    for dst in range(4):
      if src != dst:
        pool[dst] = mix(pool[dst], hashed(pool[src]))
  for value in words[4:]:
    for dst in range(4):
      pool[dst] = mix(pool[dst], hashed(value))
  out, const = [], 0x8B51F9DD
  for value in pool[:2]:
    value ^= const
    const = const * 0x58F38DED % word
    value = value * const % word
    out.append(value ^ (value >> 16))
  return out


def test_a_key_is_the_hash_of_its_purpose_and_numbers():
  # sha256('abc') is the standard's own example, ba7816bf 8f01cfea ...; words are little endian.
  key = keys.key('abc', 1, 2, 3)
  assert key.dtype == np.uint32 and key.shape == (2,)
  assert key.tolist() == _seed_seq([0xBF1678BA, 0xEACF018F, 3, 1, 2, 3])
  assert keys.key('abc').tolist() == _seed_seq([0xBF1678BA, 0xEACF018F, 0])


def test_zeros_at_the_end_count():
  """numpy pads with zeros: without the count these are one."""
  assert keys.key('abc', 1, 2, 3).tolist() != keys.key('abc', 1, 2, 3, 0).tolist()
  assert keys.key('abc').tolist() != keys.key('abc', 0).tolist()


@hypothesis.given(_WORD, _WORD, _WORD)
def test_an_evaluation_never_draws_with_a_key_of_training(seed, first, second):
  """Before, key (seed, problem, sample) was key (seed, update, group, member 0) of training."""
  training = keys.key('session', seed, first, second).tolist()
  assert sample_key(seed, first, second).tolist() != training
  assert sample_key(seed, first, second).tolist() != keys.key('session', seed, second, 0).tolist()


def test_keys_of_one_purpose_differ():
  numbers = itertools.product(range(3), range(60), range(8))
  found = {tuple(keys.key('session', s, g, m).tolist()) for s, g, m in numbers}
  assert len(found) == 3 * 60 * 8


def test_each_purpose_is_one_place_s():
  purposes, calls = [], ('keys.key', 'keys.seed_sequence')
  for path in pathlib.Path(keys.__file__).parent.rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
        assert isinstance(node.args[0], ast.Constant), f'{path}:{node.lineno}'
        purposes.append(node.args[0].value)
      elif isinstance(node, ast.Attribute | ast.Name):
        assert 'SeedSequence' not in ast.unparse(node) or path.name == 'keys.py', path
  assert len(set(purposes)) == len(purposes) >= 6, purposes


@pytest.mark.parametrize('number', [-1, 2**32, 2**40])
def test_a_number_beyond_a_word_is_refused(number):
  with pytest.raises(ValueError, match=rf"key 'session' is {number}; expected one in \[0, 2\*\*32"):
    keys.key('session', 0, number)


def test_a_key_for_nothing_is_refused():
  with pytest.raises(ValueError, match='purpose is empty'):
    keys.key('', 1)
