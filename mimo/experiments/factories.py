"""From a configuration to the parts of a run. ConfigDict stops here."""

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
from ml_collections import config_dict

from mimo import fleet, objectives
from mimo.evaluation import evaluate as evaluation
from mimo.experiments import servers, settings
from mimo.models.config import ModelConfig
from mimo.rollouts.base import RolloutOptions, RolloutSettings, VirtualOptions
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.samplers.base import PinnableSampler, Sampler
from mimo.samplers.engine import EngineSettings
from mimo.samplers.following import ViewFeed
from mimo.samplers.native import NativeSampler
from mimo.samplers.pace import DelayedFeed, PoolSpeed
from mimo.tasks import arithmetic, repair
from mimo.tasks.base import Task
from mimo.tasks.slow import slow
from mimo.trainer.packing import Bucket
from mimo.trainer.sharding import make_mesh
from mimo.trainer.state import TrainerConfig
from mimo.trainer.update import Trainer
from mimo.types import PromptRef, SamplingParams, Source, Trajectory
from mimo.weights import sources
from mimo.weights.calibration import calibrate
from mimo.weights.checkpoints import open_policy
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
  settings.one_of('task', task, _TASKS)
  if not path and task not in _OWN_POLICIES:
    raise ValueError(
      f'policy is empty and task {task} ships none; expected a checkpoint: a Hugging Face '
      'directory or an Orbax checkpoint'
    )
  source = open_policy(path or _OWN_POLICIES[task])
  return Policy(source.config, source, source.tokenizer_files)


def make_task(name: str, policy: Policy) -> Task:
  """Returns the task called `name`, for a policy whose vocabulary holds its tokens."""
  task = _TASKS[settings.one_of('task', name, _TASKS)](policy.tokenizer_files)
  highest = max(int(task.start('train', 0).prompt.max()), *task.stop_ids)
  if highest >= policy.model.vocab_size:
    raise ValueError(
      f'the policy has a vocabulary of {policy.model.vocab_size}; expected at least {highest + 1}, '
      f'for task {name}'
    )
  return task


def make_arm(config: config_dict.ConfigDict) -> objectives.Arm:
  """Returns the arm, with the configuration's bounds of the ratio."""
  arm = objectives.arm(config.arm)
  bounds = {'low': config.objective.low, 'high': config.objective.high}
  return dataclasses.replace(arm, correction=dataclasses.replace(arm.correction, **bounds))


def make_pools(config: config_dict.ConfigDict) -> tuple[fleet.Pool, ...]:
  """Returns the fleet, in the order of names."""
  pools = []
  for name, options in sorted(config.pools.items()):
    count, accelerator = _accelerator(name, options.accelerator)
    pool = fleet.Pool(
      name=name,
      accelerator=accelerator,
      gpus_per_replica=count,
      replicas=1,
      format=options.format,
      kv_cache_dtype=options.kv_cache_dtype,
      prefix_cache=options.prefix_cache,
      sessions_per_replica=options.sessions,
      usd_per_gpu_hour=0.0 if accelerator == servers.CPU else fleet.list_price(accelerator),
      turns_per_hour=options.turns_per_hour,
    )
    if options.server == 'vllm':
      servers.check_pool(name, pool)
    pools.append(pool)
  return tuple(pools)


def _accelerator(pool: str, stated: str) -> tuple[int, str]:
  """Returns how many GPUs one replica takes, and which: 'H100', or '2xH100'."""
  count, times, name = stated.partition('x')
  if not (times and count.isdigit()):
    return 1, stated
  if int(count) < 1:
    raise ValueError(f'pools.{pool}.accelerator is {stated!r}; expected at least one GPU')
  return int(count), name


def make_sampling(
  config: config_dict.ConfigDict, arm: objectives.Arm, task: Task
) -> SamplingParams:
  """Returns how the pools draw: from their nucleus where the arm replays it."""
  return SamplingParams(
    temperature=config.sampling.temperature,
    top_p=config.sampling.top_p if arm.topp else 1.0,
    top_k=config.sampling.top_k if arm.topp else 0,
    candidates=config.sampling.candidates,
    max_turn_tokens=task.max_turn_tokens,
    stop_ids=task.stop_ids,
  )


def make_trainer_config(config: config_dict.ConfigDict) -> TrainerConfig:
  """Returns the settings of the update."""
  options = config.trainer
  copied = (
    'learning_rate',
    'b2',
    'weight_decay',
    'max_grad_norm',
    'warmup_updates',
    'head_chunk_tokens',
    'compute_dtype',
    'remat',
    'freeze_router',
    'replay_routes',
  )
  return TrainerConfig(
    temperature=config.sampling.temperature,
    offload=tuple(filter(None, map(str.strip, options.offload.split(',')))),
    **{name: options[name] for name in copied},
  )


