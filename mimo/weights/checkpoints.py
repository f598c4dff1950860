"""Resumable checkpoints with Orbax, and policies read from them or from Hugging Face directories.

One step of a checkpoint directory holds a tree of arrays (`state`) and a JSON object (`meta`). A
policy can be read from a step when the tree has the model's parameters under `params` and the meta
has what `policy_meta` gives. Tensors that are carried along, such as those of a vision tower, are
the same in every step: they lie once beside the steps, in `carried`, and each meta says so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from mimo import checks
from mimo.models.config import ModelConfig
from mimo.models.table import Index, Param, leaf, nest, table
from mimo.weights import chunked, huggingface, steps
from mimo.weights.chunked import ChunkReader, Path, Where
from mimo.weights.encoder import write_carried
from mimo.weights.layouts import Carried, Layout, Origin
from mimo.weights.shards import TensorWriter
from mimo.weights.sources import Source
from mimo.weights.steps import META, STATE, WORKDIR_CHECKPOINTS
from mimo.weights.steps import find_step as find_step
from mimo.weights.steps import policy_meta as policy_meta
from mimo.weights.tensors import TensorReader, contiguous

CARRIED = 'carried'
PARAMS = 'params'


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
  """When a run is saved: the section `checkpoints` of a configuration.

  Attributes:
    every_updates: saves after every so many updates, and at the end; 0: at the end only.
  """

  every_updates: int = 20

  def __post_init__(self) -> None:
    checks.whole('every_updates', self.every_updates, least=0)


class Checkpoints:
  """The checkpoints of one run: asynchronous saves, the newest `keep` kept.

  A save that a kill interrupts leaves no step behind; what it left is removed when the directory
  is opened again. So one process opens it at a time.
  """

  def __init__(
    self,
    directory: str | os.PathLike[str],
    keep: int,
    *,
    stacks: Mapping[Path, int] | None = None,
    carried: Carried | None = None,
  ):
    """Opens the directory, or makes it.

    Args:
      directory: of the steps.
      keep: how many steps.
      stacks: the end of a leaf's path -> how many of its leading dimensions stack others, see
        `stacks_of`: a step has a chunk for each of their indices.
      carried: tensors that go with every step.

    Raises:
      ValueError: `keep` is less than 1, or the directory carries other tensors.
    """
    if keep < 1:
      raise ValueError(f'keep is {keep}; expected at least 1 checkpoint')
    self.directory = pathlib.Path(directory).absolute()
    self._stacks = dict(stacks or {})
    self._carried = carried is not None
    if carried is not None and jax.process_index() == 0:
      _write_carried(self.directory, carried)
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
    meta = {**meta, CARRIED: f'../{CARRIED}'} if self._carried else dict(meta)
    how = jax.tree_util.tree_map_with_path(self._save_args, tree)
    args = {STATE: ocp.args.StandardSave(tree, save_args=how), META: ocp.args.JsonSave(meta)}
    self._manager.save(step, args=ocp.args.Composite(**args))

  def _save_args(self, path: tuple[Any, ...], _: Any) -> ocp.SaveArgs:
    keys = tuple(map(_key, path))
    stacked = [self._stacks[keys[i:]] for i in range(len(keys)) if keys[i:] in self._stacks]
    return chunked.save_args(stacked[0] if stacked else 0)

  def latest(self) -> int | None:
    """Returns the newest step that is complete on disk, or None."""
    return max(self.steps(), default=None)

  def steps(self) -> list[int]:
    """Returns every step that is complete on disk, in order."""
    # Orbax counts a step from the moment its save begins, and no longer while it deletes it.
    return sorted(s for s in self._manager.all_steps() if steps.is_step(self.directory / str(s)))

  def restore(self, step: int, abstract_tree: Any) -> tuple[Any, dict[str, Any]]:
    """Returns (tree, meta) of a step.

    Args:
      step: one of `steps()`.
      abstract_tree: the tree with a `jax.ShapeDtypeStruct`, or an array to be like, at each leaf;
        their shardings say where the arrays go.

    Raises:
      ValueError: there is no such step, or it can't be read as this tree.
    """
    if step not in (found := self.steps()):
      raise ValueError(f'{self.directory} has no step {step}; it has {found}')
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, abstract_tree)
    args = {STATE: ocp.args.StandardRestore(abstract), META: ocp.args.JsonRestore()}
    with steps.unreadable(self.directory / str(step)):
      restored = self._manager.restore(step, args=ocp.args.Composite(**args))
    return restored[STATE], restored[META]

  def wait(self) -> None:
    """Returns once every save is on disk. Raises what a save failed with."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits and frees what the manager holds."""
    self._manager.close()


