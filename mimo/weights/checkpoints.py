"""Resumable checkpoints with Orbax, and policies read from them or from Hugging Face directories.

One step of a checkpoint directory holds a tree of arrays (`state`) and a JSON object (`meta`). A
policy can be read from a step when the tree has the model's parameters under `params` and the meta
has what `policy_meta` gives.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mimo.models.config import ModelConfig
from mimo.models.table import Index, Param, leaf, table
from mimo.weights import huggingface
from mimo.weights.chunked import ChunkReader, Where
from mimo.weights.layouts import Carried, Layout, Origin
from mimo.weights.sources import Source
from mimo.weights.tensors import TensorReader, contiguous

STATE = 'state'
META = 'meta'
CARRIED = 'carried'
PARAMS = 'params'
WORKDIR_CHECKPOINTS = 'checkpoints'  # where a run's work directory keeps them

_BINARY = 'base64:'
_STRAGGLER_SECS = 0.5


class Checkpoints:
  """The checkpoints of one run: asynchronous saves, the newest `keep` kept.

  A save that a kill interrupts leaves no step behind; what it left is removed when the directory
  is opened again. So one process opens it at a time.
  """

  def __init__(self, directory: str | os.PathLike[str], keep: int):
    if keep < 1:
      raise ValueError(f'keep is {keep}; expected at least 1 checkpoint')
    self.directory = pathlib.Path(directory).absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep,
      create=True,
      cleanup_tmp_directories=True,
      enable_async_checkpointing=True,
    )
    self._manager = ocp.CheckpointManager(self.directory, options=options)

  def save(self, step: int, tree: Any, meta: Mapping[str, Any]) -> None:
    """Starts to save, and returns once the arrays are copied: they may then be donated.

    A save still under way is waited for first; if it failed, its error is raised here. The step
    saved last may be given again: it is waited for, and left as it is.

    Args:
      step: no smaller than any step saved.
      tree: a pytree of arrays.
      meta: a JSON object.
    """
    begun = self._manager.latest_step()  # which counts a save under way
    if begun is not None and step < begun:
      raise ValueError(f'step {step} does not follow the last one saved, {begun}')
    if step == begun:
      self.wait()
      return
    json.dumps(meta)  # a meta that is no JSON fails here, not in the writer's thread
    args = {STATE: ocp.args.StandardSave(tree), META: ocp.args.JsonSave(dict(meta))}
    self._manager.save(step, args=ocp.args.Composite(**args))

  def latest(self) -> int | None:
    """Returns the newest step that is complete on disk, or None."""
    return max(self.steps(), default=None)

  def steps(self) -> list[int]:
    """Returns every step that is complete on disk, in order."""
    # Orbax counts a step from the moment its save begins, and no longer while it deletes it.
    return sorted(s for s in self._manager.all_steps() if _is_step(self.directory / str(s)))

  def restore(self, step: int, abstract_tree: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (tree, meta) of a step.

    Args:
      step: one of `steps()`.
      abstract_tree: the tree with a `jax.ShapeDtypeStruct`, or an array to be like, at each leaf;
        their shardings say where the arrays go.

    Raises:
      ValueError: there is no such step, or it can't be read as this tree.
    """
    if step not in (steps := self.steps()):
      raise ValueError(f'{self.directory} has no step {step}; it has {steps}')
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, abstract_tree)
    args = {STATE: ocp.args.StandardRestore(abstract), META: ocp.args.JsonRestore()}
    with _unreadable(self.directory / str(step)):
      restored = self._manager.restore(step, args=ocp.args.Composite(**args))
    return restored[STATE], restored[META]

  def wait(self) -> None:
    """Returns once every save is on disk. Raises what a save failed with."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and frees what the manager holds."""
    self._manager.close()


def policy_meta(
  config: ModelConfig, tokenizer_files: Mapping[str, bytes], layout: Layout | None = None
) -> dict[str, Any]:
  """Returns the part of a checkpoint's meta from which `open_policy` knows the model.

  `layout`: of the checkpoint that it came from; None: its publisher's.
  """
  return {
    'model': config.to_hf(),
    'tokenizer': {name: _to_text(content) for name, content in tokenizer_files.items()},
    'layout': dataclasses.asdict(layout or Layout.published(config)),
  }


def open_policy(path: str | os.PathLike[str]) -> Source:
  """Opens the policy of an Orbax checkpoint or a Hugging Face directory, without its weights.

  Once it is open, every parameter is there and has the right shape. Nothing in the directory is
  changed, so a run may be saving there.

  Args:
    path: an Orbax step, a directory of steps or a run's work directory (the newest step of it), or
      a Hugging Face directory of plain weights.

  Raises:
    ValueError: one line naming what is missing or wrong.
  """
  root = pathlib.Path(path)
  if not root.exists():
    raise ValueError(f'{root} does not exist; expected an Orbax or Hugging Face checkpoint')
  if not root.is_dir():
    raise ValueError(f'{root} is a file; expected the directory of a checkpoint')
  if _is_orbax(root):
    return _open_step(find_step(root))
  if (root / huggingface.CONFIG).is_file():
    return huggingface.open_model(root)
  raise ValueError(
    f'{root} holds no checkpoint; expected an Orbax step, a directory of steps, a work directory '
    f'with {WORKDIR_CHECKPOINTS}/, or a Hugging Face directory with {huggingface.CONFIG}'
  )


def load_policy(
  path: str | os.PathLike[str],
) -> tuple[ModelConfig, dict[str, Any], dict[str, bytes]]:
  """Reads a policy whole: (config, float32 parameters, tokenizer files). See `open_policy`."""
  source = open_policy(path)
  return source.config, source.params(), source.tokenizer_files


