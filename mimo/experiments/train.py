r"""Trains a policy from samplers that do not match it.

    mimo train --config=mixed[:arm] --workdir=DIR \
        [--config.updates=N ...]

The same command again goes on from the last complete checkpoint. SIGTERM saves and leaves.

On several machines, the same command on each, with a work directory that all of them see and

    MIMO_COORDINATOR=HOST:PORT MIMO_PROCESSES=N MIMO_PROCESS=I

where HOST is that of process 0 (or the configuration's section `distributed`).
"""

from __future__ import annotations

import argparse
import asyncio
import pathlib
import signal
import sys
from collections.abc import Awaitable
from typing import TypeVar

from ml_collections import config_dict

from mimo.experiments import cli, command, configuration, defaults, hosts
from mimo.experiments.prepare import follow, plan
from mimo.experiments.run import Run
from mimo.experiments.schema import parse, plain
from mimo.experiments.workdir import Workdir
from mimo.telemetry import console

_T = TypeVar('_T')


class _Stopped(Exception):
  """SIGTERM arrived."""


async def _unless(stop: asyncio.Event, work: Awaitable[_T]) -> _T:
  """Waits for `work`. Cancels it and raises _Stopped when `stop` is set first."""
  task = asyncio.ensure_future(work)
  stopping = asyncio.ensure_future(stop.wait())
  try:
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
      raise _Stopped
    return task.result()
  finally:
    for waiting in (task, stopping):
      waiting.cancel()
    await asyncio.gather(task, stopping, return_exceptions=True)


def _due(every: int, step: int, last: int) -> bool:
  return step in (0, last) or (every > 0 and step % every == 0)


async def loop(run: Run, stop: asyncio.Event) -> None:
  """Trains to the last update, or until `stop` is set. Saves either way."""
  experiment = run.plan.experiment
  last = experiment.updates
  done = run.start
  try:
    await _unless(stop, run.open())
    while True:
      # Before the checkpoint: one that exists has its evaluation, or says that it has not.
      if _due(experiment.evaluation.every_updates, done, last) and done not in run.evaluated:
        await _unless(stop, run.evaluate(done))
      if done > run.start and _due(experiment.checkpoints.every_updates, done, last):
        run.save(done)
      if done >= last:
        break
      batch = await _unless(stop, run.batch(done))
      scalars = await run.update(batch)
      done += 1
      await run.publish(done)
      run.record(done, batch, scalars)
  except _Stopped:
    run.save(done)
    run.progress.note(f'stopped after {done} of {last} updates; the same command goes on from here')
  finally:
    await run.close()


async def _train(run: Run) -> None:
  stop = asyncio.Event()
  asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
  await loop(run, stop)


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
      directory = Workdir(workdir, plain(experiment))
    except BaseException:
      planned.peers.tell(hosts.STOP)
      raise
    run = Run(planned, directory)
  with asyncio.Runner(loop_factory=planned.schedule.loop) as runner:
    runner.run(_train(run))
  written = run.write_report()
  if written is not None:
    console.say(f'report: {written}')


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('workdir', str, None, 'where the run lives; runs/<config> when not given', 'DIR')


def main(given: argparse.Namespace) -> None:
  """Runs the command."""
  with cli.mistakes():
    stated = configuration.read(given.config, given.overrides)
  train(stated.config, given.workdir or defaults.default_workdir(stated.file))


COMMAND = command.Command('train', __doc__, define_flags, main, takes_config=True)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
