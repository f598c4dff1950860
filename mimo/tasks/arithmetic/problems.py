"""Arithmetic word problems with an integer answer, generated from a seed.

What is asked of the numbers decides the split: a problem is held out when the checksum of its kind
and numbers says so, so no held-out sum is ever trained on under another story.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import zlib
from collections.abc import Callable

import numpy as np

SIZES = {'train': 4096, 'heldout': 64}
_SEED = 20250207
_HELDOUT_SHARE = 8  # one in so many

_NAMES = ('Anna', 'Ben', 'Carla', 'David', 'Emma', 'Farid', 'Grace', 'Hugo', 'Ines', 'Jack')
_THINGS = ('apples', 'books', 'coins', 'pencils', 'shells', 'stickers', 'marbles', 'cards')


@dataclasses.dataclass(frozen=True)
class Problem:
  """One word problem.

  Attributes:
    id: unique among all problems that differ.
    text: the question.
    answer: what it asks for.
  """

  id: str
  text: str
  answer: int


@dataclasses.dataclass(frozen=True)
class _Kind:
  """One family: the largest values of its two numbers, its story and its answer."""

  name: str
  limits: tuple[int, int]
  story: str
  answer: Callable[[int, int], int]


# As hard as a model of 135M parameters can sometimes do.
_KINDS = (
  _Kind('gain', (12, 12), '{name} has {a} {thing} and gets {b} more. How many now?', operator.add),
  _Kind('loss', (18, 9), '{name} has {a} {thing} and loses {b}. How many are left?', operator.sub),
  _Kind('bags', (9, 9), '{name} has {a} bags of {b} {thing}. How many {thing}?', operator.mul),
)


def _draw(rng: np.random.Generator) -> tuple[_Kind, tuple[int, int]]:
  """Draws a kind and its numbers, both at least 2, with an answer of at least 1."""
  while True:
    kind = _KINDS[rng.integers(len(_KINDS))]
    a, b = (int(rng.integers(2, limit + 1)) for limit in kind.limits)
    if kind.answer(a, b) >= 1:
      return kind, (a, b)


def _held_out(kind: _Kind, numbers: tuple[int, int]) -> bool:
  return zlib.crc32(repr((kind.name, numbers)).encode()) % _HELDOUT_SHARE == 0


def _make(rng: np.random.Generator, *, held_out: bool) -> Problem:
  while True:
    kind, numbers = _draw(rng)
    if _held_out(kind, numbers) == held_out:
      break
  name, thing = _NAMES[rng.integers(len(_NAMES))], _THINGS[rng.integers(len(_THINGS))]
  a, b = numbers
  text = kind.story.format(name=name, thing=thing, a=a, b=b)
  return Problem(f'{kind.name}_{a}_{b}_{name}_{thing}', text, kind.answer(a, b))


@functools.cache
def _heldout_problems() -> tuple[Problem, ...]:
  """Returns the held-out problems, all different."""
  rng = np.random.default_rng([_SEED, 1])
  found: dict[str, Problem] = {}
  while len(found) < SIZES['heldout']:
    made = _make(rng, held_out=True)
    found[made.id] = made
  return tuple(found.values())


def problem(split: str, index: int) -> Problem:
  """Returns problem `index` of a split. Raises ValueError for one that isn't there."""
  if split not in SIZES:
    raise ValueError(f'arithmetic has no split {split!r}; expected one of {sorted(SIZES)}')
  if not 0 <= index < SIZES[split]:
    raise ValueError(f'task {index} of {split}; expected 0 to {SIZES[split] - 1}')
  if split == 'heldout':
    return _heldout_problems()[index]
  return _make(np.random.default_rng([_SEED, 0, index]), held_out=False)
