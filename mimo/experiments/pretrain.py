r"""Makes the base policy of `repair` again: supervised steps on scripted demonstrations.

    mimo pretrain --out=DIR [--hard_samples=64] [--seed=0]

DIR is then a Hugging Face directory, and with `--hard_samples` it also holds hard.txt: the quarter
of the held-out tasks that the policy solves least. Both are what mimo/tasks/repair/policy ships.
The first stage teaches the task, the second the demonstrator's bad habits. It takes about 9 minutes
of CPU time, the list included, and ends with (256 held-out tasks, 64 samples each, temperature 1)

    pass@1 0.488 +- 0.018, pass@4 0.790 +- 0.017; on the hard quarter by these very samples 0.114

Equal flags give equal bytes on one machine with one jax. `--model=config.json` teaches another
decoder instead, of any family, such as one with experts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import pathlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mimo import checks
from mimo.experiments import cli, command, evaluate, schema
from mimo.experiments.factories import Policy
from mimo.models import decoder
from mimo.models.config import ModelConfig, RopeConfig
from mimo.tasks.repair import RepairTask, demonstrations, problems, vocabulary
from mimo.tasks.repair import task as repair_task
from mimo.tasks.repair.demonstrations import Habits
from mimo.telemetry import console
from mimo.telemetry.progress import evaluation_line
from mimo.weights.huggingface import write_model

# 0.75M parameters. Projections have multiples of 128 rows, so that fp8_block can hold them.
MODEL = ModelConfig(
  family='qwen3',
  vocab_size=vocabulary.SIZE,
  hidden_size=128,
  intermediate_size=384,
  num_layers=3,
  num_heads=8,
  num_kv_heads=4,
  head_dim=32,
  rms_norm_eps=1e-6,
  rope=RopeConfig(theta=10_000.0),
  qk_norm=True,
  tie_embeddings=True,
  max_positions=128,
  extra=(
    ('eos_token_id', json.dumps(vocabulary.STOP_ID)),
    ('pad_token_id', json.dumps(vocabulary.PAD_ID)),
  ),
)

# The hard list must owe nothing to the draws of an evaluation that is reported: those are keyed by
# a run's seed, and no run should use this one.
HARD_SEED = 640_640
_HARD_SHARE = 4
_LOG_STEPS = 50


class Batch(NamedTuple):
  """Demonstrations laid end to end in rows.

  Attributes:
    tokens: [R, L] int32.
    segment_ids: [R, L] int32, 0 where there is no token.
    positions: [R, L] int32.
    agent: [R, L] bool, true where the demonstrator wrote the token.
  """

  tokens: np.ndarray
  segment_ids: np.ndarray
  positions: np.ndarray
  agent: np.ndarray


@dataclasses.dataclass(frozen=True)
class Stage:
  """So many steps on demonstrations of these habits."""

  steps: int
  habits: Habits


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How the policy is taught: AdamW, a linear warm-up, and a fall to 0 over the last stage."""

  stages: tuple[Stage, ...]
  rows: int = 32
  row_tokens: int = 128
  learning_rate: float = 2e-3
  warmup_steps: int = 50
  weight_decay: float = 0.05
  b2: float = 0.98
  max_grad_norm: float = 1.0


CAREFUL = Habits(fix=0.9, look_first=0.1, run=0.3, accept=0.9, retry=0.9, give_up=0.05)
RECIPE = Recipe(stages=(Stage(800, CAREFUL), Stage(150, demonstrations.HABITS)))


def fill(rng: random.Random, habits: Habits, rows: int, row_tokens: int) -> Batch:
  """Fills a batch with demonstrations on fresh training problems; the longest are cut short."""
  shape = (rows, row_tokens)
  batch = Batch(*(np.zeros(shape, dtype) for dtype in (np.int32, np.int32, np.int32, bool)))
  row = start = segment = 0
  while True:
    shown = demonstrations.demonstrate(problems.generate('train', rng), rng, habits)
    length = min(len(shown.tokens), row_tokens)
    if start + length > row_tokens:
      row, start, segment = row + 1, 0, 0
    if row == rows:
      return batch
    segment += 1
    where = (row, slice(start, start + length))
    batch.tokens[where] = shown.tokens[:length]
    batch.segment_ids[where] = segment
    batch.positions[where] = np.arange(length)
    batch.agent[where] = shown.agent[:length]
    start += length


def loss(params: Mapping[str, Any], batch: Batch, model: ModelConfig = MODEL) -> jax.Array:
  """Mean of -log p over the tokens that the demonstrator wrote, in nats."""
  tokens, segment_ids, positions, agent = map(jnp.asarray, batch)
  hidden = decoder.forward(model, params, tokens, segment_ids, positions)
  logits = hidden[:, :-1] @ decoder.head_matrix(model, params)
  logps = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
  # A demonstration starts with its prompt, so no agent token is predicted from a neighbour.
  return -jnp.sum(chosen * agent[:, 1:]) / jnp.sum(agent[:, 1:])


