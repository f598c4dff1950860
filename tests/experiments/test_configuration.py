"""From --config to a ConfigDict. The messages of mistakes are in test_cli.py."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from mimo.experiments import configuration

_FILE = """
from ml_collections import config_dict

def get_config(kind='plain'):
  if kind == 'broken':
    return {}['missing']
  if kind == 'refused':
    raise ValueError('kind is refused')
  if kind == 'other':
    return 3
  return config_dict.ConfigDict({
    'kind': kind,
    'rate': 0.5,
    'count': 1,
    'deep': {'on': False, 'bound': config_dict.placeholder(int)},
  })
"""


@pytest.fixture
def file(tmp_path):
  path = tmp_path / 'mine.py'
  path.write_text(_FILE)
  return path


def test_every_experiment_has_a_name_and_a_path():
  named = configuration.names()
  assert 'mixed' in named and 'qwen3_6_35b_a3b/mixed' in named
  for name in named:
    by_name, by_path = (
      configuration.read(text, []) for text in (name, f'{configuration.DIRECTORY}/{name}.py')
    )
    assert by_name.config.to_json() == by_path.config.to_json()
    assert by_name.file == by_path.file == configuration.DIRECTORY / f'{name}.py'


def test_a_name_takes_an_argument():
  assert configuration.read('mixed:grpo', []).config.arm == 'grpo'
  cell = configuration.read('ablation:homogeneous/grpo/near16', [])
  assert list(cell.config.pools) == ['b200_bf16']


def test_overrides_are_read_by_type(file):
  texts = {
    'kind': 'None',
    'rate': '1',
    'count': '-2',
    'deep.on': 'true',
    'deep.bound': '4',
  }
  argv = [f'--config.{key}={text}' for key, text in texts.items()]
  stated = configuration.read(f'{file}:given', argv)
  expected = {'kind': 'None', 'rate': 1.0, 'count': -2, 'deep.on': True, 'deep.bound': 4}
  assert stated.overrides == expected
  assert stated.config.to_dict() == {
    'kind': 'None',
    'rate': 1.0,
    'count': -2,
    'deep': {'on': True, 'bound': 4},
  }
  assert isinstance(stated.config.rate, float)
  with pytest.raises(AttributeError):
    stated.config.typo = 1


def test_the_last_of_equal_overrides_counts(file):
  assert (
    configuration.read(str(file), ['--config.count=2', '--config.count', '3']).config.count == 3
  )


def test_an_installation_carries_the_experiments(tmp_path):
  """The layout that setup.py gives a wheel, in a directory that holds nothing else."""
  package = configuration.DIRECTORY.parent / 'mimo'
  shutil.copytree(package, tmp_path / 'site' / 'mimo')
  shutil.copytree(configuration.DIRECTORY, tmp_path / 'site' / 'mimo' / 'configs')
  (tmp_path / 'site' / 'configs').mkdir()  # of some other package
  (tmp_path / 'empty').mkdir()
  done = subprocess.run(
    [sys.executable, '-m', 'mimo.experiments.train', '--config=mixed:grpo', '--print_config'],
    capture_output=True,
    text=True,
    cwd=tmp_path / 'empty',
    env=os.environ | {'PYTHONPATH': str(tmp_path / 'site')},
  )
  assert (done.returncode, done.stderr) == (0, '')
  assert json.loads(done.stdout)['arm'] == 'grpo'
  assert not list((tmp_path / 'empty').iterdir())


@pytest.mark.parametrize(
  ('argument', 'words'),
  [
    ('broken', r"--config: .*mine.py, line 6: KeyError: 'missing'$"),
    ('refused', r'--config: .*mine.py: kind is refused$'),
    ('other', 'returns no ConfigDict'),
  ],
)
def test_a_file_in_error_is_named(file, argument, words):
  with pytest.raises(ValueError, match=words):
    configuration.read(f'{file}:{argument}', [])


def test_a_file_that_is_not_python_is_named(tmp_path):
  (tmp_path / 'broken.py').write_text('def get_config():\n  return (\n')
  with pytest.raises(ValueError, match=r"broken.py, line 2: '\(' was never closed$"):
    configuration.read(str(tmp_path / 'broken.py'), [])


def test_absl_s_other_forms_are_understood(file):
  stated = configuration.read(f'{file}:given', ['-config.count', '4', '--config.deep.on'])
  assert stated.overrides == {'count': 4, 'deep.on': True}
  assert configuration.read(f'{file}:given', ['--noconfig.deep.on']).overrides == {'deep.on': False}


def test_config_is_taken_out_of_a_command_line():
  argv = ['--a=1', '--config.x.y=2', '--config=z', '--config.w', '-3', 'b']
  rest = ['--a=1', '--config.x.y=2', '--config.w', '-3', 'b']
  assert configuration.split(argv) == ('z', rest)
  assert configuration.split(['-config', 'z']) == ('z', [])
  assert configuration.split(['--workdir=x']) == (None, ['--workdir=x'])
