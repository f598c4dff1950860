"""Which publication holds the weights of which update, along one run's history."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mimo.types import Version


class Timeline:
  """The publications of a run's history; those of abandoned starts are left out.

  Attributes:
    update_of: publication number -> updates applied to its weights.
    version_of: updates applied -> the newest publication of those weights.
  """

  def __init__(self, versions: Iterable[Version], starts: Sequence[int]) -> None:
    """Takes what a store holds.

    Args:
      versions: publications, by number.
      starts: see `Version.is_live`.
    """
    self.update_of: dict[int, int] = {}
    self.version_of: dict[int, Version] = {}
    for version in versions:
      if version.is_live(starts):
        self.add(version)

  def add(self, version: Version) -> None:
    """Adds what was just published."""
    self.update_of[version.number] = version.update
    self.version_of[version.update] = version
