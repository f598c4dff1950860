"""Views that a server reads, kept while it may need them, whatever their store deletes."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from mimo.types import Version
from mimo.weights.store import Blob


class Feed(Protocol):
  """Where the versions of one view come from."""

  def latest(self) -> Version | None:
    """Returns the newest published version; cheap. None before the first."""

  def locate(self, version: Version) -> tuple[pathlib.Path, Mapping[str, Blob]]:
    """Returns a view directory and what is stated of each of its files. Raises ValueError."""


class Held(NamedTuple):
  """A view directory, and what each of its files must be."""

  directory: pathlib.Path
  files: Mapping[str, Blob]


class HeldViews:
  """Views by version, in a directory of one replica's own.

  Files are linked where the file system can, so that a view takes no room and outlives its
  publication; elsewhere it is read where the store has it.
  """

  def __init__(self, feed: Feed, directory: pathlib.Path) -> None:
    """Makes the directory, and forgets what an earlier owner left there."""
    self._feed = feed
    self._directory = directory.resolve()
    self._held: dict[Version, Held] = {}
    shutil.rmtree(self._directory, ignore_errors=True)
    self._directory.mkdir(parents=True)

  def hold(self, version: Version) -> Held:
    """Returns a view, held from now on. Raises ValueError or OSError where there is none."""
    if version not in self._held:
      source, files = self._feed.locate(version)
      self._held[version] = Held(_link(source, self._path(version)), files)
    return self._held[version]

  def keep(self, versions: set[Version | None]) -> None:
    """Lets go of every view but those of `versions`."""
    for version in self._held.keys() - versions:
      del self._held[version]
      shutil.rmtree(self._path(version), ignore_errors=True)

  def close(self) -> None:
    """Lets go of all."""
    self._held.clear()
    shutil.rmtree(self._directory, ignore_errors=True)

  def _path(self, version: Version) -> pathlib.Path:
    return self._directory / f'{version.number:08d}'


def _link(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
  """Links a directory's files into another. Returns it, or the first where that can't be done."""
  try:
    target.mkdir(parents=True)
    for path in source.iterdir():
      os.link(path, target / path.name)
  except OSError:  # another file system, or a full one; a file that is missing shows at activation
    shutil.rmtree(target, ignore_errors=True)
    return source.resolve()
  return target
