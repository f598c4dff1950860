"""A Hugging Face directory goes in, an Orbax checkpoint comes out, and goes on from there."""

import pathlib

import pytest

from mimo.experiments import export, import_hf


def test_what_was_imported_is_exported_as_it_was(tiny_policy, tmp_path, run_command) -> None:
  flags = [f'--checkpoint={tiny_policy}', f'--out={tmp_path / "orbax"}']
  done = run_command(import_hf.COMMAND, *flags)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == f'wrote {tmp_path / "orbax"}\n'
  out = tmp_path / 'view'
  export.export(
    str(tmp_path / 'orbax'), str(out), weight_format='bf16', block_scale='amax', task_name='repair'
  )
  shard = 'model.safetensors'
  assert (out / shard).read_bytes() == (pathlib.Path(tiny_policy) / shard).read_bytes()


@pytest.mark.parametrize(
  ('arguments', 'code', 'word'),
  [
    (['--checkpoint=/nowhere', '--out={tmp}/o'], 1, '/nowhere is not a directory'),
    (['--out={tmp}/o'], 2, '--checkpoint is missing; expected a directory'),
    (['--checkpoint={policy}'], 2, '--out is missing; expected a directory'),
    (
      ['--checkpoint={policy}', '--out={policy}'],
      1,
      'is not empty; expected a new or empty directory',
    ),
  ],
)
def test_mistakes_are_one_line(tiny_policy, tmp_path, run_command, arguments, code, word) -> None:
  given = [argument.format(tmp=tmp_path, policy=tiny_policy) for argument in arguments]
  done = run_command(import_hf.COMMAND, *given)
  assert done.returncode == code and done.stdout == ''
  assert len(done.stderr.splitlines()) == 1 and word in done.stderr
  assert not list(tmp_path.iterdir())
