r"""Turns a Hugging Face directory into an Orbax checkpoint, without holding the model.

    python -m mimo.experiments.import_hf --checkpoint=DIR --out=DIR

Tensors are read, checked and written a few at a time, in chunks of one layer (one expert where
experts are stacked), so that a trainer restores each device's part and an export reads tensor by
tensor. What the checkpoint holds beside the decoder (a vision tower, multi-token prediction) is
copied beside it, and `mimo.experiments.export` puts it back.
"""

from __future__ import annotations

from absl import flags

from mimo.experiments import cli
from mimo.weights import huggingface
from mimo.weights.checkpoints import write_policy


def main() -> None:
  """Reads the flags."""
  given = flags.FLAGS
  with cli.mistakes():
    for name in ('checkpoint', 'out'):
      if not given[name].value:
        raise ValueError(f'--{name} is missing; expected a directory')
    write_policy(given.out, huggingface.open_model(given.checkpoint))
  print(f'wrote {given.out}')


if __name__ == '__main__':
  flags.DEFINE_string('checkpoint', None, 'a Hugging Face directory of plain weights')
  flags.DEFINE_string('out', None, 'the directory to make')
  cli.run(main)