def stacks_of(config: ModelConfig) -> dict[Path, int]:
  """Returns the path of each parameter -> how many leading dimensions of it stack others."""
  return {row.path: len(row.lead_shape) for row in table(config)}


def write_policy(directory: str | os.PathLike[str], source: Source) -> None:
  """Writes a policy as step 0 of a directory, a few parts at a time.

  The directory appears whole or not at all. Weights keep the dtype that they are stored in.

  Raises ValueError where the directory exists and is not empty, or a weight isn't finite.
  """
  leaves = {
    row.path: chunked.ChunkedArray(
      row.leaf_shape,
      source.weights.dtype(row),
      len(row.lead_shape),
      functools.partial(source.parts, row),
    )
    for row in table(source.config)
  }
  meta = steps.policy_meta(source.config, source.tokenizer_files, source.origin.layout)
  with huggingface.new_directory(directory) as temporary:
    if source.origin.carried is not None:
      _write_carried(temporary, source.origin.carried)
      meta |= {CARRIED: f'../{CARRIED}'}
    handlers = {STATE: chunked.handler(), META: ocp.JsonCheckpointHandler()}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    args = {STATE: ocp.args.PyTreeSave({PARAMS: nest(leaves)}), META: ocp.args.JsonSave(meta)}
    with ocp.CheckpointManager(
      temporary.absolute(), options=options, item_handlers=handlers
    ) as manager:
      manager.save(0, args=ocp.args.Composite(**args))


def _write_carried(directory: pathlib.Path, carried: Carried) -> None:
  """Writes what is carried, once."""
  target = directory / CARRIED
  if target.exists():
    held = TensorReader(target).names()
    if held != carried.names:
      raise ValueError(
        f'{target} holds {len(held)} tensors; expected the {len(carried.names)} that the policy '
        'carries'
      )
    return
  with (
    huggingface.new_directory(target) as temporary,
    TensorWriter(temporary, carried.specs()) as writer,
  ):
    write_carried(writer, carried)


def _read_carried(step: pathlib.Path, meta: Mapping[str, Any]) -> Carried | None:
  if CARRIED not in meta:
    return None
  directory = pathlib.Path(os.path.normpath(step / meta[CARRIED]))
  if not directory.is_dir():
    raise ValueError(f'{step}: {directory} is missing; expected the tensors that it carries along')
  reader = TensorReader(directory)
  return Carried(reader, reader.names())


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
  if steps.is_orbax(root):
    return _open_step(steps.find_step(root))
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


def _open_step(step: pathlib.Path) -> Source:
  meta = steps.read_meta(step)
  if 'model' not in meta or 'tokenizer' not in meta:
    raise ValueError(f'{step}: its meta has {sorted(meta)}; expected model and tokenizer')
  try:
    config = ModelConfig.from_hf(meta['model'])
    # Checkpoints saved before layouts were kept have none.
    published = Layout.published(config)
    layout = Layout.from_json(meta['layout']) if 'layout' in meta else published
  except ValueError as error:
    raise ValueError(f'{step}: {error}') from None
  with steps.unreadable(step):
    reader = ChunkReader(step / STATE)
  if PARAMS not in reader.tree:
    raise ValueError(f'{step}: its state has {sorted(reader.tree)}; expected {PARAMS}')
  for row in table(config):
    _check_shape(step, reader.tree[PARAMS], row.path, row.leaf_shape)
  carried = _read_carried(step, meta)
  files = {name: steps.to_bytes(text) for name, text in meta['tokenizer'].items()}
  return Source(step, config, files, Origin(layout, carried), _Weights(step, reader))


class _Weights:
  """The weights in a step, in our layout."""

  def __init__(self, step: pathlib.Path, reader: ChunkReader) -> None:
    self._step = step
    self._reader = reader

  def dtype(self, row: Param) -> np.dtype:
    return self._reader.dtype((PARAMS, *row.path))

  def part(self, row: Param, where: Where) -> np.ndarray:
    with steps.named(self._step):
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


def _key(entry: Any) -> str:
  """One step of a path into a pytree, as Orbax names it."""
  for attribute in ('key', 'name', 'idx'):
    if hasattr(entry, attribute):
      return str(getattr(entry, attribute))
  return str(entry)
