"""Nobody reads what a run prints, or nothing can show it: it trains, saves and exits with 0."""

import json
import os
import pathlib
import subprocess
import sys

from mimo.telemetry import writers

_ROOT = pathlib.Path(__file__).parents[2]

_FILE = """
import json
from ml_collections import config_dict

def get_config():
  return config_dict.ConfigDict(json.loads({text!r}))
"""


def _shell(script: str, name: str, *flags: str) -> str:
  """Runs a command as "$@" of a shell script; returns what it printed. It ends well and quietly."""
  command = [sys.executable, '-m', f'mimo.experiments.{name}', *flags]
  done = subprocess.run(
    ['bash', '-c', f'{script}; exit ${{PIPESTATUS[0]}}', 'bash', *command],
    capture_output=True,
    cwd=_ROOT,
    env=os.environ | {'LC_ALL': 'C', 'PYTHONUTF8': '0'},  # standard output is ASCII
  )
  assert (done.returncode, done.stderr) == (0, b'')
  return done.stdout.decode('ascii')


def test_a_run_that_nobody_reads_goes_on(tiny_config, tmp_path) -> None:
  config, work = tmp_path / 'tiny.py', tmp_path / 'work'
  config.write_text(_FILE.format(text=json.dumps(tiny_config.to_dict())))
  train = (f'--config={config}', f'--workdir={work}')
  # The reader leaves after the first line, whose plus-minus signs ASCII does not have.
  printed = _shell('"$@" | head -1', 'train', *train, '--config.updates=2')
  assert printed.startswith('evaluation of update 0  heldout: pass@1 0.')
  assert ' ? 0.' in printed and printed.count('\n') == 1
  assert _updates(work) == [1, 2] and (work / 'checkpoints' / '2').is_dir()
  assert (work / 'report.html').is_file()
  # It goes on from there with a standard output that is closed.
  assert _shell('"$@" >&-', 'train', *train, '--config.updates=3') == ''
  assert _updates(work) == [1, 2, 3] and (work / 'checkpoints' / '3').is_dir()
  # And what it made is evaluated: the file has everything, the line what can be shown.
  out = tmp_path / 'rewards.json'
  flags = (f'--checkpoint={work}', '--samples=1', f'--out={out}')
  printed = _shell('"$@"', 'evaluate', '--config=mixed', *flags)
  assert printed.startswith(f'evaluation of {work}  heldout: pass@1 0.') and ' ? 0.' in printed
  assert json.loads(out.read_text())['complete']


def _updates(work: pathlib.Path) -> list[int]:
  records = writers.read(work / 'metrics.jsonl')
  return [record['step'] for record in records if 'rollout/reward' in record]
