"""Draws the reports of runs again, from what their work directories hold.

    mimo report DIR [DIR ...]

Each goes to report.html in its directory, of a run that goes on, too. It holds the figures, tables
and configuration, and fetches nothing.
"""

from __future__ import annotations

import pathlib
import sys

from mimo.experiments import cli, command
from mimo.experiments.records import write_report
from mimo.telemetry import console


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's arguments."""
  flags.take_arguments('DIR', 'a work directory')


def main(given: cli.Given) -> None:
  """Runs the command."""
  if not given.arguments:
    raise cli.Usage('no directory is given; expected the work directory of a run')
  for directory in map(pathlib.Path, given.arguments):
    with cli.mistakes():
      written = write_report(directory)
      if written is None:
        raise ValueError(f'{directory} holds no record; expected a run with an update or more')
    console.say(f'report: {written}')


COMMAND = command.Command('report', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
