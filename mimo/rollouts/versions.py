"""How far behind the trainer the weights are that drew a trajectory."""

from __future__ import annotations

from collections.abc import Mapping

from mimo.rollouts.base import StaleRange
from mimo.types import Trajectory


def stale_ranges(
  trajectory: Trajectory, update: int, update_of: Mapping[int, int]
) -> tuple[StaleRange, ...] | None:
  """Returns the staleness of each sampled token range: `update` less its version's update.

  Returns None when a range's version is not in `update_of`: its weights are not of this history.
  """
  spans = [span for turn in trajectory.turns for span in turn.spans]
  if any(span.version not in update_of for span in spans):
    return None
  return tuple(StaleRange(s.start, s.end, update - update_of[s.version]) for s in spans)
