r"""Evaluates a checkpoint: in BF16, over the full vocabulary, unbiased pass@k on held-out tasks.

    mimo evaluate --config=mixed --checkpoint=DIR \
        [--samples=8] [--out=FILE]

`--checkpoint` is an Orbax checkpoint (a step, a directory of steps, a run's work directory) or a
Hugging Face directory of plain weights. Of the configuration only the task and the seed matter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import sys
import tempfile

from mimo.evaluation.evaluate import EvalResult, full_vocabulary
from mimo.experiments import cli, command, factories
from mimo.experiments.schema import Experiment
from mimo.tasks.base import Task
from mimo.telemetry import console
from mimo.telemetry.progress import evaluation_line
from mimo.weights.publication import Publisher, Snapshot
from mimo.weights.store import FileStore
from mimo.weights.views import ViewSpec


async def evaluate(policy: factories.Policy, task: Task, *, samples: int, seed: int) -> EvalResult:
  """Publishes the policy's BF16 view to a store of its own and samples it."""
  with tempfile.TemporaryDirectory(prefix='mimo-evaluate-') as directory:
    store = FileStore(directory)
    views = {factories.EVALUATION_VIEW: ViewSpec(factories.EVALUATION_VIEW)}
    publisher = Publisher(store, policy.model, policy.tokenizer_files, views, 0)
    publisher.publish(0, Snapshot(policy.model, policy.params))
    sampler = factories.make_evaluator(
      store, policy.model, max_tokens=task.max_tokens, executor=None
    )
    try:
      await sampler.start()
      return await factories.evaluate(
        sampler,
        task,
        params=full_vocabulary(task),
        samples=samples,
        seed=seed,
        subsets=factories.evaluation_splits(task),
      )
    finally:
      await sampler.close()


def _plan(
  experiment: Experiment, checkpoint: str, samples: int, out: str | None
) -> tuple[factories.Policy, Task]:
  """Reads what the flags name. Raises ValueError or OSError."""
  if out and pathlib.Path(out).is_dir():
    raise ValueError(f'--out: {out} is a directory; expected a file')
  if samples < 1:
    raise ValueError(f'--samples is {samples}; expected at least 1')
  if out and not pathlib.Path(out).absolute().parent.is_dir():
    raise ValueError(f'--out: {pathlib.Path(out).parent} is no directory; expected one that exists')
  policy = factories.make_policy(checkpoint, experiment.task)
  task = factories.make_task(experiment.task, policy)
  if not task.size('heldout'):
    raise ValueError(f"task {task.name}: split 'heldout' holds no tasks; expected at least one")
  return policy, task


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('checkpoint', str, None, 'an Orbax checkpoint or a Hugging Face directory', 'DIR')
  flags.flag('samples', int, 8, 'per held-out task')
  flags.flag('out', str, None, 'a JSON file for every reward', 'FILE')


def _read(given: cli.Given) -> tuple[Experiment, factories.Policy, Task]:
  """Reads the flags and what they name. Raises cli.Mistake."""
  _, experiment = command.stated(given)
  cli.required(given, checkpoint='an Orbax or Hugging Face checkpoint')
  with cli.mistakes():
    return experiment, *_plan(experiment, given.checkpoint, given.samples, given.out)


def check(given: cli.Given) -> str:
  """Checks what needs no device."""
  _, _, task = _read(given)
  drawn = f'{task.size("heldout")} tasks of {task.name}, {given.samples} samples each'
  return f'would evaluate {given.checkpoint}: {drawn}'


def main(given: cli.Given) -> None:
  """Runs the command."""
  experiment, policy, task = _read(given)
  with cli.mistakes():  # read now, while what is wrong with them is the user's mistake
    policy = dataclasses.replace(policy, weights=policy.params)
  result = asyncio.run(
    evaluate(
      policy,
      task,
      samples=given.samples,
      seed=experiment.seed,
    )
  )
  if given.out:
    pathlib.Path(given.out).write_text(json.dumps(result.to_json()) + '\n', encoding='utf-8')
  console.say(evaluation_line(given.checkpoint, result.summary()))


COMMAND = command.Command('evaluate', __doc__, define_flags, main, takes_config=True, check=check)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
