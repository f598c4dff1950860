import itertools

import numpy as np

from mimo.rollouts.keys import session_key


def _seed_seq(words):
  """O'Neill's seed_seq_fe128, as numpy documents it for SeedSequence: [2] uint32 from 4 words."""
  word = 2**32
  const = 0x43B0D7E5

  def hashed(value):
    nonlocal const
    value ^= const
    const = const * 0x931E8875 % word
    value = value * const % word
    return value ^ (value >> 16)

  pool = [hashed(value) for value in words]
  for src in range(4):
    for dst in range(4):
      if src != dst:
        mixed = (0xCA01F9DD * pool[dst] - 0x4973F715 * hashed(pool[src])) % word
        pool[dst] = mixed ^ (mixed >> 16)
  out, const = [], 0x8B51F9DD
  for value in pool[:2]:
    value ^= const
    const = const * 0x58F38DED % word
    value = value * const % word
    out.append(value ^ (value >> 16))
  return out


def test_a_key_is_the_hash_of_its_numbers():
  key = session_key(seed=1, update=2, group=3, member=4)
  assert key.dtype == np.uint32 and key.shape == (2,)
  assert key.tolist() == _seed_seq([1, 2, 3, 4])


def test_keys_differ():
  numbers = itertools.product(range(3), range(5), range(20), range(8))
  keys = {
    tuple(session_key(seed=s, update=u, group=g, member=m).tolist()) for s, u, g, m in numbers
  }
  assert len(keys) == 3 * 5 * 20 * 8
