"""Publishing versions of the weights to a store, and following them.

A version is a publication number that only increases, across restarts too. In the store:

    blobs/views/<view>/<number>/            a view directory, as `write_view` made it
    blobs/manifests/<view>/<number>.json    the version, and each file's checksum and size
    pointers/view.<view>                    the version a replica of that view should serve
    pointers/counter                        the last number given out

A manifest is written once a view's files are on disk and their checksums have been read back, and
the pointer moves after that. So a version that has a manifest is whole, and a crash at any point
costs a number but never shows a half-written view.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import pathlib
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.table import named_tensors
from mimo.types import Version
from mimo.weights import huggingface
from mimo.weights.layouts import Origin
from mimo.weights.sources import is_finite
from mimo.weights.store import Blob, Store, hash_file
from mimo.weights.views import ViewSpec, check_format, write_view

_COUNTER = 'counter'


class NonFiniteError(ValueError):
  """The weights hold NaN or infinity: nothing is published."""


class PublicationError(Exception):
  """No view could be published; the message says why for each."""


class Snapshot:
  """The BF16 weights of one update as (Hugging Face name, host array), one at a time.

  It can be iterated again and again. It holds device arrays of its own, so the parameters may be
  donated afterwards.
  """

  def __init__(self, config: ModelConfig, params: Mapping[str, Any]):
    self._config = config
    # `copy` so that parameters already in bfloat16 are not shared with whoever donates them.
    self._params = jax.tree.map(lambda x: jnp.array(x, jnp.bfloat16, copy=True), params)

  def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
    return named_tensors(self._config, self._params)


class Publisher:
  """Publishes every view of a run. One process at a time publishes to a store.

  What an earlier one left half written is removed: its scratch at once, its views by `retain`.
  """

  def __init__(
    self,
    store: Store,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    views: Mapping[str, ViewSpec],
    incarnation: int,
    *,
    origin: Origin | None = None,
    shard_bytes: int = huggingface.SHARD_BYTES,
  ):
    """Checks that every view's format can hold the model.

    Args:
      store: where to.
      config: the model.
      tokenizer_files: name -> content, for every view.
      views: name -> what it is to be; names are letters, digits, '.', '_' and '-'.
      incarnation: which start of the run this is, from 0.
      origin: how bf16 views name tensors, and what every view carries along; see `write_view`.
      shard_bytes: the most that one safetensors file holds.

    Raises:
      ValueError: a view's format can't hold the model, or there is no view.
    """
    if not views:
      raise ValueError('no views to publish; expected at least one')
    for name, spec in views.items():
      try:
        check_format(config, spec.format)
      except ValueError as error:
        raise ValueError(f'view {name}: {error}') from None
    self._store = store
    self._config = config
    self._tokenizer_files = dict(tokenizer_files)
    self._views = dict(views)
    self._incarnation = incarnation
    self._origin = origin
    self._shard_bytes = shard_bytes
    self._lock = threading.Lock()  # so that what is being published is never deleted
    self.failures: dict[str, str] = {}
    store.sweep()

  def publish(self, update: int, tensors: Iterable[tuple[str, np.ndarray]]) -> Version:
    """Encodes every view from one snapshot, stores them and moves their pointers.

    A view that fails keeps its pointer where it was, and does not hinder the others: `failures`
    then has its name and why, until the next call.

    Args:
      update: updates applied to the weights.
      tensors: (Hugging Face name, bfloat16 tensor) of the whole model. What can be iterated once
        only is held in memory; a `Snapshot` is not.

    Returns:
      The version, published for at least one view.

    Raises:
      NonFiniteError: a tensor holds NaN or infinity. Nothing was stored.
      PublicationError: every view failed.
    """
    if iter(tensors) is tensors:
      tensors = list(tensors)
    with self._lock:
      self.failures = {}
      try:
        with tempfile.TemporaryDirectory(prefix='publish-', dir=self._store.scratch) as scratch:
          version = self._publish(update, tensors, pathlib.Path(scratch))
      except OSError as error:
        raise PublicationError(f'update {update} reached no view: {error}') from error
      if len(self.failures) == len(self._views):
        why = '; '.join(f'{name}: {reason}' for name, reason in self.failures.items())
        raise PublicationError(f'update {update} reached no view: {why}')
      return version

  def retain(self, numbers: Collection[int]) -> None:
    """Deletes every version of every view but these and the ones that pointers name.

    View directories without a manifest go too, whatever their number: a kill left them.
    """
    with self._lock:
      for name in self._views:
        served = ViewFollower(self._store, name).latest()
        kept = {*numbers} if served is None else {*numbers, served.number}
        whole = {_number(key) for key in self._store.list(f'manifests/{name}')}
        for number in whole - kept:
          # The manifest first: what has one must be whole.
          self._store.delete(_manifest_key(name, number))
        held = {_number(key) for key in self._store.list(f'views/{name}')}
        for number in held - (whole & kept):
          self._store.delete(_view_key(name, number))

  def _publish(
    self, update: int, tensors: Iterable[tuple[str, np.ndarray]], scratch: pathlib.Path
  ) -> Version:
    written = self._write_views(scratch, tensors)
    number = self._next_number() if written else 0
    version = Version(number, self._incarnation, update)
    # Views at the same time: they wait for the disk more than they compute.
    with concurrent.futures.ThreadPoolExecutor(len(self._views)) as pool:
      stored = {
        name: pool.submit(self._publish_view, name, version, scratch / name) for name in written
      }
    for name, future in stored.items():
      try:
        future.result()
      except Exception as error:  # whatever it is, it is this view's alone
        self._fail(name, error)
    return version

  def _write_views(
    self, scratch: pathlib.Path, tensors: Iterable[tuple[str, np.ndarray]]
  ) -> list[str]:
    """Returns the names of the views that could be written, each in a directory of its name."""
    written = []
    for name, spec in self._views.items():
      try:
        write_view(
          scratch / name,
          self._config,
          _finite(tensors),
          spec,
          tokenizer_files=self._tokenizer_files,
          origin=self._origin,
          shard_bytes=self._shard_bytes,
        )
        written.append(name)
      except NonFiniteError:
        raise
      except Exception as error:  # whatever it is, it is this view's alone
        self._fail(name, error)
    return written

  def _publish_view(self, name: str, version: Version, directory: pathlib.Path) -> None:
    key = _view_key(name, version.number)
    files = {path.name: hash_file(path) for path in sorted(directory.iterdir())}
    stored = self._store.adopt(key, directory)
    for file, blob in files.items():
      if file not in stored:
        raise ValueError(f'{key}/{file} is missing')
      _expect_blob(f'{key}/{file}', stored[file], blob)
    manifest = {
      'version': dataclasses.asdict(version),
      'format': self._views[name].format,
      'files': {file: dataclasses.asdict(blob) for file, blob in files.items()},
    }
    text = json.dumps(manifest, indent=2, sort_keys=True)
    self._store.write(_manifest_key(name, version.number), text.encode())
    pointer = _pointer_name(name)
    seen = self._store.pointer(pointer)
    if seen is not None and _parse_version(seen).number >= version.number:
      raise PublicationError(f'its pointer is already at {seen}; expected less than {version}')
    if not self._store.swap(pointer, seen, json.dumps(dataclasses.asdict(version))):
      raise PublicationError('another publisher moved its pointer')

  def _next_number(self) -> int:
    """Takes a number that nothing in the store has had, also where the counter was lost."""
    while True:
      seen = self._store.pointer(_COUNTER)
      number = 1 + (self._largest_number() if seen is None else int(seen))
      if self._store.swap(_COUNTER, seen, str(number)):
        return number

  def _largest_number(self) -> int:
    return max(map(_number, self._store.list('views')), default=0)

  def _fail(self, name: str, error: Exception) -> None:
    self.failures[name] = f'{type(error).__name__}: {error}'


class ViewFollower:
  """What a replica sees of one view: the newest version, and verified directories."""

  def __init__(self, store: Store, view: str):
    self._store = store
    self._view = view

  def latest(self) -> Version | None:
    """Returns the version to serve, or None before the first; one small read."""
    text = self._store.pointer(_pointer_name(self._view))
    return None if text is None else _parse_version(text)

  def open(self, version: Version) -> pathlib.Path:
    """Returns a version's view directory after checking every file's size and checksum.

    Raises ValueError naming the file that is missing or corrupt, or the version that the store
    does not (or no longer) hold.
    """
    directory, files = self.locate(version)
    for file, stated in files.items():
      if not (directory / file).is_file():
        raise ValueError(f'{directory / file} is missing')
      _expect_blob(str(directory / file), hash_file(directory / file), stated)
    return directory

  def locate(self, version: Version) -> tuple[pathlib.Path, dict[str, Blob]]:
    """Returns a version's view directory, unchecked, and what each of its files must be.

    Raises ValueError naming the version that the store does not (or no longer) hold.
    """
    manifest = self._manifest(version.number)
    if _version(manifest['version']) != version:
      raise ValueError(f'view {self._view}: {manifest["version"]} is stored; expected {version}')
    try:
      directory = self._store.local_path(_view_key(self._view, version.number))
    except KeyError as error:
      raise ValueError(f'view {self._view}: {error.args[0]}') from None
    return directory, {file: Blob(**stated) for file, stated in manifest['files'].items()}

  def versions(self) -> list[Version]:
    """Returns every version that the store holds whole, by number."""
    keys = self._store.list(f'manifests/{self._view}')
    return [_version(self._manifest(n)['version']) for n in sorted(map(_number, keys))]

  def _manifest(self, number: int) -> dict[str, Any]:
    key = _manifest_key(self._view, number)
    try:
      return json.loads(self._store.read(key))
    except KeyError:
      raise ValueError(f'view {self._view} has no version {number} in the store') from None
    except ValueError as error:
      raise ValueError(f'{key} is not JSON: {error}') from None


def _finite(tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
  for name, tensor in tensors:
    if not is_finite(tensor):
      raise NonFiniteError(f'tensor {name} holds NaN or infinity; expected finite weights')
    yield name, tensor


def _expect_blob(key: str, got: Blob, expected: Blob) -> None:
  if got != expected:
    raise ValueError(
      f'{key} is corrupt: {got.size_bytes} bytes of sha256 {got.sha256[:12]}; expected '
      f'{expected.size_bytes} bytes of {expected.sha256[:12]}'
    )


def _view_key(view: str, number: int) -> str:
  return f'views/{view}/{number:08d}'


def _manifest_key(view: str, number: int) -> str:
  return f'manifests/{view}/{number:08d}.json'


def _number(key: str) -> int:
  """Returns the publication number in the key of a manifest or of a view's file."""
  return int(key.split('/')[2].removesuffix('.json'))


def _pointer_name(view: str) -> str:
  return f'view.{view}'


def _parse_version(text: str) -> Version:
  return _version(json.loads(text))


def _version(stated: Mapping[str, Any]) -> Version:
  return Version(int(stated['number']), int(stated['incarnation']), int(stated['update']))
