"""Step directories of Orbax checkpoints: finding them, and what their meta says."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orbax.checkpoint as ocp

from mimo.models.config import ModelConfig
from mimo.weights.layouts import Layout

STATE = 'state'
META = 'meta'
WORKDIR_CHECKPOINTS = 'checkpoints'  # where a run's work directory keeps them

_BINARY = 'base64:'
_STRAGGLER_SECS = 0.5


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


def find_step(path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the step directory that a path names: itself, or the newest step in it.

  Raises ValueError where there is no complete step.
  """
  root = pathlib.Path(path).absolute()
  if is_step(root):
    return root
  if (root / WORKDIR_CHECKPOINTS).is_dir():
    root = root / WORKDIR_CHECKPOINTS
  steps = [entry for entry in _numbered(root) if is_step(entry)]
  if not steps:
    raise ValueError(f'{root} holds no complete checkpoint; expected numbered step directories')
  return max(steps, key=lambda entry: int(entry.name))


def is_orbax(root: pathlib.Path) -> bool:
  """Whether a directory is a step, or holds steps."""
  return is_step(root) or (root / WORKDIR_CHECKPOINTS).is_dir() or bool(_numbered(root))


def _numbered(root: pathlib.Path) -> list[pathlib.Path]:
  if not root.is_dir():
    return []
  return [entry for entry in root.iterdir() if entry.name.isdigit() and entry.is_dir()]


def is_step(root: pathlib.Path) -> bool:
  """Whether a directory is a complete step."""
  return (root / STATE).is_dir() and (root / META).is_dir() and _is_finished(root)


def _is_finished(root: pathlib.Path) -> bool:
  return not ocp.utils.is_tmp_checkpoint(root) and ocp.utils.is_checkpoint_finalized(root)


def read_meta(step: pathlib.Path) -> dict[str, Any]:
  """Returns a step's meta. ValueError where it can't be read."""
  with unreadable(step):
    checkpointer = ocp.Checkpointer(ocp.JsonCheckpointHandler())
    meta = checkpointer.restore(step / META, args=ocp.args.JsonRestore())
  if not isinstance(meta, dict):
    raise ValueError(f'{step}: its meta is a {type(meta).__name__}; expected an object')
  return meta


@contextlib.contextmanager
def unreadable(step: pathlib.Path) -> Iterator[None]:
  """Turns whatever a reader raises for a damaged or foreign checkpoint into one line."""
  hook = sys.unraisablehook
  sys.unraisablehook = _without_stragglers(hook)
  try:
    yield
  except Exception as error:
    time.sleep(_STRAGGLER_SECS)
    raise cannot_read(step, error) from error
  finally:
    sys.unraisablehook = hook


@contextlib.contextmanager
def named(step: pathlib.Path) -> Iterator[None]:
  """The same for one array, which has no stragglers; in any thread."""
  try:
    yield
  except Exception as error:
    raise cannot_read(step, error) from error


def cannot_read(step: pathlib.Path, error: Exception) -> ValueError:
  """Returns the one line."""
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


def to_bytes(text: str) -> bytes:
  """Inverse of how `policy_meta` keeps a file."""
  if text.startswith(_BINARY):
    return base64.b64decode(text.removeprefix(_BINARY))
  return text.encode('utf-8')
