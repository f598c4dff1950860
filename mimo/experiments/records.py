"""Where a run's scalars go, and what of them is there already."""

from __future__ import annotations

import hashlib
import pathlib

from mimo.experiments.schema import Experiment, plain
from mimo.telemetry import names, writers
from mimo.telemetry.writers import JsonlWriter, MultiWriter, TensorBoardWriter, WandbWriter, Writer


def make_writer(
  experiment: Experiment, workdir: pathlib.Path, *, keep_through: int | None
) -> Writer:
  """Returns the writers of a run, which drop what they hold of later steps than is stated."""
  kept: list[Writer] = [
    JsonlWriter(workdir / 'metrics.jsonl', keep_through=keep_through),
    TensorBoardWriter(workdir / 'tensorboard', keep_through=keep_through),
  ]
  if experiment.wandb_project:
    kept.append(
      WandbWriter(
        project=experiment.wandb_project,
        name=workdir.name,
        run_id=f'{workdir.name}-{hashlib.sha256(str(workdir).encode()).hexdigest()[:8]}',
        directory=workdir,
        config=plain(experiment),
      )
    )
  return MultiWriter(kept)


def evaluated_updates(workdir: pathlib.Path) -> set[int]:
  """Returns the updates whose evaluation metrics.jsonl holds."""
  name = names.of_eval('heldout', 'tasks')
  return {record['step'] for record in writers.read(workdir / 'metrics.jsonl') if name in record}
