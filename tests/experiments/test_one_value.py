"""A value's way: from its flag to the one place that uses it, through few files."""

import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]

# Runs the command until optax is given the value, and prints the files of mimo that the value has
# passed: those of functions that wait for what they gave it to, and those that returned it.
_FOLLOWED = """
import dataclasses, json, pathlib, runpy, sys
from collections.abc import Mapping
from ml_collections import config_dict

value, root = float(sys.argv[1]), pathlib.Path(sys.argv[2])
sys.argv = sys.argv[2:]
passed = set()

def holds(x):
  if isinstance(x, float):
    return x == value
  if isinstance(x, config_dict.ConfigDict):
    return holds(x.to_dict())
  if isinstance(x, Mapping):
    return any(map(holds, x.values()))
  if isinstance(x, tuple | list):
    return any(map(holds, x))
  if dataclasses.is_dataclass(x) and not isinstance(x, type):
    return any(holds(getattr(x, f.name, None)) for f in dataclasses.fields(x))
  return type(x).__name__ == 'Trainer' and holds(vars(x).get('spec'))

def name(frame):
  file = pathlib.Path(frame.f_code.co_filename)
  return str(file.relative_to(root)) if file.is_relative_to(root / 'mimo') else ''

def follow(frame, event, result):
  if event == 'return' and name(frame) and holds(result):
    passed.add(name(frame))

def reached(*, b1, **rest):
  sys.setprofile(None)
  assert b1 == value, b1
  frame = sys._getframe(1)
  while frame is not None:
    if name(frame) and any(map(holds, frame.f_locals.values())):
      passed.add(name(frame))
    frame = frame.f_back
  print(json.dumps(sorted(passed)))
  sys.stdout.flush()
  os._exit(0)

import os
import optax
optax.scale_by_adam = reached
sys.setprofile(follow)
runpy.run_module('mimo.experiments.train', run_name='__main__', alter_sys=True)
"""


def test_b1_passes_six_files_from_its_flag_to_optax(tmp_path) -> None:
  flags = ['--config=configs/mixed.py', '--config.trainer.b1=0.8642', f'--workdir={tmp_path}/run']
  done = subprocess.run(
    [sys.executable, '-c', _FOLLOWED, '0.8642', str(_ROOT), *flags],
    capture_output=True,
    text=True,
    cwd=_ROOT,
    env={**os.environ, 'PYTHONPATH': str(_ROOT)},
  )
  assert done.returncode == 0, done.stderr
  passed = json.loads(done.stdout)
  assert {'mimo/experiments/schema.py', 'mimo/trainer/state.py'} <= {*passed}
  assert len(passed) <= 6, passed
