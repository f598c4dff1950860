r"""Turns a Hugging Face directory into an Orbax checkpoint, without holding the model.

    mimo import-hf --checkpoint=DIR --out=DIR

Tensors are read, checked and written a few at a time, in chunks of one layer (one expert where
experts are stacked), so that a trainer restores each device's part and an export reads tensor by
tensor. What the checkpoint holds beside the decoder (a vision tower, multi-token prediction) is
copied beside it, and `mimo.experiments.export` puts it back.
"""

from __future__ import annotations

import sys

from mimo.experiments import cli, command
from mimo.telemetry import console
from mimo.weights import huggingface
from mimo.weights.checkpoints import write_policy


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('checkpoint', str, None, 'a Hugging Face directory of plain weights', 'DIR')
  flags.flag('out', str, None, 'the directory to make', 'DIR')


def main(given: cli.Given) -> None:
  """Runs the command."""
  cli.required(given, checkpoint='a directory', out='a directory')
  with cli.mistakes():
    write_policy(given.out, huggingface.open_model(given.checkpoint))
  console.say(f'wrote {given.out}')


COMMAND = command.Command('import-hf', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
