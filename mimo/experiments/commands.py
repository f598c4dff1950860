"""The console script `mimo`: which commands there are.

A command's module is imported when the command runs, so that listing them takes no time.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Sequence

import mimo
from mimo import checks
from mimo.experiments import cli
from mimo.telemetry import console

# Each is the module of that name beside this file; `-` stands for `_`.
NAMES = (
  'train',
  'evaluate',
  'report',
  'export',
  'import-hf',
  'import-gguf',
  'plan',
  'ablate',
  'pretrain',
  'base-policy',
  'check-vllm',
)


def main() -> int:
  """Runs `mimo NAME ...` in a process of its own and returns the exit code."""
  cli.prepare_process()
  return run(sys.argv[1:])


def run(argv: Sequence[str]) -> int:
  """Runs `mimo` with these arguments and returns its exit code."""
  name, *arguments = argv or ['']
  with cli.ending('mimo') as end:
    if name in ('--help', '-h'):
      console.say(usage())
    elif name == '--version':
      console.say(mimo.__version__)
    else:
      return importlib.import_module(_module(name)).COMMAND.run(arguments)
  return end.code


def usage() -> str:
  """Returns the list of commands, each with what it does."""
  width = max(map(len, NAMES))
  lines = [f'  {name:{width}}  {_first_line(_module(name))}' for name in NAMES]
  return '\n'.join(
    [
      'usage: mimo COMMAND [--FLAG=VALUE ...]',
      '       mimo --help | --version',
      '',
      mimo.__doc__ or '',
      '',
      *lines,
      '',
      'mimo COMMAND --help lists the flags of a command.',
    ]
  )


def _module(name: str) -> str:
  """Returns the module of a command. Raises Usage naming the nearest command."""
  known = name.replace('_', '-')
  if known not in NAMES:
    said = f'there is no command {name!r}' if name else 'no command is given'
    raise cli.Usage(f'{said}; expected one of {", ".join(NAMES)}{checks.nearest(name, NAMES)}')
  return f'mimo.experiments.{known.replace("-", "_")}'


def _first_line(module: str) -> str:
  """Returns the first line of a module's docstring, without importing it."""
  found = importlib.util.find_spec(module)
  assert found is not None and found.origin is not None, f'{module} is part of mimo'
  tree = ast.parse(pathlib.Path(found.origin).read_text(encoding='utf-8'))
  return (ast.get_docstring(tree) or '').split('\n')[0]
