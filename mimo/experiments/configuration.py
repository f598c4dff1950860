"""From --config and its overrides to a ConfigDict.

The experiments that come with mimo are named: `mixed` is configs/mixed.py, in a checkout and in an
installation. `mixed:grpo` also passes an argument to its get_config. Any other file goes by its
path.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import re
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_dict, config_flags

import mimo
from mimo import checks

_PACKAGE = pathlib.Path(mimo.__file__).parent
# In an installation setup.py has put the files of configs/ into the package.
DIRECTORY = next(
  (path for path in (_PACKAGE / 'configs', _PACKAGE.parent / 'configs') if path.is_dir()),
  _PACKAGE / 'configs',
)


class Misstated(ValueError):
  """A command line states an experiment that there is not: a mistake in the command itself."""


class UnknownKey(Misstated):
  """A configuration states a key that the schema does not have."""


@dataclasses.dataclass(frozen=True)
class Stated:
  """An experiment as the command line states it.

  Attributes:
    file: where its get_config is.
    config: what that returned, locked, with the overrides.
    overrides: the values stated on the command line, by dotted key.
  """

  file: pathlib.Path
  config: config_dict.ConfigDict
  overrides: Mapping[str, Any]


def names() -> list[str]:
  """Returns the experiments that come with mimo."""
  return sorted(
    path.relative_to(DIRECTORY).with_suffix('').as_posix() for path in DIRECTORY.rglob('*.py')
  )


def find(text: str) -> pathlib.Path:
  """Returns the file that a name or a path means. Raises ValueError naming the nearest name."""
  if text in names():
    return DIRECTORY / f'{text}.py'
  path = pathlib.Path(text)
  if path.is_file():
    return path
  near = checks.nearest(path.with_suffix('').name if path.suffix else text, names())
  raise ValueError(f'--config: there is no {text!r}; expected a file or one of {_listed()}{near}')


def read(text: str | None, argv: Sequence[str] = ()) -> Stated:
  """Reads an experiment and applies overrides.

  Args:
    text: NAME[:ARGUMENT] or FILE[:ARGUMENT].
    argv: `--config.KEY=VALUE` and the other forms that absl has for it.

  Raises:
    Misstated: there is no such file, it is in error, or an override does not fit; in one line.
  """
  values = flags.FlagValues()
  stated = define(values, text, argv)
  parse(values, argv)
  return stated()


def parse(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
  """Parses a command line and returns what of it is no flag.

  Raises:
    flags.UnrecognizedFlagError: there is no such flag.
    Misstated: any other mistake, in one line.
  """
  try:
    return values(['mimo', *argv])[1:]
  except flags.UnrecognizedFlagError:
    raise
  except flags.IllegalFlagValueError as error:
    match = re.match(r'flag --([^=]*)=(.*?): ', str(error), re.DOTALL)
    if match is None:
      raise Misstated(str(error)) from error
    expected = _EXPECTED[values[match[1]].flag_type()]
    raise Misstated(f'--{match[1]} is {match[2]!r}; expected {expected}') from error
  except flags.Error as error:
    raise Misstated(str(error)) from error


# By what absl calls the type of a flag.
_EXPECTED = {
  'bool': 'True or False',
  'float': 'a number',
  'int': 'a whole number',
  'string': 'a text',
}


def define(values: flags.FlagValues, text: str | None, argv: Sequence[str]) -> Callable[[], Stated]:
  """Defines a flag for each override that a command line states.

  Args:
    values: where they are defined.
    text: NAME[:ARGUMENT] or FILE[:ARGUMENT].
    argv: the command line, without --config itself.

  Returns:
    A function that returns the experiment, once `values` has parsed the command line.

  Raises:
    Misstated: there is no such file, it is in error, or there is no such key; in one line.
  """
  if not text:
    raise Misstated(f'--config is missing; expected a file or one of {_listed()}')
  name, colon, argument = text.partition(':')
  try:
    file = find(name)
    config = _load(file, *([argument] if colon else []))
    for key in filter(None, map(_overridden, argv)):
      _check_key(config, key)
  except ValueError as error:
    raise Misstated(str(error)) from error
  config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=['mimo', *argv])
  flag = values['config']
  return lambda: Stated(file, flag.value, config_flags.get_override_values(flag))


def split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
  """Takes --config out of a command line: returns (its value or None, the other arguments).

  >>> split(['--config=mixed', '--config.updates=3'])
  ('mixed', ['--config.updates=3'])
  """
  text, rest = None, []
  arguments = iter(argv)
  for argument in arguments:
    name, equals, value = argument.partition('=')
    if name not in ('--config', '-config'):
      rest.append(argument)
      continue
    text = value if equals else next(arguments, '')
  return text, rest


def _overridden(argument: str) -> str | None:
  """Returns the key that an argument overrides, or None."""
  match = re.match(r'--?(?:no)?config\.([^=]*)', argument)
  return match and match[1]


def _listed() -> str:
  return ', '.join(names())


def _load(file: pathlib.Path, *argument: str) -> config_dict.ConfigDict:
  try:
    made = runpy.run_path(str(file))['get_config'](*argument)
  except SyntaxError as error:
    raise ValueError(f'--config: {error.filename}, line {error.lineno}: {error.msg}') from error
  except ValueError as error:
    raise ValueError(f'--config: {file}: {error}') from error
  except Exception as error:  # a bug in the file: its line, in place of a traceback
    frames = traceback.extract_tb(error.__traceback__)
    where = [f'{file}, line {frame.lineno}' for frame in frames if frame.filename == str(file)]
    raise ValueError(
      f'--config: {(where or [str(file)])[-1]}: {type(error).__name__}: {error}'
    ) from error
  if not isinstance(made, config_dict.ConfigDict):
    raise ValueError(f'--config: get_config of {file} returns no ConfigDict')
  return made


def _check_key(config: config_dict.ConfigDict, key: str) -> None:
  """Raises ValueError where a dotted key names no value."""
  parts = key.split('.')
  node: Any = config
  for depth, part in enumerate(parts):
    if not isinstance(node, config_dict.ConfigDict) or part not in node:
      raise ValueError(_no_key(config, parts[:depth], part))
    node = node[part]
  if isinstance(node, config_dict.ConfigDict):
    inside = ', '.join(f'--config.{key}.{name}' for name in node)
    raise ValueError(f'--config.{key} is a section; expected one of its flags: {inside}')


def _no_key(config: config_dict.ConfigDict, section: Sequence[str], name: str) -> str:
  """Says that a key is missing, and which there are."""
  flag = '.'.join(['--config', *section])
  keys = list(_keys(config))
  beside = [key for key in keys if key.split('.')[:-1] == list(section)]
  # The nearest in the section, else anywhere.
  for among in (beside, keys):
    last = {key.split('.')[-1]: key for key in among}
    near = difflib.get_close_matches(name, last, n=1)
    if near:
      return f'{flag} has no key {name!r}; did you mean --config.{last[near[0]]}?'
  listed = ', '.join(key.split('.')[-1] for key in beside)
  return f'{flag} has no key {name!r}; expected {f"one of {listed}" if listed else "none"}'


def _keys(config: config_dict.ConfigDict, prefix: str = '') -> Iterator[str]:
  """Yields the dotted keys of sections and values."""
  for name in config:
    yield f'{prefix}{name}'
    if isinstance(config[name], config_dict.ConfigDict):
      yield from _keys(config[name], f'{prefix}{name}.')
