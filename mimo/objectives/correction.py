"""Which corrections a loss applies, and with what bounds."""

from __future__ import annotations

import dataclasses

from mimo import checks

IMPORTANCE = ('none', 'truncated', 'masked')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RatioRange:
  """The reference study's range for the trainer/sampler ratio.

  Attributes:
    low: lower end of the masked range of the ratio; unused by arms that do not mask.
    high: upper end of the masked range, or where truncation starts.

  Raises:
    ValueError: bounds that are negative, not finite or low > high.
  """

  low: float = 0.5
  high: float = 5.0

  def __post_init__(self) -> None:
    checks.number('low', self.low, least=0)
    checks.number('high', self.high, least=0)
    if self.low > self.high:
      raise ValueError(f'low is {self.low} and high is {self.high}; expected low <= high')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Correction(RatioRange):
  """The switches of `policy_loss`. Hashable: a static argument of a jitted function.

  Attributes:
    importance: the weight f of a token with ratio r = p(a) / q(a): 'none' is 1, 'truncated' is
      min(r, high), 'masked' is r where low <= r <= high and 0 elsewhere.
    center: subtract the expected weighted score under the sampler (score centering).
    replay: renormalise the trainer over the sampler's support where that is recorded whole.

  Raises:
    ValueError: an unknown importance, bounds that `RatioRange` refuses, or a switch that is no
      bool.
  """

  importance: str = 'none'
  center: bool = False
  replay: bool = False

  def __post_init__(self) -> None:
    super().__post_init__()
    checks.one_of('importance', self.importance, IMPORTANCE)
    for name in ('center', 'replay'):
      switch = getattr(self, name)
      if not isinstance(switch, bool):
        raise ValueError(f'{name} is {switch!r}; expected True or False')