def _stages(recipe: Recipe, rng: random.Random) -> Iterator[Batch]:
  for stage in recipe.stages:
    for _ in range(stage.steps):
      yield fill(rng, stage.habits, recipe.rows, recipe.row_tokens)


def teach(
  recipe: Recipe,
  seed: int,
  on_step: Callable[[int, float], None] = lambda step, value: None,
  model: ModelConfig = MODEL,
) -> dict[str, Any]:
  """Returns float32 parameters taught by `recipe`: a function of it and the seed.

  Args:
    recipe: what to do.
    seed: of the initial parameters and the demonstrations.
    on_step: called now and then with the steps done and the mean loss since its last call.
    model: whose parameters they are.
  """
  total, last = sum(stage.steps for stage in recipe.stages), recipe.stages[-1].steps
  warm_up = optax.linear_schedule(0.0, recipe.learning_rate, recipe.warmup_steps)
  fall = optax.linear_schedule(recipe.learning_rate, 0.0, last)
  schedule = optax.join_schedules([warm_up, fall], [total - last])
  optimiser = optax.chain(
    optax.clip_by_global_norm(recipe.max_grad_norm),
    optax.adamw(schedule, b2=recipe.b2, weight_decay=recipe.weight_decay),
  )

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params: Any, state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
    value, grads = jax.value_and_grad(functools.partial(loss, model=model))(params, batch)
    updates, state = optimiser.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  params = decoder.init(model, jax.random.key(seed))
  state = optimiser.init(params)
  values: list[jax.Array] = []
  for index, batch in enumerate(_stages(recipe, random.Random(f'repair/pretrain/{seed}')), 1):
    params, state, value = step(params, state, batch)
    values.append(value)
    if index % _LOG_STEPS == 0 or index == total:
      on_step(index, float(np.mean(values)))
      values.clear()
  return params


def least_solved(ids: Sequence[str], rewards: np.ndarray) -> list[str]:
  """Returns the quarter of the tasks with the lowest mean reward, by name.

  Args:
    ids: N names.
    rewards: [N, n] float, without missing samples.

  Raises:
    ValueError: a reward is missing.
  """
  if np.isnan(rewards).any():
    raise ValueError(f'{int(np.isnan(rewards).sum())} rewards are missing; expected none')
  # Equal tasks are ordered by name, a hash, which says nothing of how hard they are.
  order = sorted(range(len(ids)), key=lambda index: (float(rewards[index].mean()), ids[index]))
  return sorted(ids[index] for index in order[: len(ids) // _HARD_SHARE])


def _check(out: str, hard_samples: int, seed: int) -> pathlib.Path:
  """Raises ValueError before any work is done."""
  path = pathlib.Path(out)
  if path.exists() and not (path.is_dir() and not any(path.iterdir())):
    raise ValueError(f'--out: {path} exists and is not empty; expected a new or empty directory')
  if not path.absolute().parent.is_dir():
    raise ValueError(f'--out: {path.absolute().parent} is no directory; expected one that exists')
  checks.whole('--hard_samples', hard_samples, least=0, most=2**12)  # 0 makes no list
  checks.whole('--seed', seed, least=0, most=schema.SEEDS - 1)
  return path


def read_decoder(path: str) -> ModelConfig:
  """Reads the config.json of a decoder to teach. Raises ValueError naming what is wrong."""
  try:
    stated = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    model = ModelConfig.from_hf(stated)
  except (OSError, ValueError) as error:
    raise ValueError(f'--model: {path}: {error}') from None
  if model.vocab_size < vocabulary.SIZE:
    raise ValueError(
      f'--model: {path}: vocab_size is {model.vocab_size}; expected at least {vocabulary.SIZE}'
    )
  return model


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('out', str, None, 'a new directory for the policy', 'DIR')
  flags.flag('hard_samples', int, 0, 'samples a task for the list of hard tasks; 0 for none')
  flags.flag('seed', int, 0, 'of the parameters and the demonstrations')
  flags.flag('model', str, '', 'the config.json of another decoder; else the shipped one', 'FILE')


def main(given: cli.Given) -> None:
  """Runs the command."""
  cli.required(given, out='a new or empty directory')
  with cli.mistakes():
    out = _check(given.out, given.hard_samples, given.seed)
    model = read_decoder(given.model) if given.model else MODEL
  params = teach(
    RECIPE,
    given.seed,
    lambda step, value: console.say(f'step {step}: loss {value:.4f}'),
    model,
  )
  write_model(out, model, params, vocabulary.tokenizer_files())
  if given.hard_samples:
    policy = Policy(model, params, vocabulary.tokenizer_files())
    result = asyncio.run(
      evaluate.evaluate(
        policy,
        RepairTask(),
        samples=given.hard_samples,
        seed=HARD_SEED,
      )
    )
    names = least_solved(result.task_ids, result.rewards)
    (out / repair_task.HARD_FILE.name).write_text('\n'.join(names) + '\n', encoding='utf-8')
    console.say(evaluation_line(str(out), result.summary()))


COMMAND = command.Command('pretrain', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
