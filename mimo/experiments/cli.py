"""How a command starts and ends: flags in, one line out for a mistake, an exit code.

A command's module defines a `Command`, so importing it (in a notebook, in a test) starts nothing.
`mimo NAME` and `python -m mimo.experiments.NAME` both end in `run`, which never exits by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import logging

from mimo import checks
from mimo.experiments import configuration
from mimo.telemetry import console

USAGE_ERROR = 2  # the command line is wrong: nothing was started
INPUT_ERROR = 1  # what the command line names is missing, corrupt or does not fit
INTERRUPTED = 130  # Ctrl-C, as shells count it


class Mistake(Exception):
  """A user's mistake: the message is one line that says what was got and what was expected."""

  exit_code = INPUT_ERROR


class Usage(Mistake):
  """A mistake in the command line itself."""

  exit_code = USAGE_ERROR


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
  """Turns the errors that bad input raises into `Mistake`, while something is being set up.

  Only set-up runs under it: the same exception from a running loop is a bug and keeps its
  traceback.
  """
  try:
    yield
  except configuration.Misstated as error:
    raise Usage(str(error)) from error
  except ValueError as error:
    raise Mistake(str(error)) from error
  except OSError as error:
    named = f'{error.filename}: {error.strerror}' if error.filename else str(error)
    raise Mistake(f'{named}; expected a path that can be read, and written to') from error


class Flags(argparse.ArgumentParser):
  """The flags of a command, of which each has one line of help."""

  def flag(self, name: str, kind: type, default: Any, text: str, value: str = '') -> None:
    """Adds --name=VALUE of a kind: int, float or str.

    Its help names the default, unless that is nothing.
    """

    def parsed(stated: str) -> Any:
      try:
        return configuration.value(f'--{name}', kind, stated)
      except ValueError as error:
        raise Usage(str(error)) from None

    shown = '' if default in (None, '') else f' (default {default})'
    self.add_argument(
      f'--{name}',
      type=parsed,
      default=default,
      metavar=value or {int: 'N', float: 'X', str: 'TEXT'}[kind],
      help=f'{text}{shown}'.replace('%', '%%'),
    )

  def error(self, message: str) -> Any:
    """Raises Usage where argparse would print several lines and exit."""
    raise Usage(message)


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of `mimo`.

  Attributes:
    name: as it is typed, after `mimo`.
    doc: what it does; help shows it whole.
    define_flags: adds its flags.
    main: does it. Returns the exit code, None for 0. Raises Mistake.
    takes_config: it has --config, overrides of it, and --print_config.
    check: does what of `main` needs no device and writes nothing, for --dry_run; returns a line.
  """

  name: str
  doc: str
  define_flags: Callable[[Flags], None]
  main: Callable[[argparse.Namespace], int | None]
  takes_config: bool = False
  check: Callable[[argparse.Namespace], str] | None = None

  def flags(self) -> Flags:
    """Returns the parser of its flags."""
    flags = Flags(
      prog=f'mimo {self.name}',
      description=inspect.cleandoc(self.doc),
      formatter_class=argparse.RawDescriptionHelpFormatter,
      add_help=False,
      allow_abbrev=False,
    )
    if self.takes_config:
      flags.flag('config', str, None, 'the experiment: its name, or a file', 'NAME[:ARGUMENT]')
    self.define_flags(flags)
    if self.takes_config:
      flags.add_argument(
        '--print_config', action='store_true', help='print the resolved configuration, and stop'
      )
    if self.check is not None:
      flags.add_argument(
        '--dry_run', action='store_true', help='check what needs no device, write nothing, and stop'
      )
    flags.add_argument('--help', '-h', action='store_true', help='print this, and stop')
    return flags


def required(given: argparse.Namespace, **expected: str) -> None:
  """Raises Usage for the first flag that is missing, of `name='what is expected'`."""
  for name, what in expected.items():
    if not getattr(given, name):
      raise Usage(f'--{name} is missing; expected {what}')


def main(command: Command) -> int:
  """Runs a command in a process of its own and returns the exit code."""
  prepare_process()
  return run(command, sys.argv[1:])


def prepare_process() -> None:
  """Sets up what belongs to the whole process: its standard streams, and what libraries log."""
  console.open_missing()
  logging.use_absl_handler()
  logging.set_verbosity(logging.ERROR)
  with contextlib.suppress(OSError, ValueError):  # a standard error that is no file
    faulthandler.enable()


def run(command: Command, argv: Sequence[str]) -> int:
  """Runs a command and returns its exit code.

  A Mistake and Ctrl-C end in one line on standard error. Other exceptions pass, with their
  traceback.
  """
  with ending(f'mimo {command.name}') as end:
    end.code = _run(command, argv)
  return end.code


@dataclasses.dataclass
class End:
  """How a command ended."""

  code: int = 0


@contextlib.contextmanager
def ending(prefix: str) -> Iterator[End]:
  """Renders a mistake, and Ctrl-C, as one line on standard error, and sets the exit code."""
  end = End()
  try:
    yield end
  except Mistake as mistake:
    end.code = mistake.exit_code
    message = str(mistake)
  except KeyboardInterrupt as interrupt:
    end.code = INTERRUPTED
    message = str(interrupt) or 'interrupted'
  else:
    message = ''
  if message:
    console.line(f'{prefix}: {" ".join(message.split())}', sys.stderr)
  console.Screen(sys.stdout).flush()


def _run(command: Command, argv: Sequence[str]) -> int:
  flags = command.flags()
  try:
    overrides, rest = configuration.split_overrides(argv if command.takes_config else ())
  except ValueError as error:
    raise Usage(str(error)) from error
  given, unknown = flags.parse_known_args(rest if command.takes_config else argv)
  if given.help:
    console.say(flags.format_help().rstrip())
    return 0
  if unknown:
    raise Usage(_unknown(unknown[0], sorted(vars(given))))
  given.overrides = overrides
  if command.takes_config and given.print_config:
    with mistakes():
      stated = configuration.read(given.config, given.overrides)
    console.say(json.dumps(stated.config.to_dict(), indent=2))
    return 0
  if command.check is not None and given.dry_run:
    console.say(command.check(given))
    return 0
  return command.main(given) or 0


def _unknown(argument: str, known: Sequence[str]) -> str:
  if not argument.startswith('-'):
    return f'got the argument {argument!r}; expected only flags'
  name = argument.lstrip('-').split('=')[0]
  return f'there is no flag --{name}{checks.nearest(name, known)}'
