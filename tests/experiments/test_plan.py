"""The memory plan: a command, its tables, and what it refuses."""

import pathlib
import subprocess
import sys

import pytest

from mimo.experiments import plan

_ROOT = pathlib.Path(__file__).parents[2]
_TEXT = """
ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %p = f32[1024,8]{1,0} parameter(0)
  %a = bf16[64,8]{1,0} fusion(%p), kind=kLoop, metadata={op_name="jit(f)/layers/dot_general"}
  %b = f32[64,8]{1,0} dot(%a, %p), metadata={op_name="jit(f)/layers/mul"}
  %c = f32[64,8]{1,0} add(%b, %b)
  ROOT %d = s32[2]{0} copy(%c)
}
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
    [sys.executable, '-m', 'mimo.experiments.plan', *arguments],
    capture_output=True,
    text=True,
    cwd=_ROOT,
  )


def test_largest_arrays():
  assert plan.largest_arrays(_TEXT, 2) == (
    (64 * 8 * 4, 'f32[64,8]', 'jit(f)/layers/mul'),
    (64 * 8 * 2, 'bf16[64,8]', 'jit(f)/layers/dot_general'),
  )


def test_a_small_plan_compiled():
  """The repair policy over 4 simulated devices: what XLA is given is what is counted."""
  done = _run(
    '--config=configs/homogeneous.py', '--config.trainer.mesh=fsdp=2,context=2', '--compile=remat'
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert '4 simulated cpu devices' in done.stdout
  cells = {line.split('|')[1].strip(): line.split('|')[2:] for line in lines if '|' in line}
  assert {'parameters', 'moments', 'inputs of blocks', 'at the peak', 'remat'} <= cells.keys()
  (step,) = [line for line in lines if '| micro_step |' in line]
  cells = [cell.strip() for cell in step.split('|')]
  assert len(cells) == 9 and float(cells[-2]) == pytest.approx(
    sum(map(float, cells[3:7])), abs=0.03
  )


@pytest.mark.parametrize('name', ['mixed', 'homogeneous'])
def test_the_studys_policy_fits(name):
  done = _run(f'--config=configs/qwen3_6_35b_a3b/{name}.py', '--compile=')
  assert done.returncode == 0, done.stderr
  assert '34.66 B parameters, 3.45 B of them for a token' in done.stdout
  assert '| within 180 | no | yes | yes |' in done.stdout


def test_mistakes_are_one_line():
  done = _run('--config=configs/mixed.py', '--compile=remt')
  assert done.returncode == 1
  assert "--compile is 'remt'; expected one of keep, remat, remat_offload" in done.stderr
  done = _run('--config=configs/smollm2.py', '--model=nothing.json', '--compile=')
  assert (done.returncode, done.stderr.count('\n')) == (1, 1)
  assert 'no nothing.json; expected the config.json of a model' in done.stderr
  done = _run('--config=configs/mixed.py', '--compile=', '--config.trainer.offload=moment')
  assert (done.returncode, done.stderr.count('\n')) == (1, 1)
