"""Checks of values that a person has stated. Each raises a ValueError of one line, name first."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any


def nearest(text: str, known: Iterable[str]) -> str:
  """Returns '; did you mean ...?' with the known text that is nearest, or '' where none is near.

  >>> nearest('lerning_rate', ['b2', 'learning_rate'])
  "; did you mean 'learning_rate'?"
  """
  near = difflib.get_close_matches(str(text), list(known), n=1, cutoff=0.5)
  return f'; did you mean {near[0]!r}?' if near else ''


def one_of(name: str, value: str, known: Iterable[str]) -> str:
  """Returns `value` where it is known. Raises ValueError naming the nearest that is.

  >>> one_of('kv_cache_dtype', 'fp9', ('bf16', 'fp8'))
  Traceback (most recent call last):
    ...
  ValueError: kv_cache_dtype is 'fp9'; expected one of bf16, fp8; did you mean 'fp8'?
  """
  known = list(known)
  if value not in known:
    raise ValueError(
      f'{name} is {value!r}; expected one of {", ".join(known)}{nearest(value, known)}'
    )
  return value


def number(
  name: str,
  value: Any,
  *,
  above: float | None = None,
  least: float | None = None,
  below: float | None = None,
  most: float | None = None,
) -> None:
  """Raises ValueError unless `value` is a finite number within the bounds that are stated.

  >>> number('b1', 0.9, least=0, below=1)
  >>> number('b1', 1.0, least=0, below=1)
  Traceback (most recent call last):
    ...
  ValueError: b1 is 1.0; expected a number >= 0 and < 1
  """
  known = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
  _within(name, value, known, 'a number', above=above, least=least, below=below, most=most)


def whole(name: str, value: Any, *, least: int | None = None, most: int | None = None) -> None:
  """Raises ValueError unless `value` is a whole number within the bounds that are stated.

  >>> whole('rows', 0, least=1)
  Traceback (most recent call last):
    ...
  ValueError: rows is 0; expected a whole number >= 1
  """
  known = not isinstance(value, bool) and isinstance(value, int)
  _within(name, value, known, 'a whole number', least=least, most=most)


def _within(
  name: str,
  value: Any,
  known: bool,
  kind: str,
  *,
  least: float | None,
  most: float | None,
  above: float | None = None,
  below: float | None = None,
) -> None:
  bounds = (
    ('>', above, operator.gt),
    ('>=', least, operator.ge),
    ('<', below, operator.lt),
    ('<=', most, operator.le),
  )
  stated = [(sign, bound, holds) for sign, bound, holds in bounds if bound is not None]
  if not known or not all(holds(value, bound) for _, bound, holds in stated):
    said = ' and '.join(f'{sign} {bound}' for sign, bound, _ in stated)
    raise ValueError(f'{name} is {value!r}; expected {kind} {said}'.strip())
