"""From --config and its overrides to a ConfigDict.

The experiments that come with mimo are named: `mixed` is configs/mixed.py, in a checkout and in an
installation. `mixed:grpo` also passes an argument to its get_config. Any other file goes by its
path.
"""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import runpy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ml_collections import config_dict

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


def read(text: str | None, overrides: Sequence[tuple[str, str]]) -> Stated:
  """Reads an experiment and applies overrides.

  Args:
    text: NAME[:ARGUMENT] or FILE[:ARGUMENT].
    overrides: (dotted key, text of its value).

  Raises:
    Misstated: there is no such file, it is in error, or an override does not fit; in one line.
  """
  if not text:
    raise Misstated(f'--config is missing; expected a file or one of {_listed()}')
  name, colon, argument = text.partition(':')
  try:
    file = find(name)
    config = _load(file, *([argument] if colon else []))
    applied = {key: _override(config, key, value) for key, value in overrides}
  except ValueError as error:
    raise Misstated(str(error)) from error
  return Stated(file, config.lock(), applied)


def split_overrides(argv: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
  """Takes `--config.KEY=VALUE` and `--config.KEY VALUE` out of a command line.

  Returns:
    ((key, value) of each, the other arguments). Raises Misstated where a value is missing.
  """
  overrides, rest = [], []
  arguments = iter(argv)
  for argument in arguments:
    if not argument.startswith('--config.'):
      rest.append(argument)
      continue
    flag, equals, value = argument.partition('=')
    if not equals:
      value = next(arguments, '')
      if not value or value.startswith('--'):
        raise Misstated(f'{flag} has no value; expected {flag}=VALUE')
    overrides.append((flag.removeprefix('--config.'), value))
  return overrides, rest


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


def _override(config: config_dict.ConfigDict, key: str, text: str) -> Any:
  """Sets a value from its text, and returns it. Raises ValueError naming the flag."""
  parts = key.split('.')
  node: Any = config
  for depth, part in enumerate(parts):
    if not isinstance(node, config_dict.ConfigDict) or part not in node:
      raise ValueError(_no_key(config, parts[:depth], part))
    holder, node = node, node[part]
  kind = holder.get_type(part)
  if issubclass(kind, config_dict.ConfigDict):
    inside = ', '.join(f'--config.{key}.{name}' for name in node)
    raise ValueError(f'--config.{key} is a section; expected one of its flags: {inside}')
  holder[part] = value(f'--config.{key}', kind, text)
  return holder[part]


def value(flag: str, kind: type, text: str) -> Any:
  """Returns the value that a text states. Raises ValueError naming the flag.

  >>> value('--samples', int, '8')
  8
  >>> value('--samples', int, 'many')
  Traceback (most recent call last):
    ...
  ValueError: --samples is 'many'; expected a whole number
  """
  expected, parse = _KINDS[kind]
  try:
    return parse(text)
  except (ValueError, KeyError):
    raise ValueError(f'{flag} is {text!r}; expected {expected}') from None


# The type of a value -> what is expected, and what reads it.
_KINDS: Mapping[type, tuple[str, Callable[[str], Any]]] = {
  bool: ('True or False', lambda text: {'true': True, 'false': False}[text.lower()]),
  int: ('a whole number', int),
  float: ('a number', float),
  str: ('a text', str),
}


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
