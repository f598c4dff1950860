"""From the sections of an experiment to the parts of a run."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from mimo import checks, fleet
from mimo.evaluation import evaluate as evaluation
from mimo.experiments import servers
from mimo.experiments.schema import Experiment
from mimo.models.config import ModelConfig
from mimo.rollouts.base import VirtualOptions
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.samplers.base import PinnableSampler, Sampler
from mimo.samplers.engine import EngineSettings
from mimo.samplers.following import ViewFeed
from mimo.samplers.native import NativeSampler
from mimo.samplers.pace import DelayedFeed, PoolSpeed
from mimo.tasks import arithmetic, repair
from mimo.tasks.base import Task
from mimo.tasks.slow import slow
from mimo.types import PromptRef, SamplingParams, Source, Trajectory
from mimo.weights import sources
from mimo.weights.calibration import calibrate
from mimo.weights.checkpoints import open_policy
from mimo.weights.digest import policy_digest
from mimo.weights.layouts import Origin
from mimo.weights.publication import ViewFollower
from mimo.weights.store import Store
from mimo.weights.views import ViewSpec, check_format

# The view that evaluations read, whatever the pools serve.
EVALUATION_VIEW = 'bf16'

_CALIBRATION_PROMPTS = 64
_EVALUATION_SESSIONS = 64

# On a virtual clock a replica takes up new weights, and turns that have come in, every so many
# tokens of a turn.
_VIRTUAL_STEP_TOKENS = 4

_SECS_PER_HOUR = 3600.0


@dataclasses.dataclass(frozen=True)
class Policy:
  """Weights to start from.

  Attributes:
    model: the decoder.
    weights: float32 parameters, or the checkpoint that holds them.
    tokenizer_files: name -> content.
  """

  model: ModelConfig
  weights: sources.Source | dict[str, Any]
  tokenizer_files: dict[str, bytes]

  @functools.cached_property
  def params(self) -> dict[str, Any]:
    """The parameters, float32; read whole when they are first asked for."""
    return self.weights.params() if isinstance(self.weights, sources.Source) else self.weights

  @property
  def origin(self) -> Origin | None:
    """How the checkpoint stores it, and what is carried along; None where there is none."""
    return self.weights.origin if isinstance(self.weights, sources.Source) else None

  def digest(self) -> str:
    """Returns the hash of the checkpoint that holds it; see `policy_digest`."""
    assert isinstance(self.weights, sources.Source), 'parameters in memory have no checkpoint'
    return policy_digest(self.weights.root)

  def placed(self, like: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters with the dtypes and shardings of `like`.

    From a checkpoint, each device's part is read for itself.
    """
    if isinstance(self.weights, sources.Source):
      return self.weights.placed(like)
    return jax.tree.map(lambda x, leaf: jax.device_put(x, leaf.sharding), self.weights, like)


# What makes each task, of the policy's tokenizer files; and the base policies that tasks ship.
_TASKS: Mapping[str, Callable[[Mapping[str, bytes]], Task]] = {
  'repair': lambda _: repair.RepairTask(),
  'arithmetic': arithmetic.ArithmeticTask,
}
_OWN_POLICIES = {'repair': repair.POLICY_DIR}


def make_policy(path: str, task: str) -> Policy:
  """Reads a checkpoint, or where `path` is '' the base policy of the task called `task`."""
  checks.one_of('task', task, _TASKS)
  if not path and task not in _OWN_POLICIES:
    raise ValueError(
      f'policy is empty and task {task} ships none; expected a checkpoint: a Hugging Face '
      'directory or an Orbax checkpoint'
    )
  source = open_policy(path or _OWN_POLICIES[task])
  return Policy(source.config, source, source.tokenizer_files)


def make_task(name: str, policy: Policy) -> Task:
  """Returns the task called `name`, for a policy whose vocabulary holds its tokens."""
  task = _TASKS[checks.one_of('task', name, _TASKS)](policy.tokenizer_files)
  highest = max(int(task.start('train', 0).prompt.max()), *task.stop_ids)
  if highest >= policy.model.vocab_size:
    raise ValueError(
      f'the policy has a vocabulary of {policy.model.vocab_size}; expected at least {highest + 1}, '
      f'for task {name}'
    )
  return task


def check_pools(pools: Sequence[fleet.Pool], policy: Policy) -> None:
  """Raises ValueError naming a pool whose format does not fit the policy, or that has no server.

  What a pool is by itself it has checked already.
  """
  for pool in pools:
    try:
      check_format(policy.model, pool.format)
    except ValueError as error:
      raise ValueError(f'pools.{pool.name}.format: {error}') from None
    if pool.server == 'vllm':
      servers.check_pool(pool)


def input_scales(policy: Policy, task: Task) -> dict[str, float]:
  """Returns the scales that nvfp4_w4a4 fixes in advance, calibrated on the task's prompts."""
  count = min(_CALIBRATION_PROMPTS, task.size('train'))
  prompts = [task.start('train', index).prompt for index in range(count)]
  return calibrate(policy.model, policy.params, prompts)


