r"""Runs a grid of cells (fleet, arm, staleness, seed) and draws its report.

    mimo ablate --config=ablation --workdir=DIR \
        [--grid=quick|main|more|all|search] [--config.updates=N ...] [--results=DIR] [--workers=N]

As many cells run at a time as there are cores, each in a process on a core of its own. A finished
cell is written to --results (a CSV file per kind of cell, and cells.json, which says what each is
of) and never run again as long as no value differs; one that was stopped goes on from its last
checkpoint. The same command goes on with a grid, or, where nothing is left to do, draws its report
again: of results of an earlier revision, that alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from ml_collections import config_dict

from mimo import checks
from mimo.experiments import base_policy, cli, command, schema
from mimo.experiments.cells import Cell, resolve, rows
from mimo.experiments.results import REVISION, Results, digest
from mimo.experiments.train import train
from mimo.experiments.workdir import take_lock
from mimo.telemetry import console, names, study, writers

_POLL_SECS = 0.5
_SHOWN_EVERY_SECS = 60.0
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux

CELL_COMMAND = (sys.executable, '-m', 'mimo.experiments.ablate')

# What a run leaves that nothing reads once it is finished.
_LARGE = ('store', 'checkpoints', 'tensorboard')


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
  """A cell and its experiment."""

  cell: Cell
  experiment: schema.Experiment

  @functools.cached_property
  def name(self) -> str:
    """What its directory and its files are called: other values are another name."""
    return f'{self.cell.slug}-{digest(self.cell.kind, self.experiment)}'


def jobs(
  get_config: Callable[[str], config_dict.ConfigDict],
  grid: tuple[Sequence[str], Sequence[int]],
  overrides: dict[str, Any],
) -> list[Job]:
  """Returns the jobs of a grid, every kind with its first seed before any with its second.

  Raises ValueError for a configuration that cannot be meant.
  """
  kinds, seeds = grid
  cells = [Cell(kind, seed) for seed in seeds for kind in kinds]
  return [Job(cell, resolve(get_config, cell, overrides)) for cell in cells]


class Runner:
  """Runs jobs in processes, one to a core."""

  def __init__(
    self,
    workdir: pathlib.Path,
    results: Results,
    policy: str,
    workers: int,
    command: Sequence[str] = CELL_COMMAND,
  ) -> None:
    """Starts nothing yet.

    Args:
      workdir: where runs go.
      results: where finished cells are kept.
      policy: what runs start from whose configuration names none.
      workers: cells at a time, 0 for as many as there are cores.
      command: runs the cell whose file is appended to it as `--cell=FILE`.
    """
    self._command = tuple(command)
    self._workdir = workdir
    self._results = results
    self._policy = policy
    self._cores = _cores()[:workers] if workers else _cores()
    self._running: dict[int, tuple[Job, subprocess.Popen[bytes], TextIO]] = {}  # by core
    self.states: dict[Job, str] = {}

  def run(self, todo: Sequence[Job], show: Callable[[], None]) -> None:
    """Runs every job that is not finished. `show` is called as things change, and now and then."""
    waiting = []
    for job in todo:
      done = bool(self._results.read(job.cell, job.experiment))
      self.states[job] = 'finished' if done else 'waiting'
      if not done:
        waiting.append(job)
    shown_at = 0.0
    try:
      while waiting or self._running:
        for core in self._cores:
          if core not in self._running and waiting:
            self._start(core, waiting.pop(0))
        changed = any([self._reap(core) for core in list(self._running)])
        if changed or time.monotonic() - shown_at > _SHOWN_EVERY_SECS:
          shown_at = time.monotonic()
          show()
        time.sleep(_POLL_SECS)
    finally:
      self._stop()

  def directory(self, job: Job) -> pathlib.Path:
    """Returns a job's work directory."""
    return self._workdir / 'cells' / job.name

  def log(self, job: Job) -> pathlib.Path:
    """Returns where what a job prints goes."""
    return self._workdir / 'logs' / f'{job.name}.txt'

  def _start(self, core: int, job: Job) -> None:
    policy = job.experiment.policy or self._policy
    config = schema.plain(dataclasses.replace(job.experiment, policy=policy))
    stated = self._workdir / 'configs' / f'{job.name}.json'
    for path in (stated, self.log(job), self.directory(job)):
      path.parent.mkdir(parents=True, exist_ok=True)
    stated.write_text(json.dumps({'config': config, 'workdir': str(self.directory(job))}))
    log = open(self.log(job), 'a', encoding='utf-8')  # noqa: SIM115 (closed as the job ends)
    process = subprocess.Popen(
      [*self._command, f'--cell={stated}'],
      stdout=log,
      stderr=subprocess.STDOUT,
      env=_environment(self._workdir),
      preexec_fn=lambda: _settle_on(core),
      # Ctrl-C and a closed terminal reach this process alone, which then asks each run to stop:
      # both signals would end a run before it has saved.
      start_new_session=True,
    )
    self._running[core] = (job, process, log)
    self.states[job] = 'running'

  def _reap(self, core: int) -> bool:
    """Takes in the job on a core if it has ended; returns whether it had."""
    job, process, log = self._running[core]
    if process.poll() is None:
      return False
    log.close()
    del self._running[core]
    if process.returncode:
      self.states[job] = f'failed ({process.returncode})'
      return True
    found = rows(job.cell, self.directory(job) / 'metrics.jsonl')
    if found[-1]['update'] < job.experiment.updates:
      self.states[job] = 'stopped'
      return True
    self._results.add(job.cell, job.experiment, found)
    for name in _LARGE:
      shutil.rmtree(self.directory(job) / name, ignore_errors=True)
    self.states[job] = 'finished'
    return True

  def _stop(self) -> None:
    """Has what runs save and leave."""
    for _, process, _ in self._running.values():
      process.terminate()
    for _, process, log in self._running.values():
      process.wait()
      log.close()
    self._running = {}


