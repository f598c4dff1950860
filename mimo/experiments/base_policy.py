"""The small base policy of the study: made once by supervised steps, and shared by all its runs."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable

from mimo.experiments import pretrain
from mimo.tasks.repair import demonstrations, vocabulary
from mimo.weights.huggingface import write_model

# 0.12M parameters. Projections have multiples of 128 rows, so that fp8_block can hold them.
MODEL = dataclasses.replace(
  pretrain.MODEL,
  hidden_size=64,
  intermediate_size=128,
  num_layers=2,
  num_heads=4,
  num_kv_heads=4,
)
RECIPE = dataclasses.replace(
  pretrain.RECIPE,
  stages=(pretrain.Stage(600, pretrain.CAREFUL), pretrain.Stage(150, demonstrations.HABITS)),
  learning_rate=4e-3,
)
_SEED = 0


def digest() -> str:
  """Returns a hash of all that the policy is made from."""
  return hashlib.sha256(repr((MODEL, RECIPE, _SEED)).encode()).hexdigest()


def make(
  directory: pathlib.Path, on_step: Callable[[int, float], None] = lambda step, value: None
) -> pathlib.Path:
  """Returns where the policy is in `directory`, a Hugging Face directory; made unless it is there.

  Args:
    directory: keeps it from one call to the next.
    on_step: called now and then with the steps done and their mean loss.
  """
  path = directory / f'policy-{digest()[:8]}'
  if not path.exists():  # it appears whole or not at all
    directory.mkdir(parents=True, exist_ok=True)
    params = pretrain.teach(RECIPE, _SEED, on_step, MODEL)
    write_model(path, MODEL, params, vocabulary.tokenizer_files())
  return path
