"""A Hugging Face directory goes in, an Orbax checkpoint comes out, and goes on from there."""

import pathlib
import subprocess
import sys

import pytest

from mimo.experiments import export

_ROOT = pathlib.Path(__file__).parents[2]


def _import(*arguments: str) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, '-m', 'mimo.experiments.import_hf', *arguments]
  return subprocess.run(command, capture_output=True, text=True, cwd=_ROOT)


def test_what_was_imported_is_exported_as_it_was(tiny_policy, tmp_path) -> None:
  done = _import(f'--checkpoint={tiny_policy}', f'--out={tmp_path / "orbax"}')
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == f'wrote {tmp_path / "orbax"}\n'
  out = tmp_path / 'view'
  export.export(
    str(tmp_path / 'orbax'), str(out), weight_format='bf16', block_scale='amax', task_name='repair'
  )
  shard = 'model.safetensors'
  assert (out / shard).read_bytes() == (pathlib.Path(tiny_policy) / shard).read_bytes()


@pytest.mark.parametrize(
  ('arguments', 'word'),
  [
    (['--checkpoint=/nowhere', '--out={tmp}/o'], '/nowhere is not a directory'),
    (['--out={tmp}/o'], '--checkpoint is missing; expected a directory'),
    (['--checkpoint={policy}'], '--out is missing; expected a directory'),
    (
      ['--checkpoint={policy}', '--out={policy}'],
      'is not empty; expected a new or empty directory',
    ),
  ],
)
def test_mistakes_are_one_line(tiny_policy, tmp_path, arguments, word) -> None:
  given = [argument.format(tmp=tmp_path, policy=tiny_policy) for argument in arguments]
  done = _import(*given)
  assert done.returncode == 1 and done.stdout == ''
  assert len(done.stderr.splitlines()) == 1 and word in done.stderr
  assert not list(tmp_path.iterdir())
