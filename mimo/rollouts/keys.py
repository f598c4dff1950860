"""Random keys of sessions."""

from __future__ import annotations

import numpy as np

from mimo import keys


def session_key(*, seed: int, group: int, member: int) -> np.ndarray:
  """Returns [2] uint32: the key of one session. A group's number is its own within a run.

  A retry of a lost attempt has the same key: with other draws, what made an episode get lost (its
  length, say) would be selected against.
  """
  return keys.key('session', seed, group, member)
