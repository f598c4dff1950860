r"""Makes the small base policy of the study by supervised steps; all its runs share it.

    mimo base-policy --out=DIR [--octaves=1.75]

`--octaves` says how unlike channels are: 0 leaves them as they were learned. `ablate` makes the
policy of its runs by itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mimo.experiments import cli, command, pretrain
from mimo.models.config import ModelConfig
from mimo.tasks.repair import demonstrations, vocabulary
from mimo.telemetry import console
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
# How unlike channels are. As they were learned, four bits cost this policy next to nothing, which
# they do not of a large one (see docs/study.md).
OCTAVES = 1.75
_SEED = 0
# In a policy that this module made: its digest.
NOTE = 'base_policy.txt'


def digest(octaves: float = OCTAVES) -> str:
  """Returns a hash of all that the policy is made from."""
  return hashlib.sha256(repr((MODEL, RECIPE, octaves, _SEED)).encode()).hexdigest()


def identity(policy: str) -> str:
  """Returns what tells policies apart: the digest of one that this module makes, else its path.

  Args:
    policy: a path, or '' for the study's own.
  """
  note = pathlib.Path(policy) / NOTE
  if policy and not note.is_file():
    return policy
  return note.read_text(encoding='utf-8').strip() if policy else digest()


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
    _write(path, OCTAVES, on_step)
  return path


def _write(path: pathlib.Path, octaves: float, on_step: Callable[[int, float], None]) -> None:
  params = pretrain.teach(RECIPE, _SEED, on_step, MODEL)
  params = with_unlike_channels(MODEL, params, octaves, _SEED)
  note = {NOTE: f'{digest(octaves)}\n'.encode()}
  write_model(path, MODEL, params, {**vocabulary.tokenizer_files(), **note})


def with_unlike_channels(
  config: ModelConfig, params: Mapping[str, Any], octaves: float, seed: int
) -> dict[str, Any]:
  """Returns parameters of the same function whose channels are unlike in scale.

  A power of two, two to the rounded N(0, octaves²), goes for each channel from the matrices that
  read it to what writes it: from queries, keys, values, gate and up to the norm before them, from
  the output projection to values, from down to up. So logits stay equal bit for bit, while weights
  that share a scale become unlike in size, and a format with few levels loses the small ones.

  Args:
    config: of llama or qwen3, with as many key heads as heads.
    params: of that model.
    octaves: a standard deviation; 0 changes nothing.
    seed: of the scales.

  Raises ValueError for another model.
  """
  if config.family not in ('llama', 'qwen3'):
    raise ValueError(f'the family is {config.family!r}; expected llama or qwen3')
  if config.num_heads != config.num_kv_heads:
    raise ValueError(
      f'{config.num_kv_heads} key heads for {config.num_heads} heads; expected as many'
    )
  rng = np.random.default_rng(seed)
  out: dict[str, Any] = jax.tree.map(lambda leaf: np.array(leaf, np.float32), dict(params))
  layers = out['layers']
  attention, mlp = layers['attention'], layers['mlp']

  def scales(*shape: int) -> np.ndarray:
    drawn = np.round(octaves * rng.normal(size=(config.num_layers, *shape)))
    return np.exp2(drawn).astype(np.float32)

  for norm, readers in (
    ('mixer_norm', [attention[name] for name in ('q_proj', 'k_proj', 'v_proj')]),
    ('mlp_norm', [mlp[name] for name in ('gate_proj', 'up_proj')]),
  ):
    scale = scales(config.hidden_size)  # [L, D]
    layers[norm]['scale'] *= scale
    for reader in readers:  # kernels are [L, D, ...]
      reader['kernel'] /= scale.reshape(*scale.shape, *[1] * (reader['kernel'].ndim - 2))
  scale = scales(config.num_heads, config.head_dim)  # [L, H, Dh]
  attention['v_proj']['kernel'] *= scale[:, None]
  attention['o_proj']['kernel'] /= scale[..., None]
  scale = scales(config.intermediate_size)  # [L, F]
  mlp['up_proj']['kernel'] *= scale[:, None]
  mlp['down_proj']['kernel'] /= scale[..., None]
  return out


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('out', str, None, 'where it goes, a Hugging Face directory', 'DIR')
  flags.flag('octaves', float, OCTAVES, 'how unlike channels are, a standard deviation')


def main(given: cli.Given) -> None:
  """Runs the command."""
  cli.required(given, out='a new directory')
  path = pathlib.Path(given.out)
  with cli.mistakes():
    if path.exists():
      raise ValueError(f'--out={path} exists; expected a new directory')
    if not 0 <= given.octaves <= 8:
      raise ValueError(f'--octaves is {given.octaves}; expected 0 to 8')
    path.parent.mkdir(parents=True, exist_ok=True)
  _write(path, given.octaves, lambda step, loss: console.say(f'step {step}: loss {loss:.3f}'))
  console.say(f'policy: {path}')


COMMAND = command.Command('base-policy', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
