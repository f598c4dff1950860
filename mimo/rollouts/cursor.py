"""The order of prompts, and which of them are out with samplers."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np

from mimo import keys
from mimo.types import PromptRef


def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
  """Returns [size] int64: the order of a split in one epoch.

  It sorts hashed numbers, which are fixed across versions of numpy, unlike a Generator's shuffle.
  """
  noise = keys.seed_sequence('prompts', seed, epoch).generate_state(size, np.uint64)
  return np.argsort(noise, kind='stable')


class Cursor:
  """Hands out prompts: each epoch the whole split once, in an order of its own.

  A group's number counts prompts handed out, so it names the prompt: number g is place g mod size
  of epoch g div size. A prompt is outstanding from `take` until `done`. A cursor made from a state
  hands the outstanding ones out again first, lowest number first, and then goes on.
  """

  def __init__(
    self, *, split: str, size: int, seed: int, state: Mapping[str, Any] | None = None
  ) -> None:
    """Raises ValueError for an empty split, or for a state of another split, size or seed."""
    if size < 1:
      raise ValueError(f'split {split!r} holds {size} tasks; expected at least 1')
    self._split = split
    self._size = size
    self._seed = seed
    self._next = 0
    self._outstanding: set[int] = set()
    self._again: collections.deque[int] = collections.deque()
    self._epoch = -1
    self._order = np.zeros(0, np.int64)
    if state is not None:
      for name, value in (('split', split), ('size', size), ('seed', seed)):
        if state[name] != value:
          raise ValueError(f'the state is of {name} {state[name]!r}; expected {value!r}')
      self._next = int(state['next'])
      self._outstanding = {int(group) for group in state['outstanding']}
      self._again.extend(sorted(self._outstanding))

  def take(self) -> PromptRef:
    """Returns the next prompt; it is outstanding from now on."""
    if self._again:
      return self._ref(self._again.popleft())
    group, self._next = self._next, self._next + 1
    self._outstanding.add(group)
    return self._ref(group)

  def done(self, group: int) -> None:
    """Marks a group as trained on or dropped. Raises ValueError when it is not outstanding."""
    if group not in self._outstanding:
      raise ValueError(f'group {group} is not outstanding; expected one that was handed out')
    self._outstanding.remove(group)

  def requeue(self) -> None:
    """Hands everything outstanding out again before any other, lowest number first."""
    self._again = collections.deque(sorted(self._outstanding))

  def state(self) -> dict[str, Any]:
    """Returns a JSON object."""
    return {
      'split': self._split,
      'size': self._size,
      'seed': self._seed,
      'next': self._next,
      'outstanding': sorted(self._outstanding),
    }

  def _ref(self, group: int) -> PromptRef:
    epoch, place = divmod(group, self._size)
    if epoch != self._epoch:
      self._epoch, self._order = epoch, permutation(self._seed, epoch, self._size)
    return PromptRef(group, self._split, int(self._order[place]))
