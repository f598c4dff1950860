"""Random keys of sessions."""

from __future__ import annotations

import numpy as np


def session_key(*, seed: int, update: int, group: int, member: int) -> np.ndarray:
  """Returns [2] uint32: the key of one session, by hashing its four numbers.

  The hash is numpy's SeedSequence, whose output is fixed across numpy versions and platforms; it
  costs microseconds on the host and wakes no device. A retry of a lost attempt has the same key:
  with other draws, what made an episode get lost (its length, say) would be selected against.
  """
  return np.random.SeedSequence([seed, update, group, member]).generate_state(2, np.uint32)