def table(states: dict[Job, str], runner: Runner, results: Results) -> str:
  """Returns the progress of a grid, a line per job."""
  lines = [f'{"cell":<36}{"state":<14}{"update":>9}  {"pass@1":>7}  {"base":>7}']
  for job, state in states.items():
    scored = names.of_eval('heldout', 'pass@1')
    known = results.read(job.cell, job.experiment) if state == 'finished' else []
    if state == 'running' and (metrics := runner.directory(job) / 'metrics.jsonl').exists():
      known = [{'update': record['step'], **record} for record in writers.read(metrics)]
    scores = [row[scored] for row in known if scored in row]
    update = f'{max((row["update"] for row in known), default=0)}/{job.experiment.updates}'
    shown = [f'{score:7.3f}' for score in (scores[-1:] + scores[:1])] or ['-', '-']
    lines.append(f'{job.cell!s:<36}{state:<14}{update:>9}  {shown[0]:>7}  {shown[1]:>7}')
  done = sum(state == 'finished' for state in states.values())
  return '\n'.join([*lines, f'{done} of {len(states)} cells are finished', ''])


def ablate(
  get_config: Callable[[str], config_dict.ConfigDict],
  grid: tuple[Sequence[str], Sequence[int]],
  *,
  overrides: dict[str, Any],
  workdir: pathlib.Path,
  results: pathlib.Path,
  workers: int,
  command: Sequence[str] = CELL_COMMAND,
) -> pathlib.Path:
  """Runs what is left of a grid, and draws its report. Returns the report's path.

  Results of an earlier revision gain no cells: what they hold of the grid is drawn.

  Raises cli.Mistake for what cannot be meant, and at the end where a cell failed.
  """
  with cli.mistakes():
    todo = jobs(get_config, grid, overrides)
    kept = Results(results)
    missing = [job for job in todo if not kept.read(job.cell, job.experiment)]
    if kept.revision != REVISION:
      todo = _those_kept(todo, missing, kept)
      missing = []
    workdir.mkdir(parents=True, exist_ok=True)
    lock = take_lock(workdir)
  if any(not job.experiment.policy for job in missing):
    policy = str(
      base_policy.make(
        workdir,
        lambda step, value: console.say(f'base policy, step {step}: loss {value:.3f}'),
      )
    )
  else:
    policy = ''
  runner = Runner(workdir, kept, policy, workers, command)
  runner.run(todo, lambda: console.say(table(runner.states, runner, kept)))
  lock.close()
  points = [row for job in todo for row in kept.read(job.cell, job.experiment)]
  written = study.write(workdir, points) if points else None
  failed = [job for job in todo if runner.states[job] != 'finished']
  if failed:
    raise cli.Mistake(
      f'{len(failed)} of {len(todo)} cells failed, such as {failed[0].cell}; '
      f'{runner.log(failed[0])} says why; the same command tries them again'
    )
  assert written is not None, 'a grid has cells'
  return written


