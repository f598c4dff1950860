"""How a command starts and ends: flags in, one line out for a mistake.

A command's module calls `run(main)` and defines its flags in `define_*` functions, so importing
it (in a notebook, in a test) defines nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import config_dict, config_flags

USAGE_ERROR = 2  # the command line is wrong: nothing was started
INPUT_ERROR = 1  # what the command line names is missing, corrupt or does not fit


class Mistake(Exception):
  """A user's mistake: the message is one line that says what was got and what was expected."""


@contextlib.contextmanager
def mistakes() -> Iterator[None]:
  """Turns the errors that bad input raises into `Mistake`, while something is being set up.

  Only set-up runs under it: the same exception from a running loop is a bug and keeps its
  traceback.
  """
  try:
    yield
  except ValueError as error:
    raise Mistake(' '.join(str(error).split())) from error
  except OSError as error:
    named = f'{error.filename}: {error.strerror}' if error.filename else str(error)
    raise Mistake(f'{named}; expected a path that can be read, and written to') from error


def define_config(default: str | None) -> None:
  """Defines --config=FILE[:ARGUMENT] with --config.KEY=VALUE overrides."""
  config_flags.DEFINE_config_file('config', default, 'an experiment of configs/', lock_config=True)


def config_value() -> config_dict.ConfigDict:
  """Returns the parsed --config. Raises Mistake where it is missing."""
  config = flags.FLAGS.config
  if not isinstance(config, config_dict.ConfigDict):
    raise Mistake('--config is missing; expected a file such as --config=configs/mixed.py')
  return config


def _parse(argv: list[str]) -> list[str]:
  """Parses flags; any mistake becomes one line and exit code 2."""
  try:
    for argument, following in itertools.zip_longest(argv[1:], argv[2:], fillvalue=''):
      if argument.startswith('--config=') or argument == '--config':
        path = (argument.removeprefix('--config=') if '=' in argument else following).split(':')[0]
        if not pathlib.Path(path).is_file():
          raise Mistake(f'--config: no file {path!r}; expected one such as configs/mixed.py')
    return flags.FLAGS(argv)
  except flags.Error as error:
    message = str(error)
  except SyntaxError as error:
    message = f'--config: {error.filename}, line {error.lineno}: {error.msg}'
  except (ImportError, AttributeError, KeyError, TypeError, ValueError, Mistake) as error:
    message = str(error.args[0] if error.args else error)
  # ml_collections puts the key and its suggestion on two lines.
  message = re.sub(r"^'?\\?'(\w+)\\?'(\\n|\n)(.*?)'?$", r'--config has no key \1. \3', message)
  _end(message, USAGE_ERROR)


def _end(message: str, code: int) -> NoReturn:
  line = ' '.join(message.replace('\\n', ' ').split())
  print(f'{pathlib.Path(sys.argv[0]).stem}: {line}', file=sys.stderr)
  sys.exit(code)


def run(main: Callable[[], None]) -> None:
  """Parses flags, runs `main`; a Mistake ends in one line on stderr and exit code 1 or 2."""

  def guarded(argv: list[str]) -> None:
    if len(argv) > 1:
      _end(f'got the argument {argv[1]!r}; expected only flags', USAGE_ERROR)
    logging.set_verbosity(logging.ERROR)
    try:
      main()
    except Mistake as mistake:
      _end(str(mistake), INPUT_ERROR)

  app.run(guarded, flags_parser=_parse)
