"""Pure maths on arrays: ratios, centering, support, advantages, the loss."""

from mimo.objectives.advantages import advantages
from mimo.objectives.arms import ARMS, Arm, arm
from mimo.objectives.candidates import candidate_logps
from mimo.objectives.correction import Correction, RatioRange
from mimo.objectives.diagnostics import merge_aux, summarise, total_aux
from mimo.objectives.loss import policy_loss

__all__ = [
  'ARMS',
  'Arm',
  'Correction',
  'RatioRange',
  'advantages',
  'arm',
  'candidate_logps',
  'merge_aux',
  'policy_loss',
  'summarise',
  'total_aux',
]
