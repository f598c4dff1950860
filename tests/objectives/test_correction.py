import dataclasses
import math

import pytest

from mimo.objectives import Correction


def test_is_hashable_and_frozen():
  correction = Correction(importance='masked', low=0.5, high=5, center=True, replay=True)
  assert hash(correction) == hash(dataclasses.replace(correction))
  with pytest.raises(dataclasses.FrozenInstanceError):
    correction.low = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'importance': 'clipped'}, "importance is 'clipped'; expected one of"),
    ({'low': -0.1}, 'low is -0.1; expected a number >= 0'),
    ({'high': math.inf}, 'high is inf; expected a number >= 0'),
    ({'low': math.nan}, 'low is nan; expected a number >= 0'),
    ({'high': '5'}, "high is '5'; expected a number"),
    ({'low': True}, 'low is True; expected a number'),
    ({'low': 5.0, 'high': 0.5}, 'low is 5.0 and high is 0.5; expected low <= high'),
    ({'center': 1}, 'center is 1; expected True or False'),
    ({'replay': None}, 'replay is None; expected True or False'),
  ],
)
def test_refuses(fields, message):
  with pytest.raises(ValueError, match=message.replace('(', r'\(')):
    Correction(**{'importance': 'masked', **fields})


def test_accepts_the_ends():
  masked = Correction(importance='masked', low=0.0, high=0.0)
  truncated = Correction(importance='truncated', low=1.0, high=1.0)
  assert (masked.low, masked.high, truncated.low, truncated.high) == (0.0, 0.0, 1.0, 1.0)