def _those_kept(todo: Sequence[Job], missing: Sequence[Job], kept: Results) -> list[Job]:
  """Returns the jobs whose results are kept, where no other may be added to them."""
  if len(missing) == len(todo):
    raise ValueError(
      f'--results: {kept.directory} keeps cells of revision {kept.revision}, and {todo[0].cell} is '
      f'none of them; expected a directory of revision {REVISION}, or a new one'
    )
  if missing:
    console.say(
      f'{kept.directory} keeps {len(todo) - len(missing)} of {len(todo)} cells, of revision '
      f'{kept.revision}, and gains none'
    )
  return [job for job in todo if job not in missing]


def _cores() -> list[int]:
  if hasattr(os, 'sched_getaffinity'):
    return sorted(os.sched_getaffinity(0))
  return list(range(os.cpu_count() or 1))


def _settle_on(core: int) -> None:
  """In a new process, before anything else: one core, and an end with its parent's."""
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(0, {core})
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGTERM)


def _environment(workdir: pathlib.Path) -> dict[str, str]:
  """One thread a process; and cells compile equal programs, so they share them."""
  return {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1',
    'OMP_NUM_THREADS': '1',
    'JAX_COMPILATION_CACHE_DIR': str(workdir / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0.2',
  }


def _run_cell(path: str) -> None:
  """What a job's process does."""
  with cli.mistakes():
    stated = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  train(config_dict.ConfigDict(stated['config']), stated['workdir'])


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('workdir', str, 'runs/ablation', 'where runs and the report go', 'DIR')
  flags.flag('grid', str, 'quick', 'a grid of the configuration')
  flags.flag('results', str, 'experiments/results', 'where finished cells are kept', 'DIR')
  flags.flag('workers', int, 0, 'cells at a time; 0: as many as there are cores')
  flags.flag('cell', str, '', 'used by the command itself: runs one cell', 'FILE')


def main(given: cli.Given) -> None:
  """Runs the command."""
  if given.cell:
    _run_cell(given.cell)
    return
  with cli.mistakes():
    experiment = given.stated()
    stated = runpy.run_path(str(experiment.file))
    if 'GRIDS' not in stated:
      raise ValueError(f'{experiment.file} defines no GRIDS; expected a file as ablation.py')
    checks.one_of('--grid', given.grid, stated['GRIDS'])
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    written = ablate(
      stated['get_config'],
      stated['GRIDS'][given.grid],
      overrides=dict(experiment.overrides),
      workdir=pathlib.Path(given.workdir).resolve(),
      results=pathlib.Path(given.results),
      workers=given.workers,
    )
  except KeyboardInterrupt:
    raise KeyboardInterrupt('stopped; the same command goes on from here') from None
  console.say(f'report: {written}')


COMMAND = command.Command('ablate', __doc__, define_flags, main, takes_config=True)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
