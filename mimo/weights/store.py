"""Where publications live: immutable blobs with checksums, and one pointer per view.

`Store` is the port; `FileStore` keeps everything under one directory of an ordinary file system:

    <root>/blobs/<key>          written once, read-only
    <root>/pointers/<name>      small texts, replaced by compare-and-swap
    <root>/locks/<name>         one lock file per pointer
    <root>/scratch/             files on their way in

A blob's bytes are on disk before its name exists, and a name never changes its content. A key is
a relative path, so a set of blobs under one prefix is an ordinary directory.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Protocol

_KEY = re.compile(r'[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*')
_CHUNK_BYTES = 1 << 20
_SYNCS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Blob:
  """What is known of a blob's content."""

  sha256: str
  size_bytes: int


class Store(Protocol):
  """Immutable blobs and compare-and-swap pointers.

  Writing a key again with the same content changes nothing; with other content it raises
  ValueError. Reading an absent key raises KeyError. What IO can raise (OSError) it raises.
  """

  @property
  def scratch(self) -> pathlib.Path:
    """A local directory in which to make what `adopt` will take; it exists."""

  def write(self, key: str, content: bytes) -> Blob:
    """Stores bytes durably under a key; returns what reading them back gave."""

  def adopt(self, prefix: str, directory: pathlib.Path) -> dict[str, Blob]:
    """Stores a flat directory's files durably under `prefix/<name>`, all of them or none.

    The directory may be taken: the caller must not use it afterwards. Returns name -> what reading
    the stored file back gave.
    """

  def read(self, key: str) -> bytes: ...

  def exists(self, key: str) -> bool: ...

  def list(self, prefix: str) -> list[str]:
    """Returns the keys under `prefix/`, sorted."""

  def delete(self, prefix: str) -> None:
    """Removes the key `prefix` and every key under it; absent ones are ignored."""

  def local_path(self, prefix: str) -> pathlib.Path:
    """Returns a local file or directory with the content of a key or of the keys under it."""

  def pointer(self, name: str) -> str | None:
    """Returns a pointer's text, or None before its first swap."""

  def swap(self, name: str, expected: str | None, new: str) -> bool:
    """Sets a pointer durably if its text is `expected`; returns whether it was."""

  def sweep(self) -> None:
    """Removes what writers that were killed left in scratch.

    For the one process that writes, before it does: what a live writer has there goes too. Those
    that only read never call it.
    """


