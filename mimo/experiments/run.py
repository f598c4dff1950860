"""The parts of one training run, and what the loop does with several of them at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from ml_collections import config_dict

from mimo import fleet
from mimo.evaluation import evaluate as evaluation
from mimo.experiments import factories, settings
from mimo.experiments.learner import Learner
from mimo.experiments.workdir import Workdir
from mimo.rollouts.asynchronous import AsyncLimits, AsyncRollouts
from mimo.rollouts.base import Batch, RolloutSource
from mimo.rollouts.lockstep import LockstepRollouts
from mimo.rollouts.versions import live_updates
from mimo.samplers.base import PinnableSampler, check_contract
from mimo.tasks.base import Task
from mimo.telemetry import metrics, names, report
from mimo.telemetry.ledger import Ledger
from mimo.telemetry.progress import Progress, evaluation_line
from mimo.telemetry.writers import JsonlWriter, MultiWriter, TensorBoardWriter, WandbWriter, Writer
from mimo.trainer.update import LOGITS_DTYPE
from mimo.types import SamplingParams, Version
from mimo.weights.checkpoints import Checkpoints, policy_meta
from mimo.weights.publication import Publisher, ViewFollower
from mimo.weights.store import FileStore
from mimo.weights.views import ViewSpec

# Publications that stay in the store: a replica may be this far behind while it loads.
_KEPT_VERSIONS = 4
_KEPT_CHECKPOINTS = 2

_T = TypeVar('_T')


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a configuration asks for, checked: nothing is written yet."""

  config: config_dict.ConfigDict
  task: Task
  policy: factories.Policy
  pools: tuple[fleet.Pool, ...]
  sampling: SamplingParams
  views: dict[str, ViewSpec]
  learner_of: Callable[[Any], Learner]
  abstract_state: Any
  init_state: Callable[[Any], Any]


def plan(config: config_dict.ConfigDict) -> Plan:
  """Reads what the configuration names. Raises ValueError or OSError for what cannot be meant."""
  settings.check(config)
  policy = factories.make_policy(config.policy, config.task)
  task = factories.make_task(config.task, policy)
  for split in ('train', 'heldout'):
    if not task.size(split):
      raise ValueError(f'task {task.name}: split {split!r} holds no tasks; expected at least one')
  arm = factories.make_arm(config)
  pools = factories.make_pools(config)
  if config.trainer.row_tokens < task.max_tokens:
    raise ValueError(
      f'trainer.row_tokens is {config.trainer.row_tokens}; expected at least '
      f'{task.max_tokens}, the longest trajectory of {task.name}'
    )
  trainer = factories.make_trainer(config, policy.model, arm, len(pools))

  def learner_of(state: Any) -> Learner:
    return Learner(
      trainer,
      state,
      advantage=arm.advantage,
      buckets=factories.make_buckets(config),
      num_candidates=config.sampling.candidates,
      sources=[pool.name for pool in pools],
    )

  return Plan(
    config=config,
    task=task,
    policy=policy,
    pools=pools,
    sampling=factories.make_sampling(config, arm, task),
    views=factories.make_views(config, pools, policy, task),
    learner_of=learner_of,
    abstract_state=trainer.abstract_state(),
    init_state=trainer.init_state,
  )