def make_views(
  pools: Sequence[fleet.Pool], policy: Policy, task: Task, *, block_scale: str
) -> dict[str, ViewSpec]:
  """Returns the views to publish, by name: one per format served, and the evaluation's."""
  formats = sorted({pool.format for pool in pools} | {EVALUATION_VIEW})
  scales = input_scales(policy, task) if 'nvfp4_w4a4' in formats else None
  return {
    name: ViewSpec(
      name,
      block_scale=block_scale,
      input_scales=scales if name == 'nvfp4_w4a4' else None,
    )
    for name in formats
  }


def make_engine_settings(pool: fleet.Pool, *, max_tokens: int, routes: bool) -> EngineSettings:
  """Returns the shape of a native sampler that stands for one replica of a pool."""
  return EngineSettings(
    slots=pool.sessions,
    max_tokens=max_tokens,
    kv_cache_dtype=pool.kv_cache_dtype,
    prefix_cache=pool.prefix_cache,
    routes=routes,
  )


def make_samplers(
  experiment: Experiment,
  store: Store,
  model: ModelConfig,
  *,
  sampling: SamplingParams,
  virtual: VirtualOptions | None,
  max_tokens: int,
  directory: pathlib.Path,
  executor: Executor | None,
) -> tuple[tuple[PinnableSampler, ...], tuple[DelayedFeed, ...]]:
  """Returns one sampler per pool, not yet started, and the feeds that want to be told of versions.

  Servers keep their logs in `directory`. On a virtual clock each pool's sampler is as fast as the
  pool is said to be, and hears of a version when it is announced; else it looks for itself.
  """
  feeds: list[DelayedFeed] = []

  routes = experiment.trainer.replay_routes

  def native(pool: fleet.Pool) -> NativeSampler:
    feed: ViewFeed = ViewFollower(store, pool.format)
    settings = make_engine_settings(pool, max_tokens=max_tokens, routes=routes)
    pace = None
    if virtual is not None:
      feed = DelayedFeed(feed, virtual.publication_secs)
      feeds.append(feed)
      settings = dataclasses.replace(settings, decode_steps=_VIRTUAL_STEP_TOKENS)
      pace = make_pace(pool, virtual)
    return NativeSampler(
      feed,
      source=pool.source,
      config=model,
      settings=settings,
      emulate_activations=experiment.emulate_activations,
      executor=executor,
      pace=pace,
    )

  pools = experiment.fleet
  machine = servers.Servers(
    store,
    model,
    sampling,
    max_tokens=max_tokens,
    directory=directory,
    routes=routes,
    pools=[pool for pool in pools if pool.server == 'vllm'],
  )
  samplers = [machine.sampler(pool) if pool.server == 'vllm' else native(pool) for pool in pools]
  return tuple(samplers), tuple(feeds)


def make_sampled_task(task: Task, virtual: VirtualOptions | None) -> Task:
  """Returns the task that a run samples; on a virtual clock its environment takes its time."""
  return task if virtual is None else slow(task, virtual.answer_secs)


def make_pace(pool: fleet.Pool, virtual: VirtualOptions) -> PoolSpeed:
  """Returns how fast a pool is: one replica serves the turns an hour that it is priced by."""
  assert pool.turns_per_hour is not None, 'an Experiment lets no such pool pass'
  return PoolSpeed(
    session_tokens_per_sec=virtual.session_tokens_per_sec,
    replica_tokens_per_sec=pool.turns_per_hour * virtual.turn_tokens / _SECS_PER_HOUR,
  )


def make_evaluator(
  store: Store, model: ModelConfig, *, max_tokens: int, executor: Executor | None
) -> NativeSampler:
  """Returns the sampler that evaluations draw from: BF16 weights and cache."""
  return NativeSampler(
    ViewFollower(store, EVALUATION_VIEW),
    source=Source('evaluation', 'cpu', EVALUATION_VIEW, 'bf16'),
    config=model,
    settings=EngineSettings(
      slots=_EVALUATION_SESSIONS, max_tokens=max_tokens, kv_cache_dtype='bf16'
    ),
    executor=executor,
  )


def check_extras(wandb_project: str) -> None:
  """Raises ValueError naming the extra that is needed and that is not installed."""
  if wandb_project and importlib.util.find_spec('wandb') is None:
    raise ValueError(
      f'wandb_project is {wandb_project!r} and wandb is not installed; expected '
      "pip install 'mimo[wandb]', or ''"
    )


async def run_for_evaluation(
  sampler: Sampler,
  task: Task,
  *,
  prompt: PromptRef,
  member: int,
  params: SamplingParams,
  key: np.ndarray,
  session: str,
) -> tuple[Trajectory, str | None]:
  """Plays one episode of an evaluation: an `EpisodeRunner`."""
  spec = EpisodeSpec(
    session=session,
    prompt=prompt,
    member=member,
    incarnation=0,
    sampling=params,
    key=key,
    wall_clock_secs=None,
  )
  attempt = await run_episode(task, sampler, spec)
  return attempt.trajectory, attempt.error


def evaluation_splits(task: Task) -> tuple[str, ...]:
  """Returns the subsets of 'heldout' that a task has."""
  return tuple(split for split in task.splits if split not in ('train', 'heldout'))


evaluate = functools.partial(evaluation.evaluate, run_for_evaluation)
