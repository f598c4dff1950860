"""Which corrections a loss applies, and with what bounds."""

from __future__ import annotations

import dataclasses
import math
import numbers

IMPORTANCE = ('none', 'truncated', 'masked')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction:
  """The switches of `policy_loss`. Hashable: a static argument of a jitted function.

  Attributes:
    importance: the weight f of a token with ratio r = p(a) / q(a): 'none' is 1, 'truncated' is
      min(r, high), 'masked' is r where low <= r <= high and 0 elsewhere.
    low: lower end of the masked range; unused by the others.
    high: upper end of the masked range, or where truncation starts.
    center: subtract the expected weighted score under the sampler (score centering).
    replay: renormalise the trainer over the sampler's support where that is recorded whole.

  Raises:
    ValueError: an unknown importance, bounds that are negative, not finite or low > high, or a
      switch that is no bool.
  """

  importance: str = 'none'
  low: float = 0.5
  high: float = 5.0
  center: bool = False
  replay: bool = False

  def __post_init__(self) -> None:
    if self.importance not in IMPORTANCE:
      raise ValueError(f'importance is {self.importance!r}; expected one of {IMPORTANCE}')
    for name in ('low', 'high'):
      bound = getattr(self, name)
      if isinstance(bound, bool) or not isinstance(bound, numbers.Real):
        raise ValueError(f'{name} is {bound!r}; expected a number')
      if not math.isfinite(bound) or bound < 0:
        raise ValueError(f'{name} is {bound}; expected a finite number >= 0')
    if self.low > self.high:
      raise ValueError(f'low is {self.low} and high is {self.high}; expected low <= high')
    for name in ('center', 'replay'):
      switch = getattr(self, name)
      if not isinstance(switch, bool):
        raise ValueError(f'{name} is {switch!r}; expected True or False')
