r"""Trains a policy from samplers that do not match it.

    mimo train --config=mixed[:arm] --workdir=DIR \
        [--config.updates=N ...]

The same command again goes on from the last complete checkpoint. Ctrl-C, SIGTERM, SIGHUP and
SIGUSR1 save, write the report and leave; a second one leaves at once.

On several machines, the same command on each, with a work directory that all of them see and

    MIMO_COORDINATOR=HOST:PORT MIMO_PROCESSES=N MIMO_PROCESS=I

where HOST is that of process 0 (or the configuration's section `distributed`).
"""

from __future__ import annotations

import asyncio
import pathlib
import sys

from ml_collections import config_dict

from mimo.experiments import cli, command, configuration, defaults, hosts
from mimo.experiments.exits import Exits
from mimo.experiments.prepare import Plan, follow, plan, read
from mimo.experiments.publications import FirstPublicationError
from mimo.experiments.run import Run, guarded
from mimo.experiments.schema import parse, plain
from mimo.experiments.stopping import Stopped, on_signals, unless
from mimo.experiments.workdir import Workdir, check_workdir
from mimo.telemetry import console
from mimo.weights.publication import PublicationError


def _due(every: int, step: int, last: int) -> bool:
  return step in (0, last) or (every > 0 and step % every == 0)


async def loop(run: Run, stop: asyncio.Event) -> None:
  """Trains to the last update, or until `stop` is set. Saves either way."""
  experiment = run.plan.experiment
  last = experiment.updates
  done = run.start
  try:
    await unless(stop, run.open())
    with guarded():
      while True:
        # Before the checkpoint: one that exists has its evaluation, or says that it has not.
        if (
          _due(experiment.evaluation.every_updates, done, last)
          and done not in run.records.evaluated
        ):
          await unless(stop, run.evaluate(done))
        if done > run.start and _due(experiment.checkpoints.every_updates, done, last):
          run.save(done)
        if done >= last:
          return
        # A batch that is handed out is trained on, whatever else happens.
        batch = await unless(stop, run.batch(done))
        await run.update(batch)
        done += 1
        await run.publish(done)
  except Stopped:
    run.save(done)
    run.records.note(f'stopped after {done} of {last} updates; the same command goes on from here')


async def _train(planned: Plan, workdir: Workdir) -> pathlib.Path | None:
  """Returns the path of the report, which is written however the run ended in good order."""
  with on_signals() as stop:
    async with Exits() as exits:
      exits.own(workdir.close)
      with cli.mistakes():
        run = Run(planned, workdir, exits)
      await loop(run, stop)
    return run.records.write_report()


def train(config: config_dict.ConfigDict, workdir: str) -> None:
  """Runs an experiment in `workdir`. Raises cli.Mistake for what cannot be meant."""
  with cli.mistakes():
    experiment = parse(config)
    hosts.start(hosts.from_environment(experiment.distributed))
    planned = plan(experiment)
    if not planned.peers.primary:
      follow(planned, pathlib.Path(workdir).resolve())
      return
    try:
      directory = Workdir(workdir, plain(experiment), planned.policy.digest())
    except BaseException:
      planned.peers.tell(hosts.STOP)
      raise
  try:
    with asyncio.Runner(loop_factory=planned.schedule.loop) as runner:
      written = runner.run(_train(planned, directory))
  except (FirstPublicationError, PublicationError) as error:
    raise cli.Mistake(str(error)) from error
  if written is not None:
    console.say(f'report: {written}')


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('workdir', str, None, 'where the run lives; runs/<config> when not given', 'DIR')


def check(given: cli.Given) -> str:
  """Checks what needs no device."""
  stated, experiment = command.stated(given)
  with cli.mistakes():
    hosts.from_environment(experiment.distributed)
    inputs = read(experiment)
    path = check_workdir(_path(given, stated), plain(experiment), inputs.policy.digest)
  return f'would train {experiment.updates} updates of {inputs.task.name} in {path}'


def main(given: cli.Given) -> None:
  """Runs the command."""
  with cli.mistakes():
    stated = given.stated()
  train(stated.config, _path(given, stated))


def _path(given: cli.Given, stated: configuration.Stated) -> str:
  return given.workdir or defaults.default_workdir(stated.file)


COMMAND = command.Command('train', __doc__, define_flags, main, takes_config=True, check=check)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
