"""The arms by name: corrections, advantage rule, and how the samplers draw.

They are those of the reference study (see docs/objective.md), and `mis_mean` to tell two changes
apart.
"""

from __future__ import annotations

import dataclasses

from mimo import checks
from mimo.objectives.correction import Correction, RatioRange

_IMPORTANCE = {'grpo': 'none', 'sc': 'none', 'tis': 'truncated', 'mis': 'masked'}
_BASES = ('grpo', 'tis', 'mis', 'mis_mean', 'sc', 'sc_tis', 'sc_mis')
_STUDY = RatioRange()
_MEAN = '_mean'
_TOPP = '_topp'

ARMS = _BASES + tuple(base + _TOPP for base in _BASES)


@dataclasses.dataclass(frozen=True)
class Arm:
  """One arm.

  Attributes:
    name: as in `ARMS`.
    correction: what the loss corrects.
    advantage: a rule of `advantages`, 'group_mean' or 'group_mean_std'.
    topp: whether samplers draw from their nucleus (top-p 0.97 within the 64 most likely tokens in
      the reference study); the loss then replays it.
  """

  name: str
  correction: Correction
  advantage: str
  topp: bool


def arm(name: str, bounds: RatioRange = _STUDY) -> Arm:
  """Returns the arm called `name`, one of `ARMS`, with these bounds of the ratio.

  `grpo`, `tis` and `mis` divide advantages by the group's standard deviation; `sc`, `sc_tis` and
  `sc_mis` centre scores and only subtract the group's mean. `mis_mean` is `mis` with the advantages
  of `sc_mis`, from which it differs in centering alone. The suffix `_topp` adds replay.

  Raises:
    ValueError: an unknown name; the message holds the nearest one, if one is near.
  """
  checks.one_of('arm', name, ARMS)
  base = name.removesuffix(_TOPP)
  center = base.startswith('sc')
  topp = name.endswith(_TOPP)
  return Arm(
    name=name,
    correction=Correction(
      importance=_IMPORTANCE[base.removeprefix('sc_').removesuffix(_MEAN)],
      center=center,
      replay=topp,
      **dataclasses.asdict(bounds),
    ),
    advantage='group_mean' if center or base.endswith(_MEAN) else 'group_mean_std',
    topp=topp,
  )
