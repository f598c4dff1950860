"""Arithmetic word problems with an integer answer, generated from a seed.

What is asked of the numbers decides the split: a problem is held out when the checksum of its kind
and numbers says so, so no held-out sum is ever trained on under another story.
"""

from __future__ import annotations

import dataclasses
import functools
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
  """One family: how many numbers it takes, their largest values, its story and its answer."""

  name: str
  limits: tuple[int, ...]
  story: str
  answer: Callable[..., int]


_KINDS = (
  _Kind(
    'gain',
    (20, 20),
    '{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?',
    lambda a, b: a + b,
  ),
  _Kind(
    'loss',
    (20, 20),
    '{name} has {a} {thing} and gives away {b}. How many {thing} does {name} have left?',
    lambda a, b: a - b,
  ),
  _Kind(
    'bags',
    (9, 9),
    '{name} has {a} bags with {b} {thing} in each bag. How many {thing} does {name} have?',
    lambda a, b: a * b,
  ),
  _Kind(
    'gain_loss',
    (20, 20, 20),
    '{name} has {a} {thing}, gets {b} more and then loses {c}. How many {thing} does {name} have '
    'now?',
    lambda a, b, c: a + b - c,
  ),
)


def _draw(rng: np.random.Generator) -> tuple[_Kind, tuple[int, ...]]:
  """Draws a kind and its numbers, all at least 2, with an answer of at least 1."""
  while True:
    kind = _KINDS[rng.integers(len(_KINDS))]
    numbers = tuple(int(rng.integers(2, limit + 1)) for limit in kind.limits)
    if kind.answer(*numbers) >= 1:
      return kind, numbers


def _held_out(kind: _Kind, numbers: tuple[int, ...]) -> bool:
  return zlib.crc32(repr((kind.name, numbers)).encode()) % _HELDOUT_SHARE == 0


def _make(rng: np.random.Generator, *, held_out: bool) -> Problem:
  while True:
    kind, numbers = _draw(rng)
    if _held_out(kind, numbers) == held_out:
      break
  name, thing = _NAMES[rng.integers(len(_NAMES))], _THINGS[rng.integers(len(_THINGS))]
  text = kind.story.format(name=name, thing=thing, **dict(zip('abc', numbers, strict=False)))
  sums = '_'.join(map(str, numbers))
  return Problem(f'{kind.name}_{sums}_{name}_{thing}', text, kind.answer(*numbers))


@functools.cache
def problem(split: str, index: int) -> Problem:
  """Returns problem `index` of a split. Raises ValueError for one that isn't there."""
  if split not in SIZES:
    raise ValueError(f'arithmetic has no split {split!r}; expected one of {sorted(SIZES)}')
  if not 0 <= index < SIZES[split]:
    raise ValueError(f'task {index} of {split}; expected 0 to {SIZES[split] - 1}')
  rng = np.random.default_rng([_SEED, list(SIZES).index(split), index])
  return _make(rng, held_out=split == 'heldout')
