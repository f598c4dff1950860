"""The console script: it lists what there is, and each command is its module's."""

import importlib
import importlib.metadata
import pathlib
import re
import runpy
import subprocess
import sys

import pytest

import mimo
from mimo.experiments import commands

_ROOT = pathlib.Path(__file__).parents[2]


def _module(name):
  return importlib.import_module(f'mimo.experiments.{name.replace("-", "_")}')


def test_help_lists_every_command_with_what_it_does(capsys):
  assert commands.run(['--help']) == 0
  lines = [' '.join(line.split()) for line in capsys.readouterr().out.splitlines()]
  for name in commands.NAMES:
    assert f'{name} {_module(name).__doc__.splitlines()[0]}' in lines


def test_every_module_that_is_a_command_is_listed():
  modules = (_ROOT / 'mimo' / 'experiments').glob('*.py')
  found = {path.stem for path in modules if '\nCOMMAND = command.Command(' in path.read_text()}
  assert found == {name.replace('-', '_') for name in commands.NAMES}


@pytest.mark.parametrize('name', commands.NAMES)
def test_a_command_is_its_modules(name, capsys):
  """`mimo X` and `python -m mimo.experiments.X` run one object, whose help exits with 0."""
  command = _module(name).COMMAND
  assert command.name == name
  assert commands.run([name.replace('-', '_'), '--help']) == 0
  out = capsys.readouterr().out
  assert command.run(['-h']) == 0
  assert capsys.readouterr().out == out
  assert command.doc.splitlines()[0] in out
  # Each flag that a docstring names exists: `--config.KEY` is one of the configuration.
  named = {flag for flag in re.findall(r'--([a-z_]+)', command.doc)}
  assert named <= {*command.flags().names(), *['config'] * command.takes_config}


def test_a_command_that_is_not_there_is_one_line(capsys):
  assert commands.run(['trian', '--config=mixed']) == 2
  err = capsys.readouterr().err
  assert err.startswith("mimo: there is no command 'trian'; expected one of train, ")
  assert err.endswith("; did you mean 'train'?\n") and err.count('\n') == 1
  assert commands.run([]) == 2
  assert capsys.readouterr().err.startswith('mimo: no command is given; expected one of train, ')


def test_version_is_stated_once(capsys, monkeypatch):
  assert commands.run(['--version']) == 0
  assert capsys.readouterr().out == f'{mimo.__version__}\n'
  import setuptools

  stated = {}
  monkeypatch.setattr(setuptools, 'setup', lambda **given: stated.update(given))
  monkeypatch.chdir(_ROOT)
  runpy.run_path('setup.py')
  assert stated['version'] == mimo.__version__
  assert f'version: {mimo.__version__}\n' in (_ROOT / 'CITATION.cff').read_text()
  # What `pip` makes of it; and where the wheel has the files of configs/.
  (script,) = stated['entry_points']['console_scripts']
  assert script == f'mimo = {commands.main.__module__}:{commands.main.__name__}'
  carried = {name for name in stated['packages'] if name.startswith('mimo.configs')}
  folders = {'configs', *(f'configs/{p.name}' for p in (_ROOT / 'configs').iterdir() if p.is_dir())}
  where = stated['package_dir']['mimo.configs']
  assert {name.replace('mimo.configs', where).replace('.', '/') for name in carried} == {
    folder for folder in folders if '__pycache__' not in folder
  }


def test_the_installed_script_is_this_one():
  points = importlib.metadata.entry_points(group='console_scripts', name='mimo')
  if not points:
    pytest.skip('this mimo was installed before it had a script: pip install -e . again')
  (script,) = points
  assert script.load() is commands.main


def test_listing_commands_imports_nothing_large():
  script = (
    'import sys\n'
    'from mimo.experiments import commands\n'
    'commands.run(["--help"])\n'
    'print([name for name in ("jax", "numpy", "optax") if name in sys.modules], file=sys.stderr)\n'
  )
  done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, cwd=_ROOT)
  assert done.returncode == 0
  assert 'jax' not in done.stderr and 'optax' not in done.stderr
