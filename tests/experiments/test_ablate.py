"""A grid: cells run once, killed ones go on, failed ones are named. Runs are played by a script."""

import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import time

import pytest

from mimo.experiments import ablate, base_policy, cli, results, schema
from mimo.experiments.workdir import take_lock
from mimo.telemetry import names

_ROOT = pathlib.Path(__file__).parents[2]
_STATED = runpy.run_path(str(_ROOT / 'configs' / 'ablation.py'))
_PASS_1 = names.of_eval('heldout', 'pass@1')

# Plays a run: notes that it began, and writes its metrics; arm mis fails, unless a file heals it.
_PLAYER = """
import json, pathlib, sys
stated = json.loads(pathlib.Path(sys.argv[1].removeprefix('--cell=')).read_text())
config, workdir = stated['config'], pathlib.Path(stated['workdir'])
workdir.mkdir(parents=True, exist_ok=True)
root = workdir.parents[1]
with open(root / 'began', 'a') as file:
  file.write(f"{config['arm']} {config['seed']}\\n")
if config['arm'] == 'mis' and not (root / 'healed').exists():
  sys.exit('the player breaks')
(workdir / 'store').mkdir(exist_ok=True)
last = config['updates'] - (1 if (root / 'short').exists() else 0)
records = [
  {'step': step, 'eval/heldout/pass@1': 0.5, 'eval/heldout/pass@1_error': 0.01, 'train/kl': 0.1}
  for step in (0, last)
]
(workdir / 'metrics.jsonl').write_text(''.join(json.dumps(record) + chr(10) for record in records))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
  monkeypatch.setattr(base_policy, 'make', lambda directory, on_step: directory / 'policy')
  monkeypatch.setattr(ablate, '_POLL_SECS', 0.01)

  def run(*arms, seeds=(0, 1), workdir='work', results='results', **overrides):
    return ablate.ablate(
      _STATED['get_config'],
      ([f'mixed/{arm}/usual' for arm in arms], seeds),
      overrides=overrides,
      workdir=tmp_path / workdir,
      results=tmp_path / results,
      workers=0,
      command=(sys.executable, '-c', _PLAYER),
    )

  return run


def _began(path):
  return sorted((path / 'began').read_text().split('\n'))[1:] if (path / 'began').exists() else []


def test_a_finished_cell_is_never_run_again(run, tmp_path, capsys):
  report = run('grpo', 'sc')
  assert report == tmp_path / 'work' / 'report.html' and report.exists()
  assert _began(tmp_path / 'work') == ['grpo 0', 'grpo 1', 'sc 0', 'sc 1']
  out = capsys.readouterr().out
  assert '4 of 4 cells are finished' in out
  assert re.search(r'mixed/sc/usual/1 +finished +120/120 +0\.500 +0\.500', out)
  # What is large and of no use any more is gone; what was measured stays.
  directories = list((tmp_path / 'work' / 'cells').iterdir())
  assert len(directories) == 4
  assert all({p.name for p in d.iterdir()} == {'metrics.jsonl'} for d in directories)
  run('grpo', 'sc')
  # Committed results do: another work directory has nothing to run, and needs no base policy.
  run('grpo', 'sc', workdir='other')
  assert len(_began(tmp_path / 'work')) == 4 and not _began(tmp_path / 'other')
  assert (tmp_path / 'other' / 'report.html').exists()
  # One seed more is one cell more by arm; another learning rate is another study.
  run('grpo', seeds=(0, 1, 2))
  assert len(_began(tmp_path / 'work')) == 5
  run('grpo', seeds=(0,), **{'trainer.learning_rate': 0.5})
  assert len(_began(tmp_path / 'work')) == 6
  assert len(list((tmp_path / 'results').glob('*.csv'))) == 3


def test_results_of_an_earlier_revision_are_drawn_and_gain_none(run, tmp_path, monkeypatch, capsys):
  run('grpo', seeds=(0,))
  (tmp_path / 'work' / 'began').unlink()
  monkeypatch.setattr(results, 'REVISION', 3)
  monkeypatch.setattr(ablate, 'REVISION', 3)
  assert run('grpo', 'sc', seeds=(0, 1), workdir='other').exists()
  assert f'{tmp_path / "results"} keeps 1 of 4 cells, of revision 2, and gains none' in (
    capsys.readouterr().out
  )
  with pytest.raises(cli.Mistake, match=r'keeps cells of revision 2, and mixed/sc/usual/0 is none'):
    run('sc', seeds=(0,), workdir='other')
  assert not _began(tmp_path / 'work') and not _began(tmp_path / 'other')


def test_a_failed_cell_is_named_and_tried_again(run, tmp_path):
  with pytest.raises(cli.Mistake, match=r'1 of 2 cells failed, such as mixed/mis/usual/0; .*\.txt'):
    run('grpo', 'mis', seeds=(0,))
  assert 'the player breaks' in next((tmp_path / 'work' / 'logs').glob('*-mis-*')).read_text()
  (tmp_path / 'work' / 'healed').touch()
  run('grpo', 'mis', seeds=(0,))
  assert _began(tmp_path / 'work') == ['grpo 0', 'mis 0', 'mis 0']


def test_a_run_that_left_early_is_no_result(run, tmp_path):
  (tmp_path / 'work').mkdir()
  (tmp_path / 'work' / 'short').touch()
  with pytest.raises(cli.Mistake, match='1 of 1 cells failed'):
    run('grpo', seeds=(0,))
  assert not (tmp_path / 'results').exists()


def test_a_work_directory_is_used_by_one_at_a_time(run, tmp_path):
  (tmp_path / 'work').mkdir()
  lock = take_lock(tmp_path / 'work')
  with pytest.raises(cli.Mistake, match='in use'):
    run('grpo')
  lock.close()


def test_what_cannot_be_meant_is_refused_before_anything_runs(run, tmp_path):
  with pytest.raises(cli.Mistake, match='learning_rate'):
    run('grpo', **{'trainer.learning_rate': -1.0})
  assert not (tmp_path / 'work').exists()


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_grid_lets_its_cells_save(tmp_path, number):
  """SIGTERM, and Ctrl-C, which goes to a process group, reach the command and through it the runs.

  They have a core each, and are signalled once: a second signal would end them unsaved.
  """
  script = (
    'import os, pathlib, signal, sys, time\n'
    'out = pathlib.Path(sys.argv[1].removeprefix("--cell=")).with_suffix(".out")\n'
    'def say(word):\n'
    '  out.write_text(f"{out.read_text()} {word}")\n'
    'signal.signal(signal.SIGTERM, lambda *_: (say("saved"), os._exit(0)))\n'
    'signal.signal(signal.SIGINT, lambda *_: say("interrupted"))\n'
    'out.write_text(str(len(os.sched_getaffinity(0))))\n'
    'time.sleep(600)\n'
  )
  driver = (
    'import pathlib, runpy, signal, sys\n'
    'from mimo.experiments import ablate, base_policy\n'
    'base_policy.make = lambda directory, on_step: directory\n'
    'signal.signal(signal.SIGTERM, signal.default_int_handler)\n'
    f'stated = runpy.run_path({str(_ROOT / "configs" / "ablation.py")!r})\n'
    f'work = pathlib.Path({str(tmp_path / "work")!r})\n'
    'ablate.ablate(stated["get_config"], (["mixed/grpo/usual"], (0,)), overrides={},\n'
    f'  workdir=work, results=work / "r", workers=1, command=(sys.executable, "-c", {script!r}))\n'
  )
  process = subprocess.Popen(
    [sys.executable, '-c', driver], cwd=_ROOT, stderr=subprocess.PIPE, start_new_session=True
  )
  outs, end = [], time.monotonic() + 600
  while not outs and time.monotonic() < end:
    outs = [p for p in (tmp_path / 'work' / 'configs').glob('*.out') if p.read_text()]
    time.sleep(0.05)
  assert outs and outs[0].read_text() == '1'
  (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
  process.communicate(timeout=600)
  assert outs[0].read_text() == '1 saved'


def test_the_command_names_its_mistakes(tmp_path, run_command):
  def say(*flags):
    done = run_command(ablate.COMMAND, *flags, f'--workdir={tmp_path}')
    assert done.returncode and done.stderr.count('\n') == 1
    return done.stderr

  assert "did you mean 'quick'" in say('--config=ablation', '--grid=quik')
  assert 'no GRIDS' in say('--config=mixed')


def test_jobs_come_seed_by_seed():
  listed = ablate.jobs(_STATED['get_config'], (['mixed/grpo/usual', 'mixed/sc/usual'], (4, 5)), {})
  assert [str(job.cell) for job in listed] == [
    'mixed/grpo/usual/4',
    'mixed/sc/usual/4',
    'mixed/grpo/usual/5',
    'mixed/sc/usual/5',
  ]
  assert json.dumps(schema.plain(listed[0].experiment))
