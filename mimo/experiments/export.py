r"""Turns a checkpoint into weights that a server loads, in any format.

    mimo export --checkpoint=DIR --precision=bf16|fp8|nvfp4 --out=DIR

`--checkpoint` is an Orbax checkpoint (a step, a directory of steps, a run's work directory) or a
Hugging Face directory of plain weights. `--format` names a layout that `--precision` does not:
fp8_channel, or nvfp4_w4a4, whose input scales are calibrated on the prompts of `--task`.

Weights go through a few tensors at a time, so the model needs no room in memory; nvfp4_w4a4 alone
runs it, and holds it for that. What a checkpoint carries beside the decoder (a vision tower,
multi-token prediction) is copied as it is.
"""

from __future__ import annotations

import pathlib
import sys

import ml_dtypes

from mimo.experiments import cli, command, factories
from mimo.telemetry import console
from mimo.weights import formats
from mimo.weights.checkpoints import open_policy
from mimo.weights.views import ViewSpec, write_view


def export(
  checkpoint: str, out: str, *, weight_format: str, block_scale: str, task_name: str
) -> None:
  """Writes the view `out`. Raises ValueError or OSError, with nothing half-written."""
  if pathlib.Path(out).exists() and (
    not pathlib.Path(out).is_dir() or any(pathlib.Path(out).iterdir())
  ):
    raise ValueError(f'{out} exists; expected a new or empty directory')
  source = open_policy(checkpoint)
  scales = None
  if weight_format == 'nvfp4_w4a4':  # the only format that runs the model, and so holds it
    policy = factories.Policy(source.config, source, source.tokenizer_files)
    scales = factories.input_scales(policy, factories.make_task(task_name, policy))
  write_view(
    out,
    source.config,
    source.tensors(ml_dtypes.bfloat16),
    ViewSpec(weight_format, block_scale, scales),
    tokenizer_files=source.tokenizer_files,
    origin=source.origin,
  )


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('checkpoint', str, None, 'an Orbax checkpoint or a Hugging Face directory', 'DIR')
  flags.flag('precision', str, None, 'bf16, fp8 (fp8_block) or nvfp4 (nvfp4_w4a16)')
  flags.flag('format', str, None, 'any format by name, in place of --precision')
  flags.flag('out', str, None, 'the directory to write; new or empty', 'DIR')
  flags.flag('block_scale', str, ViewSpec.block_scale, 'nvfp4 block scales: amax or four_over_six')
  flags.flag('task', str, 'repair', 'whose prompts calibrate nvfp4_w4a4')


def main(given: cli.Given) -> None:
  """Runs the command."""
  cli.required(given, checkpoint='a directory', out='a directory')
  with cli.mistakes():
    weight_format = formats.resolve_format(precision=given.precision, format=given.format)
    export(
      given.checkpoint,
      given.out,
      weight_format=weight_format,
      block_scale=given.block_scale,
      task_name=given.task,
    )
  console.say(f'{weight_format}: {given.out}')


COMMAND = command.Command('export', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
