"""A command: its flags, mistakes in one line with an exit code, help, and what Ctrl-C leaves."""

import json
import pathlib
import signal
import subprocess
import sys

import pytest

from mimo.experiments import cli, command, schema
from mimo.telemetry import console


def _define(flags: cli.Flags) -> None:
  flags.flag('samples', int, 8, 'per task, 50% of them')
  flags.flag('out', str, None, 'a JSON file', 'FILE')


def _main(given: cli.Given) -> int | None:
  config = command.stated(given)[0].config
  if given.out == 'interrupt':
    raise KeyboardInterrupt
  if given.out == 'bug':
    raise ValueError('a bug')
  with cli.mistakes():
    if given.out:
      pathlib.Path(given.out).read_text()
  console.say(f'{config.pools.h100_fp8.format} {config.updates} {given.samples}')
  return 3 if given.samples == 3 else None


_COMMAND = command.Command(
  'show',
  """Shows a value.

  And no more.
  """,
  _define,
  _main,
  takes_config=True,
  check=lambda given: f'{given.samples} samples would do',
)


def test_flags_and_overrides_reach_the_command(capsys):
  argv = ['--config=mixed:grpo', '--config.pools.h100_fp8.format=bf16', '--config.updates', '3']
  assert _COMMAND.run([*argv, '--samples=2']) == 0
  assert capsys.readouterr() == ('bf16 3 2\n', '')
  assert _COMMAND.run(['--config=mixed', '--samples=3']) == 3


_MISSING = 'expected a file or one of ablation, homogeneous, mixed, mixed_vllm, mixed_vllm_gpu, '
_MISSING += 'qwen3_6_35b_a3b/homogeneous, qwen3_6_35b_a3b/mixed, smollm2'


@pytest.mark.parametrize(
  ('argv', 'code', 'said'),
  [
    (['--config.ram=1'], 2, "--config has no key 'ram'; did you mean --config.arm?"),
    (['--config.updatse=3'], 2, "--config has no key 'updatse'; did you mean --config.updates?"),
    (
      ['--config.pools.h100_fp8.fromat=bf16'],
      2,
      "--config.pools.h100_fp8 has no key 'fromat'; did you mean --config.pools.h100_fp8.format?",
    ),
    (
      ['--config.pools.2b00_nvfp4.x=1'],
      2,
      "--config.pools has no key '2b00_nvfp4'; did you mean --config.pools.b200_nvfp4?",
    ),
    (
      ['--config.learning_rate=1'],
      2,
      "--config has no key 'learning_rate'; did you mean --config.trainer.learning_rate?",
    ),
    (
      ['--config.evaluation.zzz=1'],
      2,
      "--config.evaluation has no key 'zzz'; expected one of every_updates, samples",
    ),
    (['--config.seed.x=1'], 2, "--config.seed has no key 'x'; expected none"),
    (
      ['--config.evaluation=1'],
      2,
      '--config.evaluation is a section; expected one of its flags: '
      '--config.evaluation.every_updates, --config.evaluation.samples',
    ),
    (['--config.updates=many'], 2, "--config.updates is 'many'; expected a whole number"),
    (['--config.trainer.b2=x'], 2, "--config.trainer.b2 is 'x'; expected a number"),
    (['--config.trainer.remat=2'], 2, "--config.trainer.remat is '2'; expected True or False"),
    (['--config.updates'], 2, 'Missing value for flag --config.updates'),
    (['--samples=x'], 2, "--samples is 'x'; expected a whole number"),
    (['--samples'], 2, 'Missing value for flag --samples'),
    (['--smaples=3'], 2, "there is no flag --smaples; did you mean 'samples'?"),
    (['stray'], 2, "got the argument 'stray'; expected only flags"),
    (['--config.seed=-1'], 1, 'seed is -1; expected a whole number >= 0 and <= 4294967295'),
    (
      ['--out=/nowhere/x'],
      1,
      '/nowhere/x: No such file or directory; expected a path that can be read, and written to',
    ),
    (['--out=interrupt'], 130, 'interrupted'),
    (['--config=mixde'], 2, f"--config: there is no 'mixde'; {_MISSING}; did you mean 'mixed'?"),
    (
      ['--config', 'configs/mixde.py'],
      2,
      f"--config: there is no 'configs/mixde.py'; {_MISSING}; did you mean 'mixed'?",
    ),
    (['--config='], 2, f'--config is missing; {_MISSING}'),
  ],
)
def test_a_mistake_is_one_line(argv, code, said, capsys):
  assert _COMMAND.run(['--config=mixed', *argv]) == code
  assert capsys.readouterr() == ('', f'mimo show: {said}\n')


def test_a_bug_keeps_its_traceback():
  with pytest.raises(ValueError, match='a bug'):
    _COMMAND.run(['--config=mixed', '--out=bug'])


@pytest.mark.parametrize('flag', ['--help', '-h'])
def test_help_says_what_it_does_and_lists_flags(flag, capsys):
  assert _COMMAND.run(['--config=nothing', flag]) == 0
  out, err = capsys.readouterr()
  assert err == ''
  lines = [' '.join(line.split()) for line in out.splitlines()]
  assert 'Shows a value.' in lines and 'And no more.' in lines
  for line in (
    '--samples=N per task, 50% of them (default 8)',
    '--out=FILE a JSON file',
    '--print_config print the resolved configuration, and stop',
    '--dry_run check what needs no device, write nothing, and stop',
    '--help, -h print this, and stop',
  ):
    assert line in lines
  assert any(line.startswith('--config=NAME[:ARGUMENT]') for line in lines)
  # Each key of a configuration: name, type, default and, in the next line, what it says of itself.
  for leaf in schema.leaves():
    key = (
      f'--config.{leaf.name} ({leaf.type}, {"required" if leaf.required else repr(leaf.default)})'
    )
    assert leaf.doc.startswith(lines[lines.index(key) + 1])
  assert lines[lines.index('--config.trainer.b1 (float, 0.9)') + 1].startswith('decay of AdamW')


def test_print_config_prints_what_would_run(capsys):
  argv = ['--config=mixed:mis', '--config.updates=7', '--print_config', '--out=bug']
  assert _COMMAND.run(argv) == 0
  printed = json.loads(capsys.readouterr().out)
  assert (printed['arm'], printed['updates'], printed['trainer']['b2']) == ('mis', 7, 0.98)


def test_print_config_states_what_a_file_leaves_out(capsys, tmp_path):
  config = tmp_path / 'short.py'
  config.write_text(
    'from mimo.experiments import configuration\n'
    'def get_config():\n'
    '  config = configuration.read("mixed", []).config.unlock()\n'
    '  del config.trainer.b1\n'
    '  return config\n'
  )
  assert _COMMAND.run([f'--config={config}', '--print_config']) == 0
  assert json.loads(capsys.readouterr().out)['trainer']['b1'] == 0.9


def test_dry_run_checks_alone(capsys):
  assert _COMMAND.run(['--config=mixed', '--dry_run', '--out=bug']) == 0
  assert capsys.readouterr().out == '8 samples would do\n'


def test_ctrl_c_is_one_line_and_130():
  """A real signal to a real process, while it waits."""
  script = (
    'import sys, time\n'
    'from mimo.experiments import command\n'
    'def main(given):\n'
    '  print("ready", flush=True)\n'
    '  time.sleep(600)\n'
    'sys.exit(command.Command("wait", "Waits.", lambda flags: None, main).start())\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )
  assert process.stdout is not None and process.stdout.readline() == 'ready\n'
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=60)
  assert (process.returncode, err) == (130, 'mimo wait: interrupted\n')
