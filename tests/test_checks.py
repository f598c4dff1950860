"""Checks of stated values: what passes, and the one line that is said of what does not."""

import doctest
import math

import pytest

from mimo import checks


@pytest.mark.parametrize('value', [1, 0.25, 100])
def test_numbers_within_bounds_pass(value) -> None:
  checks.number('x', value, above=0, most=100)
  checks.number('x', value, least=0.25, below=101)


@pytest.mark.parametrize('value', [0, -1, 100.5, math.nan, math.inf, -math.inf, True, '1', None])
def test_other_numbers_are_refused(value) -> None:
  with pytest.raises(ValueError, match=r'^x is .*; expected a number > 0 and <= 100$'):
    checks.number('x', value, above=0, most=100)


@pytest.mark.parametrize('value', [0, 9, 2.0, True, '2', None])
def test_whole_numbers_are_ints(value) -> None:
  checks.whole('x', 1, least=1, most=8)
  checks.whole('x', 8, least=1, most=8)
  with pytest.raises(ValueError, match=r'^x is .*; expected a whole number >= 1 and <= 8$'):
    checks.whole('x', value, least=1, most=8)


def test_a_name_that_is_not_known_gets_the_nearest() -> None:
  assert checks.one_of('x', 'keep', ('keep', 'drop')) == 'keep'
  with pytest.raises(ValueError, match=r"^x is 'kep'; expected .* drop; did .* 'keep'\?$"):
    checks.one_of('x', 'kep', ('keep', 'drop'))
  with pytest.raises(ValueError, match=r'expected one of keep, drop$'):
    checks.one_of('x', 'zzz', ('keep', 'drop'))


def test_the_examples_hold() -> None:
  assert doctest.testmod(checks).attempted and not doctest.testmod(checks).failed
