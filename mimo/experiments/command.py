"""A command of `mimo`: its flags, the help that lists them, and how it is run.

`mimo NAME` and `python -m mimo.experiments.NAME` both end in `run`, which never exits by itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Sequence

import jax

from mimo.experiments import cli, configuration, schema
from mimo.telemetry import console

_CONFIG = '  --config=NAME[:ARGUMENT]  the experiment: its name, or a file\n'


@dataclasses.dataclass(frozen=True)
class Command:
  """A command of `mimo`.

  Attributes:
    name: as it is typed, after `mimo`.
    doc: what it does; help shows it whole.
    define_flags: adds its flags.
    main: does it. Returns the exit code, None for 0. Raises cli.Mistake.
    takes_config: it has --config, overrides of it, and --print_config.
    check: does what of `main` needs no device and writes nothing, for --dry_run; returns a line.
  """

  name: str
  doc: str
  define_flags: Callable[[cli.Flags], None]
  main: Callable[[cli.Given], int | None]
  takes_config: bool = False
  check: Callable[[cli.Given], str] | None = None

  def flags(self) -> cli.Flags:
    """Returns its flags."""
    flags = cli.Flags()
    self.define_flags(flags)
    if self.takes_config:
      flags.switch('print_config', 'print the resolved configuration, and stop')
    if self.check is not None:
      flags.switch('dry_run', 'check what needs no device, write nothing, and stop')
    flags.switch('help', 'print this, and stop', short_name='h')
    return flags

  def help(self) -> str:
    """Returns what the command does, its flags, and the keys of a configuration."""
    shown = f'{inspect.cleandoc(self.doc)}\n\nflags:\n{_CONFIG if self.takes_config else ""}'
    shown += self.flags().help()
    if not self.takes_config:
      return shown
    keys = '\n'.join(map(_key_help, schema.leaves()))
    return f'{shown}\n\nkeys of the configuration, with their defaults:\n{keys}'

  def start(self) -> int:
    """Runs the command in a process of its own and returns the exit code."""
    cli.prepare_process()
    return self.run(sys.argv[1:])

  def run(self, argv: Sequence[str]) -> int:
    """Runs the command and returns its exit code.

    A Mistake and Ctrl-C end in one line on standard error. Other exceptions pass, with their
    traceback.
    """
    with cli.ending(f'mimo {self.name}') as end:
      end.code = self._run(argv)
    return end.code

  def _run(self, argv: Sequence[str]) -> int:
    if not {'--help', '-help', '-h'}.isdisjoint(argv):
      console.say(self.help())
      return 0
    given = self.flags().parse(argv, takes_config=self.takes_config)
    if self.takes_config and given.print_config:
      console.say(json.dumps(schema.plain(stated(given)[1]), indent=2))
      return 0
    if self.check is not None and given.dry_run:
      jax.config.update('jax_platforms', 'cpu')  # for what reads checkpoints; no device is touched
      console.say(self.check(given))
      return 0
    return self.main(given) or 0


def stated(given: cli.Given) -> tuple[configuration.Stated, schema.Experiment]:
  """Returns the experiment that --config and its overrides state, checked. Raises cli.Mistake."""
  with cli.mistakes():
    found = given.stated()
    return found, schema.parse(found.config)


def _key_help(leaf: schema.Leaf) -> str:
  """Returns a key as a flag with its type and default, and below it what its section says of it."""
  default = 'required' if leaf.required else repr(leaf.default)
  said = textwrap.fill(leaf.doc, 96, initial_indent=' ' * 6, subsequent_indent=' ' * 6)
  return f'  --config.{leaf.name}  ({leaf.type}, {default})\n{said}'
