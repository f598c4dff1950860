"""What is written and shown of a run: metrics, the ledger, lines for a person, the report."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from mimo import fleet
from mimo.evaluation.evaluate import EvalResult
from mimo.experiments.schema import Experiment, plain
from mimo.rollouts.base import Batch, RolloutStats
from mimo.telemetry import metrics, names, report, writers
from mimo.telemetry.ledger import Ledger
from mimo.telemetry.progress import Progress, evaluation_line
from mimo.telemetry.writers import JsonlWriter, MultiWriter, TensorBoardWriter, WandbWriter, Writer


class Records:
  """Owns what a run writes in its directory beside weights. Used from one thread at a time.

  Attributes:
    ledger: what sampling cost so far.
    evaluated: updates whose evaluation is written.
  """

  def __init__(
    self,
    experiment: Experiment,
    directory: pathlib.Path,
    *,
    step: int | None,
    ledger: Mapping[str, Any] | None,
  ) -> None:
    """Opens the files.

    Args:
      experiment: what the run is.
      directory: its work directory.
      step: updates applied at the checkpoint that it goes on from, and drops all later records of;
        None for a fresh run.
      ledger: what `Ledger.state` returned then.
    """
    self._pools = experiment.fleet
    self._directory = directory
    self.ledger = Ledger([pool.name for pool in self._pools])
    if ledger is not None:
      self.ledger.restore(ledger)
    self._writer = _make_writer(experiment, directory, keep_through=step)
    self.evaluated = _evaluated_updates(directory)
    self._progress = Progress(experiment.updates, done=step or 0, stream=None)

  def note(self, text: str) -> None:
    """Shows a line."""
    self._progress.note(text)

  def book(self, stats: RolloutStats, elapsed_secs: float) -> dict[str, float]:
    """Books a batch's turns, and the time for which every replica was held since the last one."""
    turns = stats.turns()
    held = {pool.name: elapsed_secs for pool in self._pools}
    return self.ledger.add(
      turns=turns,
      modelled_usd=fleet.modelled_usd(self._pools, turns),
      billed_usd=fleet.billed_usd(self._pools, held),
    )

  def update(self, step: int, batch: Batch, scalars: Mapping[str, float]) -> None:
    """Writes and shows one update.

    Args:
      step: updates applied, this one included.
      batch: what it learned from.
      scalars: what else was measured, by name.
    """
    of_batch, histograms = metrics.batch_metrics(batch.groups, batch.staleness)
    of_sampling, more = metrics.rollout_metrics(dataclasses.asdict(batch.stats))
    for error in batch.stats.errors:
      self.note(f'lost: {error}')
    speed = {names.SAMPLER_SPEED: batch.stats.sampled_tokens_per_sec}
    written = {**scalars, **of_batch, **of_sampling, **speed}
    self._writer.scalars(step, written)
    self._writer.histograms(step, histograms | more)
    self._writer.flush()
    self._progress.update(step, written)

  def evaluation(self, update: int, result: EvalResult) -> None:
    """Writes and shows the evaluation of the weights after `update` updates."""
    summary = result.summary()
    self.note(evaluation_line(f'update {update}', summary))
    self._writer.scalars(update, metrics.flatten('eval', summary))
    self._writer.flush()
    self.evaluated.add(update)

  def write_report(self) -> pathlib.Path | None:
    """Draws the report; see the function of that name."""
    return write_report(self._directory)

  def close(self) -> None:
    """Closes the files and takes the progress bar away."""
    try:
      self._writer.close()
    finally:
      self._progress.close()


def write_report(workdir: pathlib.Path) -> pathlib.Path | None:
  """Draws the report of what metrics.jsonl holds; None where it holds nothing yet.

  Raises ValueError where `workdir` is no work directory.
  """
  stated = workdir / 'config.json'
  if not stated.is_file():
    raise ValueError(f'{workdir} holds no config.json; expected the work directory of a run')
  config = json.loads(stated.read_text(encoding='utf-8'))
  if not writers.read(workdir / 'metrics.jsonl'):
    return None
  return report.write(
    workdir / 'report.html',
    metrics=workdir / 'metrics.jsonl',
    config=config,
    title=f'{config["task"]}, {config["arm"]}, seed {config["seed"]}',
  )


def _make_writer(
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


def _evaluated_updates(workdir: pathlib.Path) -> set[int]:
  """Returns the updates whose evaluation metrics.jsonl holds."""
  name = names.of_eval('heldout', 'tasks')
  return {record['step'] for record in writers.read(workdir / 'metrics.jsonl') if name in record}