class Run:
  """Owns a run's resources from its start to its end. Used on one event loop."""

  def __init__(self, plan: Plan, workdir: Workdir) -> None:
    """Restores the newest checkpoint, or starts from the policy."""
    config = plan.config
    self.plan = plan
    self.workdir = workdir
    self._lockstep = config.rollouts.schedule == 'lockstep'
    self._checkpoints = Checkpoints(workdir.path / 'checkpoints', _KEPT_CHECKPOINTS)
    step = self._checkpoints.latest()
    self._meta: dict[str, Any] = {'rollouts': None, 'ledger': None, 'evaluated': None}
    if step is None:
      state = plan.init_state(plan.policy.params)
    else:
      state, self._meta = self._checkpoints.restore(step, plan.abstract_state)
    self.start = step or 0
    workdir.begin(self.start)
    self.learner = plan.learner_of(state)
    self.store = FileStore(workdir.path / 'store')
    self._publisher = Publisher(
      self.store,
      plan.policy.model,
      plan.policy.tokenizer_files,
      plan.views,
      workdir.incarnation,
    )
    self._follower = ViewFollower(self.store, factories.EVALUATION_VIEW)
    self._update_of = live_updates(self._follower.versions(), workdir.starts)
    self._saved = self.start
    self.evaluated: int | None = self._meta['evaluated']
    self.ledger = Ledger([pool.name for pool in plan.pools])
    if self._meta['ledger'] is not None:
      self.ledger.restore(self._meta['ledger'])
    self.writer = self._make_writer(None if step is None else step)
    self.progress = Progress(config.updates, done=self.start, stream=None)
    # One worker for every native sampler and one for the update; lockstep uses no threads.
    self._sampling, self._updating = (
      None if self._lockstep else concurrent.futures.ThreadPoolExecutor(1, name)
      for name in ('sampler', 'update')
    )
    self.samplers: tuple[PinnableSampler, ...] = ()
    self.rollouts: RolloutSource
    self._evaluator: PinnableSampler

  async def open(self) -> None:
    """Publishes the weights, starts the samplers and makes the rollouts ready."""
    plan = self.plan
    await self.publish(self.start)
    model = plan.policy.model
    self.samplers = factories.make_samplers(
      plan.config,
      plan.pools,
      self.store,
      model,
      sampling=plan.sampling,
      max_tokens=plan.task.max_tokens,
      directory=self.workdir.path / 'servers',
      executor=self._sampling,
    )
    self._evaluator = factories.make_evaluator(
      self.store,
      model,
      max_tokens=plan.task.max_tokens,
      executor=self._sampling,
    )
    for sampler in (*self.samplers, self._evaluator):
      check_contract(sampler.contract, logits_dtype=LOGITS_DTYPE, vocab_size=model.vocab_size)
    await asyncio.gather(*(sampler.start() for sampler in (*self.samplers, self._evaluator)))
    self.rollouts = self._make_rollouts()

  async def publish(self, update: int) -> Version:
    """Publishes the policy as it is now, and deletes what nothing can need any more."""
    version = await self.in_update_worker(
      lambda: self._publisher.publish(update, self.learner.snapshot())
    )
    for view, reason in self._publisher.failures.items():
      self.progress.note(f'view {view} stays at its last version: {reason}')
    self._update_of[version.number] = update
    await self.in_update_worker(self._retire)
    return version

  def _retire(self) -> None:
    """Keeps the newest publications, and what a resumed lockstep run would sample from."""
    known = self._follower.versions()
    kept = {version.number for version in known[-_KEPT_VERSIONS:]}
    if self._lockstep:
      oldest = self._saved - self.plan.config.rollouts.lag_updates
      kept |= {version.number for version in known if version.update >= oldest}
    self._publisher.retain(kept)

  async def update(self, batch: Batch) -> dict[str, float]:
    """Learns from a batch. Returns the scalars of the update."""
    return await self.in_update_worker(lambda: self.learner.update(batch.groups))

  async def evaluate(self, update: int) -> dict[str, float]:
    """Evaluates the published BF16 view of `update`, and says and writes what it found."""
    version = self._follower.find(update, self.workdir.starts)
    assert version is not None, f'update {update} is not published'
    await self._evaluator.pin(version)
    task = self.plan.task
    result = await factories.evaluate(
      self._evaluator,
      task,
      params=evaluation.full_vocabulary(task),
      samples=self.plan.config.evaluation.samples,
      seed=_evaluation_seed(self.plan.config.seed, update),
      subsets=factories.evaluation_splits(task),
    )
    summary = result.summary()
    self.progress.note(evaluation_line(f'update {update}', summary))
    scalars = metrics.flatten('eval', summary)
    self.writer.scalars(update, scalars)
    self.writer.flush()
    self.evaluated = update
    return scalars

  def record(self, step: int, batch: Batch, scalars: dict[str, float]) -> None:
    """Books, writes and shows one update. `step` counts updates applied, this one included."""
    stats = batch.stats
    of_batch, histograms = metrics.batch_metrics(batch.groups, batch.staleness)
    of_sampling, more = metrics.rollout_metrics(dataclasses.asdict(stats))
    held = {pool.name: stats.secs * pool.replicas for pool in self.plan.pools}
    costs = self.ledger.add(
      turns=stats.turns(),
      modelled_usd=fleet.modelled_usd(self.plan.pools, stats.turns()),
      billed_usd=fleet.billed_usd(self.plan.pools, held),
    )
    speed = {names.SAMPLER_SPEED: stats.sampled_tokens_per_sec}
    scalars = scalars | of_batch | of_sampling | costs | speed
    self.writer.scalars(step, scalars)
    self.writer.histograms(step, histograms | more)
    self.writer.flush()
    self.progress.update(step, scalars)

  def save(self, update: int) -> None:
    """Starts a checkpoint of everything that the run goes on from."""
    if update == self._checkpoints.latest():
      return
    meta = {
      **policy_meta(self.plan.policy.model, self.plan.policy.tokenizer_files),
      'rollouts': self.rollouts.state(),
      'ledger': self.ledger.state(),
      'evaluated': self.evaluated,
    }
    self._checkpoints.save(update, self.learner.state, meta)
    # The save before this one is complete: `save` waited for it.
    complete = self._checkpoints.latest()
    self._saved = self._saved if complete is None else complete

  def write_report(self) -> pathlib.Path:
    """Draws the report of what metrics.jsonl holds."""
    config = self.plan.config
    return report.write(
      self.workdir.path / 'report.html',
      metrics=self.workdir.path / 'metrics.jsonl',
      config=config.to_dict(),
      title=f'{config.task}, {config.arm}, seed {config.seed}',
    )

  async def close(self) -> None:
    """Stops what runs, waits for the last checkpoint and frees the directory."""
    if hasattr(self, 'rollouts'):
      await self.rollouts.close()
      await self._evaluator.close()
    for sampler in self.samplers:
      await sampler.close()
    for executor in (self._sampling, self._updating):
      if executor is not None:
        executor.shutdown()
    self._checkpoints.wait()
    self._checkpoints.close()
    self.writer.close()
    self.progress.close()
    self.workdir.close()

  async def in_update_worker(self, work: Callable[[], _T]) -> _T:
    """Runs `work` where the update runs; in lockstep, here."""
    if self._updating is None:
      return work()
    return await asyncio.get_running_loop().run_in_executor(self._updating, work)

  def _make_rollouts(self) -> RolloutSource:
    config = self.plan.config
    options = factories.make_rollout_settings(config, self.plan.sampling, self.workdir.incarnation)
    state = self._meta['rollouts']
    if self._lockstep:
      return LockstepRollouts(
        self.plan.task,
        self.samplers,
        options,
        lag=config.rollouts.lag_updates,
        pin=self._pin,
        state=state,
      )
    limits = AsyncLimits(
      in_flight_batches=config.rollouts.in_flight_batches,
      buffered_batches=config.rollouts.buffered_batches,
      max_staleness_updates=config.rollouts.max_staleness_updates,
    )
    return AsyncRollouts(
      self.plan.task,
      self.samplers,
      options,
      limits=limits,
      update_of=self._update_of,
      state=state,
    )

  async def _pin(self, update: int) -> int:
    """Makes every sampler serve the weights of `update`. Returns their publication number."""
    version = self._follower.find(update, self.workdir.starts)
    if version is None:
      raise ValueError(f'the store holds no publication of update {update}')
    for sampler in self.samplers:
      await sampler.pin(version)
    return version.number

  def _make_writer(self, keep_through: int | None) -> Writer:
    config, path = self.plan.config, self.workdir.path
    writers: list[Writer] = [
      JsonlWriter(path / 'metrics.jsonl', keep_through=keep_through),
      TensorBoardWriter(path / 'tensorboard', keep_through=keep_through),
    ]
    if config.wandb_project:
      writers.append(
        WandbWriter(
          project=config.wandb_project,
          name=path.name,
          run_id=path.name,
          directory=path,
          config=config.to_dict(),
        )
      )
    return MultiWriter(writers)


def _evaluation_seed(seed: int, update: int) -> int:
  """Returns the seed of one evaluation: a number of its own per run and update."""
  return seed * 1_000_003 + update


def backend() -> str:
  """Returns what JAX runs on, for the first line of a run."""
  return f'{len(jax.devices())} x {jax.devices()[0].device_kind}'
