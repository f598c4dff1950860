"""Mistakes on the command line: one line on stderr, exit code 1 or 2, nothing started."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]

# A command as small as any: it prints what it parsed.
_COMMAND = """
from absl import flags
from mimo.experiments import cli

def main():
  with cli.mistakes():
    config = cli.config_value()
    if config.seed < 0:
      raise ValueError(f'seed is {config.seed};\\nexpected a number >= 0')
  print(config.pools.h100_fp8.format, config.updates, config.rollouts.max_staleness_updates)

cli.define_config(None)
cli.run(main)
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-c', _COMMAND, *arguments], capture_output=True, text=True, cwd=_ROOT
  )


def test_overrides_reach_the_config() -> None:
  done = _run(
    '--config=configs/mixed.py:grpo',
    '--config.pools.h100_fp8.format=nvfp4_w4a16',
    '--config.updates=3',
    '--config.rollouts.max_staleness_updates=4',
  )
  assert (done.stdout, done.stderr, done.returncode) == ('nvfp4_w4a16 3 4\n', '', 0)


@pytest.mark.parametrize(
  ('arguments', 'code', 'words'),
  [
    (['--config=configs/mixed.py', '--config.updatse=3'], 2, ['updatse', '"updates"']),
    (
      ['--config=configs/mixed.py', '--config.pools.h100_fp8.fromat=bf16'],
      2,
      ['fromat', '"format"'],
    ),
    (['--config=configs/mixed.py', '--config.pols.h100_fp8.format=bf16'], 2, ['pols', '"pools"']),
    (['--config=configs/mixed.py', '--config.updates=many'], 2, ['config.updates', "'many'"]),
    (['--config=configs/mixde.py'], 2, ['configs/mixde.py', 'configs/mixed.py']),
    (['--config=configs/mixed.py', '--cnofig=3'], 2, ['cnofig', 'config']),
    (['--config=configs/mixed.py', 'stray'], 2, ['stray']),
    (['--config', 'configs/mixde.py'], 2, ['configs/mixde.py', 'configs/mixed.py']),
    (['--config=tests/experiments/broken_config.py'], 2, ['broken_config.py, line 3']),
    ([], 1, ['--config', 'configs/mixed.py']),
    (['--config=configs/mixed.py', '--config.seed=-1'], 1, ['seed is -1; expected']),
  ],
)
def test_a_mistake_is_one_line(arguments: list[str], code: int, words: list[str]) -> None:
  done = _run(*arguments)
  assert done.returncode == code, done.stderr
  assert done.stdout == ''
  assert done.stderr.count('\n') == 1, done.stderr
  for word in words:
    assert word in done.stderr
