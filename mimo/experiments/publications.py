"""Publishes a run's weights, and knows which version holds which update."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from mimo.experiments.factories import EVALUATION_VIEW, Policy
from mimo.types import Version
from mimo.weights.publication import Publisher, ViewFollower
from mimo.weights.store import FileStore
from mimo.weights.timeline import Timeline
from mimo.weights.views import ViewSpec

# Publications that stay in the store: a replica may be this far behind while it loads.
_KEPT_VERSIONS = 4


class FirstPublicationError(Exception):
  """A view has no version to start from; the message names it and says why."""


class Publications:
  """Owns the store of a run, and publishes to it. One call at a time.

  Attributes:
    store: where views are.
    timeline: the versions of this run's history.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    policy: Policy,
    views: Mapping[str, ViewSpec],
    starts: Sequence[int],
  ) -> None:
    """Opens the store, or makes it.

    Args:
      directory: of the store.
      policy: whose model and tokenizer views have.
      views: name -> what it is to be.
      starts: updates applied to the weights that each start of the run went on from, this one last.
    """
    self.store = FileStore(directory)
    self._views = tuple(views)
    self._publisher = Publisher(
      self.store,
      policy.model,
      policy.tokenizer_files,
      views,
      len(starts) - 1,
      origin=policy.origin,
    )
    self._follower = ViewFollower(self.store, EVALUATION_VIEW)
    self.timeline = Timeline(self._follower.versions(), starts)

  @property
  def failures(self) -> Mapping[str, str]:
    """Views that the last publication did not reach, and why."""
    return self._publisher.failures

  def publish(
    self, update: int, snapshot: Iterable[tuple[str, np.ndarray]], *, needed_from: float
  ) -> Version:
    """Publishes every view of a snapshot, and deletes the versions that nothing needs any more.

    Args:
      update: updates applied to the weights.
      snapshot: (Hugging Face name, bfloat16 tensor) of the whole model.
      needed_from: versions of this update and of later ones are kept whatever their number.

    Raises:
      PublicationError: every view failed.
      NonFiniteError: a tensor holds NaN or infinity.
    """
    version = self._publisher.publish(update, snapshot)
    self.timeline.add(version)
    known = self._follower.versions()
    kept = {version.number for version in known[-_KEPT_VERSIONS:]}
    self._publisher.retain(kept | {v.number for v in known if v.update >= needed_from})
    return version

  def check_started(self) -> None:
    """Raises FirstPublicationError where a view has no version: samplers would wait for ever."""
    for view in self._views:
      if ViewFollower(self.store, view).latest() is None:
        why = self.failures.get(view, 'nothing was published to it')
        raise FirstPublicationError(f'view {view} could not be published: {why}')

  def check_held(self, updates: Collection[int]) -> None:
    """Raises ValueError naming the first of `updates` whose weights the store does not hold."""
    for update in updates:
      if update not in self.timeline.version_of:
        raise ValueError(
          f'the store holds no publication of update {update}; expected every one of updates '
          f'{min(updates)} to {max(updates)}: what led to the checkpoint is drawn again from them'
        )

  def evaluated(self, update: int) -> Version | None:
    """Returns the version to evaluate an update by; None where the evaluation's view lacks it."""
    version = self.timeline.version_of.get(update)
    return version if version in self._follower.versions() else None
