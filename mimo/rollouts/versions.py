"""Which publications belong to a run's history, and how far behind the trainer they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mimo.rollouts.base import StaleRange
from mimo.types import Trajectory, Version


def live_updates(versions: Iterable[Version], starts: Sequence[int]) -> dict[int, int]:
  """Returns the updates that each publication of the run's history holds, by its number.

  Args:
    versions: publications.
    starts: see `Version.is_live`.
  """
  return {version.number: version.update for version in versions if version.is_live(starts)}


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
