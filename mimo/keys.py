"""Random keys by purpose: two purposes never share one, whatever their numbers.

A key hashes a word for its purpose, how many numbers follow, and the numbers. The word keeps the
keys of an evaluation apart from those of training; the count is needed because numpy's SeedSequence
pads what it is given with zeros, so that `[1, 2, 3]` and `[1, 2, 3, 0]` are one to it.

The hash is numpy's, whose output is fixed across its versions and across platforms. It takes
microseconds on the host and wakes no device.
"""

from __future__ import annotations

import hashlib

import numpy as np

_WORD = 2**32


def seed_sequence(purpose: str, *numbers: int) -> np.random.SeedSequence:
  """Returns the source of random words for one purpose and its numbers.

  Args:
    purpose: what the random words are for, such as 'session'; not empty.
    *numbers: which of them, such as a seed and a group; each in [0, 2**32).

  Raises:
    ValueError: the purpose is empty, or a number is outside of its range.

  >>> seed_sequence('session', 0, 5).generate_state(1).dtype
  dtype('uint32')
  """
  if not purpose:
    raise ValueError('purpose is empty; expected a word that says what the key is for')
  for number in numbers:
    if not 0 <= number < _WORD:
      raise ValueError(f'a number of key {purpose!r} is {number}; expected one in [0, 2**32)')
  digest = hashlib.sha256(purpose.encode()).digest()
  words = np.frombuffer(digest, '<u4')[:2]
  return np.random.SeedSequence([*map(int, words), len(numbers), *map(int, numbers)])


def key(purpose: str, *numbers: int) -> np.ndarray:
  """Returns [2] uint32: the random key for one purpose and its numbers; see `seed_sequence`.

  >>> bool((key('session', 0, 5) == key('evaluation', 0, 5)).any())
  False
  """
  return seed_sequence(purpose, *numbers).generate_state(2, np.uint32)
