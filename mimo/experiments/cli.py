"""How commands start and end: flags in, one line out for a mistake, an exit code."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import sys
from collections.abc import Iterator
from typing import Any

from absl import logging

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


def required(given: argparse.Namespace, **expected: str) -> None:
  """Raises Usage for the first flag that is missing, of `name='what is expected'`."""
  for name, what in expected.items():
    if not getattr(given, name):
      raise Usage(f'--{name} is missing; expected {what}')


def prepare_process() -> None:
  """Sets up what belongs to the whole process: its standard streams, and what libraries log."""
  console.open_missing()
  logging.use_absl_handler()
  logging.set_verbosity(logging.ERROR)
  with contextlib.suppress(OSError, ValueError):  # a standard error that is no file
    faulthandler.enable()


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
