"""A checkpoint goes in, a view comes out; bad input is one line and writes nothing."""

import pathlib
import shutil

import jax
import numpy as np
import pytest

from mimo.experiments import export
from mimo.weights.checkpoints import load_policy
from mimo.weights.views import read_view


@pytest.mark.parametrize('name', ['bf16', 'fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4'])
def test_every_format_holds_about_the_same_weights(tiny_policy, tmp_path, name) -> None:
  out = tmp_path / name
  export.export(tiny_policy, str(out), weight_format=name, block_scale='amax', task_name='repair')
  view = read_view(out)
  assert view.format == name
  # Of normal weights, from the formats' steps: e4m3 has 3 bits of mantissa, e2m1 has 1.
  bound = {'bf16': 0.0, 'fp8_channel': 0.03, 'nvfp4_w4a16': 0.11, 'nvfp4_w4a4': 0.11}[name]
  ours, theirs = jax.tree.leaves(view.params), jax.tree.leaves(load_policy(tiny_policy)[1])
  worst = max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(ours, theirs, strict=True))
  assert worst <= bound
  assert (worst > 0) == (name != 'bf16')


def test_command_names_what_it_wrote(tiny_policy, tmp_path, run_command) -> None:
  flags = [f'--checkpoint={tiny_policy}', '--precision=nvfp4', f'--out={tmp_path / "v"}']
  done = run_command(export.COMMAND, *flags)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == f'nvfp4_w4a16: {tmp_path / "v"}\n'


def _truncate(directory: pathlib.Path) -> None:
  shard = directory / 'model.safetensors'
  shard.write_bytes(shard.read_bytes()[:-100])


def _lose(directory: pathlib.Path) -> None:
  (directory / 'model.safetensors').unlink()


def _rename(directory: pathlib.Path) -> None:
  config = directory / 'config.json'
  config.write_text(config.read_text().replace('"qwen3"', '"mamba"'))


@pytest.mark.parametrize(
  ('damage', 'word'),
  [(_truncate, 'model.safetensors'), (_lose, 'model.safetensors'), (_rename, 'mamba')],
)
def test_a_damaged_checkpoint_is_named(tiny_policy, tmp_path, damage, word) -> None:
  copy = tmp_path / 'copy'
  shutil.copytree(tiny_policy, copy)
  damage(copy)
  with pytest.raises(ValueError, match=word):
    export.export(
      str(copy),
      str(tmp_path / 'out'),
      weight_format='bf16',
      block_scale='amax',
      task_name='repair',
    )
  assert sorted(path.name for path in tmp_path.iterdir()) == ['copy']


@pytest.mark.parametrize(
  ('arguments', 'word'),
  [
    (['--checkpoint=/nowhere', '--precision=fp8', '--out={tmp}/v'], '/nowhere'),
    (['--checkpoint={policy}', '--precision=fp9', '--out={tmp}/v'], "'fp9'"),
    (['--checkpoint={policy}', '--format=nvfp4', '--out={tmp}/v'], 'nvfp4_w4a16'),
    (['--checkpoint={policy}', '--out={tmp}/v'], 'precision'),
    (['--checkpoint={policy}', '--precision=bf16'], '--out'),
    (['--checkpoint={policy}', '--precision=bf16', '--out=/dev/null/v'], '/dev/null'),
    (['--checkpoint={policy}', '--precision=bf16', '--out={policy}'], 'exists'),
    (['--checkpoint={policy}', '--precision=fp8', '--out={tmp}/v'], 'multiple of 128'),
  ],
)
def test_a_mistake_is_one_line(tiny_policy, tmp_path, run_command, arguments, word) -> None:
  flags = [part.format(tmp=tmp_path, policy=tiny_policy) for part in arguments]
  done = run_command(export.COMMAND, *flags)
  assert done.returncode in (1, 2)
  assert done.stdout == ''
  assert done.stderr.count('\n') == 1, done.stderr
  assert word in done.stderr
  assert not list(tmp_path.iterdir())