def make_trainer(
  config: config_dict.ConfigDict, model: ModelConfig, arm: objectives.Arm, num_sources: int
) -> Trainer:
  """Returns the update, which compiles at its first use."""
  return Trainer(
    model,
    make_trainer_config(config),
    correction=arm.correction,
    num_sources=num_sources,
    mesh=make_mesh(**settings.mesh_sizes(config.trainer.mesh)),
  )


def make_buckets(config: config_dict.ConfigDict) -> tuple[Bucket, ...]:
  """Returns the shape of micro-batches."""
  options = config.trainer
  return (Bucket(options.row_tokens, options.row_trained_tokens, options.rows),)


def input_scales(policy: Policy, task: Task) -> dict[str, float]:
  """Returns the scales that nvfp4_w4a4 fixes in advance, calibrated on the task's prompts."""
  count = min(_CALIBRATION_PROMPTS, task.size('train'))
  prompts = [task.start('train', index).prompt for index in range(count)]
  return calibrate(policy.model, policy.params, prompts)


def make_views(
  config: config_dict.ConfigDict, pools: Sequence[fleet.Pool], policy: Policy, task: Task
) -> dict[str, ViewSpec]:
  """Returns the views to publish, by name: one per format served, and the evaluation's."""
  for pool in pools:
    try:
      check_format(policy.model, pool.format)
    except ValueError as error:
      raise ValueError(f'pools.{pool.name}.format: {error}') from None
  formats = sorted({pool.format for pool in pools} | {EVALUATION_VIEW})
  scales = input_scales(policy, task) if 'nvfp4_w4a4' in formats else None
  return {
    name: ViewSpec(
      name,
      block_scale=config.block_scale,
      input_scales=scales if name == 'nvfp4_w4a4' else None,
    )
    for name in formats
  }


def make_engine_settings(
  config: config_dict.ConfigDict, pool: fleet.Pool, max_tokens: int
) -> EngineSettings:
  """Returns the shape of a native sampler that stands for one replica of a pool."""
  return EngineSettings(
    slots=pool.sessions_per_replica,
    max_tokens=max_tokens,
    kv_cache_dtype=pool.kv_cache_dtype,
    prefix_cache=pool.prefix_cache,
    routes=config.trainer.replay_routes,
  )


def make_samplers(
  config: config_dict.ConfigDict,
  pools: Sequence[fleet.Pool],
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

  def native(pool: fleet.Pool) -> NativeSampler:
    feed: ViewFeed = ViewFollower(store, pool.format)
    settings = make_engine_settings(config, pool, max_tokens)
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
      emulate_activations=config.emulate_activations,
      executor=executor,
      pace=pace,
    )

  served = {pool.name for pool in pools if config.pools[pool.name].server == 'vllm'}
  machine = servers.Servers(
    store,
    model,
    sampling,
    max_tokens=max_tokens,
    directory=directory,
    routes=config.trainer.replay_routes,
    pools=[pool for pool in pools if pool.name in served],
  )
  samplers = [machine.sampler(pool) if pool.name in served else native(pool) for pool in pools]
  return tuple(samplers), tuple(feeds)


def make_sampled_task(task: Task, virtual: VirtualOptions | None) -> Task:
  """Returns the task that a run samples; on a virtual clock its environment takes its time."""
  return task if virtual is None else slow(task, virtual.answer_secs)


def make_pace(pool: fleet.Pool, virtual: VirtualOptions) -> PoolSpeed:
  """Returns how fast a pool is: one replica serves the turns an hour that it is priced by."""
  assert pool.turns_per_hour is not None, 'settings.check lets no such pool pass'
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


def check_extras(config: config_dict.ConfigDict) -> None:
  """Raises ValueError naming the extra that the configuration needs and that is not installed."""
  if config.wandb_project and importlib.util.find_spec('wandb') is None:
    raise ValueError(
      f'wandb_project is {config.wandb_project!r} and wandb is not installed; expected '
      "pip install 'mimo[wandb]', or ''"
    )


def make_rollout_settings(
  config: config_dict.ConfigDict, sampling: SamplingParams
) -> RolloutSettings:
  """Returns what a source needs to know, for the first start of a run."""
  stated = config.rollouts.to_dict()
  options = RolloutOptions(**stated | {'virtual': VirtualOptions(**stated['virtual'])})
  return RolloutSettings(options=options, sampling=sampling, seed=config.seed, incarnation=0)


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