class FileStore:
  """A `Store` on a local or shared POSIX file system (rename, hard link and flock)."""

  def __init__(self, root: str | os.PathLike[str]):
    self.root = pathlib.Path(root)
    self._blobs = self.root / 'blobs'
    self._pointers = self.root / 'pointers'
    self._locks = self.root / 'locks'
    for directory in (self._blobs, self._pointers, self._locks, self.scratch):
      directory.mkdir(parents=True, exist_ok=True)

  @property
  def scratch(self) -> pathlib.Path:
    return self.root / 'scratch'

  def write(self, key: str, content: bytes) -> Blob:
    target = self._blob_path(key)
    if target.is_dir():
      raise ValueError(f'{key}: other keys lie under it; expected a key of its own')
    with tempfile.TemporaryDirectory(dir=self.scratch) as directory:
      path = pathlib.Path(directory, 'content')
      path.write_bytes(content)
      path.chmod(0o444)
      sync(path)
      self._make_directories(target.parent)
      try:
        os.link(path, target)
      except FileExistsError:
        if hash_file(target) != hash_file(path):
          raise _changed(key) from None
    sync(target.parent)
    return hash_file(target)

  def adopt(self, prefix: str, directory: pathlib.Path) -> dict[str, Blob]:
    target = self._blob_path(prefix)
    with tempfile.TemporaryDirectory(dir=self.scratch) as staging:
      if not self._same_device(directory):
        directory = pathlib.Path(shutil.copytree(directory, f'{staging}/copy'))
      files = sorted(directory.iterdir())
      for path in files:
        self._blob_path(f'{prefix}/{path.name}')
        path.chmod(0o444)
      # At the same time: each waits for the disk, which takes them all in one go.
      with concurrent.futures.ThreadPoolExecutor(_SYNCS) as pool:
        list(pool.map(sync, files))
      sync(directory)
      self._make_directories(target.parent)
      try:
        directory.rename(target)  # never onto a directory that holds something
      except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
          raise
        if not target.is_dir() or _hash_files(target) != _hash_files(directory):
          raise _changed(prefix) from None
    sync(target.parent)
    return _hash_files(target)

  def read(self, key: str) -> bytes:
    try:
      return self._blob_path(key).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
      raise KeyError(f'{key} is not in the store at {self.root}') from None

  def exists(self, key: str) -> bool:
    return self._blob_path(key).is_file()

  def list(self, prefix: str) -> list[str]:
    directory = self._blob_path(prefix) if prefix else self._blobs
    files = (path for path in directory.rglob('*') if path.is_file())
    return sorted(path.relative_to(self._blobs).as_posix() for path in files)

  def delete(self, prefix: str) -> None:
    path = self._blob_path(prefix)
    if path.is_dir():
      # Renamed first, so that nobody sees half of it.
      doomed = pathlib.Path(tempfile.mkdtemp(dir=self.scratch))
      with contextlib.suppress(FileNotFoundError):
        path.rename(doomed / path.name)
      shutil.rmtree(doomed, ignore_errors=True)
    else:
      path.unlink(missing_ok=True)

  def local_path(self, prefix: str) -> pathlib.Path:
    path = self._blob_path(prefix)
    if not path.exists():
      raise KeyError(f'{prefix} is not in the store at {self.root}')
    return path

  def pointer(self, name: str) -> str | None:
    try:
      return self._pointer_path(name).read_text(encoding='utf-8')
    except FileNotFoundError:
      return None

  def swap(self, name: str, expected: str | None, new: str) -> bool:
    target = self._pointer_path(name)
    with self._locked(name):
      if self.pointer(name) != expected:
        return False
      handle, written = tempfile.mkstemp(dir=self.scratch)
      try:
        with os.fdopen(handle, 'w', encoding='utf-8') as file:
          file.write(new)
          file.flush()
          os.fsync(file.fileno())
        os.replace(written, target)
      finally:
        pathlib.Path(written).unlink(missing_ok=True)
      sync(target.parent)
      return True

  def sweep(self) -> None:
    for path in self.scratch.iterdir():
      if path.is_dir():
        shutil.rmtree(path)
      else:
        path.unlink()

  @contextlib.contextmanager
  def _locked(self, name: str) -> Iterator[None]:
    # A lock belongs to this open file, so it holds against threads as well as processes, and a
    # killed holder lets go of it.
    with open(self._locks / name, 'a', encoding='utf-8') as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      yield

  def _blob_path(self, key: str) -> pathlib.Path:
    return self._blobs / _checked(key)

  def _pointer_path(self, name: str) -> pathlib.Path:
    if '/' in name:
      raise ValueError(f'pointer name {name!r} has a slash; expected a plain name')
    return self._pointers / _checked(name)

  def _make_directories(self, directory: pathlib.Path) -> None:
    missing = []
    while not directory.exists():
      missing.append(directory)
      directory = directory.parent
    for path in reversed(missing):
      path.mkdir(exist_ok=True)
      sync(path.parent)

  def _same_device(self, path: pathlib.Path) -> bool:
    return path.stat().st_dev == self._blobs.stat().st_dev


def hash_file(path: pathlib.Path) -> Blob:
  """Returns a file's checksum and size."""
  digest, size = hashlib.sha256(), 0
  with open(path, 'rb') as file:
    while chunk := file.read(_CHUNK_BYTES):
      digest.update(chunk)
      size += len(chunk)
  return Blob(digest.hexdigest(), size)


def _hash_files(directory: pathlib.Path) -> dict[str, Blob]:
  return {path.name: hash_file(path) for path in sorted(directory.iterdir())}


def _changed(key: str) -> ValueError:
  return ValueError(f'{key} is stored with other content; blobs never change')


def sync(path: pathlib.Path) -> None:
  """Has the operating system write a file's bytes, or a directory's names, to disk."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


def _checked(key: str) -> str:
  if not _KEY.fullmatch(key):
    raise ValueError(f'key {key!r} is not a relative path of letters, digits, ".", "_" and "-"')
  return key