def find_step(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the step directory that a path names: itself, or the newest step in it.

  Raises ValueError where there is no complete step.
  """
  root = pathlib.Path(path).absolute()
  if _is_step(root):
    return root
  if (root / WORKDIR_CHECKPOINTS).is_dir():
    root = root / WORKDIR_CHECKPOINTS
  steps = [entry for entry in _numbered(root) if _is_step(entry)]
  if not steps:
    raise ValueError(f'{root} holds no complete checkpoint; expected numbered step directories')
  return max(steps, key=lambda entry: int(entry.name))


def _is_orbax(root: pathlib.Path) -> bool:
  return _is_step(root) or (root / WORKDIR_CHECKPOINTS).is_dir() or bool(_numbered(root))


def _numbered(root: pathlib.Path) -> list[pathlib.Path]:
  if not root.is_dir():
    return []
  return [entry for entry in root.iterdir() if entry.name.isdigit() and entry.is_dir()]


def _is_step(root: pathlib.Path) -> bool:
  return (root / STATE).is_dir() and (root / META).is_dir() and _is_finished(root)


def _is_finished(root: pathlib.Path) -> bool:
  return not ocp.utils.is_tmp_checkpoint(root) and ocp.utils.is_checkpoint_finalized(root)


def _read_meta(step: pathlib.Path) -> dict[str, Any]:
  with _unreadable(step):
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    meta = checkpointer.restore(step / META, args=ocp.args.JsonRestore())
  if not isinstance(meta, dict):
    raise ValueError(f'{step}: its meta is a {type(meta).__name__}; expected an object')
  return meta


def _open_step(step: pathlib.Path) -> Source:
  meta = _read_meta(step)
  if 'model' not in meta or 'tokenizer' not in meta:
    raise ValueError(f'{step}: its meta has {sorted(meta)}; expected model and tokenizer')
  try:
    config = ModelConfig.from_hf(meta['model'])
    # Checkpoints saved before layouts were kept have none.
    published = Layout.published(config)
    layout = Layout.from_json(meta['layout']) if 'layout' in meta else published
  except ValueError as error:
    raise ValueError(f'{step}: {error}') from None
  with _unreadable(step):
    reader = ChunkReader(step / STATE)
  if PARAMS not in reader.tree:
    raise ValueError(f'{step}: its state has {sorted(reader.tree)}; expected {PARAMS}')
  for row in table(config):
    _check_shape(step, reader.tree[PARAMS], row.path, row.leaf_shape)
  carried = None
  if (step / CARRIED).is_dir():
    stored = TensorReader(step / CARRIED)
    carried = Carried(stored, stored.names())
  files = {name: _to_bytes(text) for name, text in meta['tokenizer'].items()}
  return Source(step, config, files, Origin(layout, carried), _Weights(step, reader))


class _Weights:
  """The weights in a step, in our layout."""

  def __init__(self, step: pathlib.Path, reader: ChunkReader) -> None:
    self._step = step
    self._reader = reader

  def dtype(self, row: Param) -> np.dtype:
    return self._reader.dtype((PARAMS, *row.path))

  def part(self, row: Param, where: Where) -> np.ndarray:
    with _named(self._step):
      return self._reader.read((PARAMS, *row.path), where)

  def tensor(self, row: Param, index: Index, rows: slice | None) -> np.ndarray:
    if rows is None:
      return contiguous(row.to_hf(self.part(row, index)))
    if not row.in_dims:
      return self.part(row, (rows, *(slice(None),) * (len(row.shape) - 1)))
    return contiguous(self.part(row, (slice(None), rows)).T)


def _check_shape(
  step: pathlib.Path, stored: Any, path: tuple[str, ...], shape: tuple[int, ...]
) -> None:
  try:
    got = tuple(leaf(stored, path).shape)
  except (KeyError, TypeError, AttributeError):
    raise ValueError(f'{step}: parameter {"/".join(path)} is missing') from None
  if got != shape:
    raise ValueError(
      f'{step}: parameter {"/".join(path)} has shape {list(got)}; expected {list(shape)}'
    )


@contextlib.contextmanager
def _unreadable(step: pathlib.Path) -> Iterator[None]:
  """Turns whatever a reader raises for a damaged or foreign checkpoint into one line."""
  hook = sys.unraisablehook
  sys.unraisablehook = _without_stragglers(hook)
  try:
    yield
  except Exception as error:
    time.sleep(_STRAGGLER_SECS)
    raise _cannot_read(step, error) from error
  finally:
    sys.unraisablehook = hook


@contextlib.contextmanager
def _named(step: pathlib.Path) -> Iterator[None]:
  """The same for one array, which has no stragglers; in any thread."""
  try:
    yield
  except Exception as error:
    raise _cannot_read(step, error) from error


def _cannot_read(step: pathlib.Path, error: Exception) -> ValueError:
  first = str(error).strip().splitlines() or ['']
  return ValueError(f'{step} can not be read: {type(error).__name__}: {first[0][:300]}')


def _without_stragglers(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
  """When one read fails Orbax closes its event loop, and the others print a traceback each."""

  def filtered(unraisable: Any) -> None:
    if 'Event loop is closed' not in str(unraisable.exc_value):
      hook(unraisable)

  return filtered


def _to_text(content: bytes) -> str:
  try:
    text = content.decode('utf-8')
  except UnicodeDecodeError:
    return _BINARY + base64.b64encode(content).decode('ascii')
  if text.startswith(_BINARY):
    return _BINARY + base64.b64encode(content).decode('ascii')
  return text


def _to_bytes(text: str) -> bytes:
  if text.startswith(_BINARY):
    return base64.b64decode(text.removeprefix(_BINARY))
  return text.encode('utf-8')
