"""How commands start and end: flags in, one line out for a mistake, an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from absl import flags, logging

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


class Given(types.SimpleNamespace):
  """What a command line states: each flag by its name, and

  Attributes:
    arguments: what is no flag, in order.
    stated: returns the experiment of --config and its overrides; raises `configuration.Misstated`
      where there is none.
  """

  arguments: list[str]
  stated: Callable[[], configuration.Stated]


# The type of a flag -> what defines it, and its value in help.
_KINDS: dict[type, tuple[Callable[..., Any], str]] = {
  int: (flags.DEFINE_integer, 'N'),
  float: (flags.DEFINE_float, 'X'),
  str: (flags.DEFINE_string, 'TEXT'),
}


class Flags:
  """The flags of one command: absl's, in a registry of their own."""

  def __init__(self) -> None:
    self._values = flags.FlagValues()
    self._values.set_gnu_getopt(True)  # flags may follow arguments
    self._shown: list[tuple[str, str]] = []  # left and right of each line of help
    self._takes_arguments = False

  def flag(self, name: str, kind: type, default: Any, text: str, value: str = '') -> None:
    """Adds --name=VALUE of a kind: int, float or str.

    Its help names the default, unless that is nothing.
    """
    define, shown = _KINDS[kind]
    define(name, default, text, flag_values=self._values)
    said = '' if default in (None, '') else f' (default {default})'
    self._shown.append((f'--{name}={value or shown}', f'{text}{said}'))

  def switch(self, name: str, text: str, short_name: str | None = None) -> None:
    """Adds --name, which is off unless it is given."""
    flags.DEFINE_boolean(name, False, text, flag_values=self._values, short_name=short_name)
    self._shown.append((f'--{name}' + (f', -{short_name}' if short_name else ''), text))

  def take_arguments(self, name: str, text: str) -> None:
    """Takes arguments that are no flags."""
    self._takes_arguments = True
    self._shown.append((name, text))

  def names(self) -> list[str]:
    """Returns the names of its flags."""
    return sorted(name for name in self._values if name.split('.')[0] != 'config')

  def help(self) -> str:
    """Returns a line for each flag, in the order in which they were added."""
    width = max(len(left) for left, _ in self._shown)
    return '\n'.join(f'  {left:{width}}  {right}' for left, right in self._shown)

  def parse(self, argv: Sequence[str], *, takes_config: bool) -> Given:
    """Parses a command line. Raises Usage."""
    with mistakes():
      text, rest = configuration.split(argv) if takes_config else (None, list(argv))
      stated = (
        configuration.define(self._values, text, rest)
        if text
        else functools.partial(configuration.read, None)
      )
    try:
      with mistakes():
        arguments = configuration.parse(self._values, rest)
    except flags.UnrecognizedFlagError as error:
      if takes_config and error.flagname.startswith('config.'):
        with mistakes():
          configuration.read(None)
      near = checks.nearest(error.flagname, [*self.names(), *['config'] * takes_config])
      raise Usage(f'there is no flag --{error.flagname}{near}') from error
    if arguments and not self._takes_arguments:
      raise Usage(f'got the argument {arguments[0]!r}; expected only flags')
    values = {name: self._values[name].value for name in self.names()}
    return Given(**values, arguments=arguments, stated=stated)


def required(given: Given, **expected: str) -> None:
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
