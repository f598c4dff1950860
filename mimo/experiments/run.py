"""The parts of one training run, and what the loop does with several of them at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import math
import pathlib
import time
from collections.abc import Callable
from typing import TypeVar

from mimo import fleet, keys
from mimo.evaluation import evaluate as evaluation
from mimo.experiments import factories, hosts, records, servers, virtual
from mimo.experiments.prepare import Plan, start
from mimo.experiments.workdir import Workdir
from mimo.rollouts.asynchronous import AsyncRollouts
from mimo.rollouts.base import Batch, RolloutSource
from mimo.rollouts.lockstep import LockstepRollouts
from mimo.rollouts.simulated import SimulatedRollouts, needed_update
from mimo.rollouts.versions import live_updates
from mimo.samplers.base import PinnableSampler, check_contract
from mimo.samplers.stepped import NativeSteppedSampler
from mimo.telemetry import metrics, names, report, writers
from mimo.telemetry.ledger import Ledger
from mimo.telemetry.progress import Progress, evaluation_line
from mimo.trainer.update import LOGITS_DTYPE
from mimo.types import Version
from mimo.weights.checkpoints import policy_meta
from mimo.weights.publication import Publisher, ViewFollower
from mimo.weights.store import FileStore

# Publications that stay in the store: a replica may be this far behind while it loads.
_KEPT_VERSIONS = 4

_T = TypeVar('_T')


class Run:
  """Owns a run's resources from its start to its end. Used on one event loop."""

  def __init__(self, plan: Plan, workdir: Workdir) -> None:
    """Restores the newest checkpoint, or starts from the policy."""
    self.plan = plan
    self.workdir = workdir
    plan.peers.tell(hosts.BEGIN)
    self._checkpoints, step, state, self._meta = start(plan, workdir.path)
    self.learner = plan.learner_of(state)
    try:
      self._set_up(step)
    except BaseException:  # the others, who have come as far as this, wait for what comes next
      plan.peers.tell(hosts.STOP)
      raise

  def _set_up(self, step: int | None) -> None:
    plan, workdir, config = self.plan, self.workdir, self.plan.config
    self._schedule = config.rollouts.schedule
    self.start = step or 0
    workdir.begin(self.start)
    self.store = FileStore(workdir.path / 'store')
    self._publisher = Publisher(
      self.store,
      plan.policy.model,
      plan.policy.tokenizer_files,
      plan.views,
      workdir.incarnation,
      origin=plan.policy.origin,
    )
    self._follower = ViewFollower(self.store, factories.EVALUATION_VIEW)
    known = self._follower.versions()
    self._update_of = live_updates(known, workdir.starts)
    self._version_of = {v.update: v for v in known if v.number in self._update_of}
    self._saved = self.start
    # By checkpoint: the oldest update whose views a run needs that goes on from it.
    self._needed: dict[int, float] = {}
    if step is not None:
      self._needed[step] = needed_update(self._meta['rollouts'])
    self.ledger = Ledger([pool.name for pool in plan.pools])
    if self._meta['ledger'] is not None:
      self.ledger.restore(self._meta['ledger'])
    self.writer = records.make_writer(config, workdir.path, keep_through=step)
    self.evaluated = records.evaluated_updates(workdir.path)
    self.progress = Progress(config.updates, done=self.start, stream=None)
    # One worker for every native sampler and one for the update; else there are no threads.
    self._sampling, self._updating = (
      concurrent.futures.ThreadPoolExecutor(1, name) if self._schedule == 'async' else None
      for name in ('sampler', 'update')
    )
    self.samplers: tuple[PinnableSampler, ...] = ()
    self.stepped: tuple[NativeSteppedSampler, ...] = ()
    self.rollouts: RolloutSource | None = None
    self._evaluator: PinnableSampler | None = None
    self._booked_at = time.monotonic()

  async def open(self) -> None:
    """Publishes the weights, starts the samplers and makes the rollouts ready."""
    plan = self.plan
    await self.publish(self.start)
    model = plan.policy.model
    if self._schedule == 'simulated':
      self.stepped = virtual.make_samplers(
        plan.config, plan.pools, self.store, model, max_tokens=plan.task.max_tokens
      )
    else:
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
    contracts = [s.contract for s in (*self.samplers, self._evaluator)]
    for contract in (*contracts, *(s.contract for s in self.stepped)):
      check_contract(contract, logits_dtype=LOGITS_DTYPE, vocab_size=model.vocab_size)
    self._booked_at = time.monotonic()
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
    self._version_of[update] = version
    await self.in_update_worker(self._retire)
    return version

  def _retire(self) -> None:
    """Keeps the newest publications, and what is sampled from yet or by a run that is resumed."""
    known = self._follower.versions()
    kept = {version.number for version in known[-_KEPT_VERSIONS:]}
    oldest = self._oldest_update()
    kept |= {version.number for version in known if version.update >= oldest}
    self._publisher.retain(kept)

  def _oldest_update(self) -> float:
    """Returns the oldest update whose weights may be asked for again, if any may."""
    if self._schedule == 'lockstep':
      return self._saved - self.plan.config.rollouts.lag_updates
    needed = [self._needed[self._saved]] if self._saved in self._needed else []
    if isinstance(self.rollouts, SimulatedRollouts):
      needed.append(self.rollouts.oldest_update())
    return min(needed, default=math.inf)

  async def batch(self, update: int) -> Batch:
    """Waits for the batch that `update` updates are followed by."""
    assert self.rollouts is not None, 'the run is not open'
    return await self.rollouts.batch(update)

  async def update(self, batch: Batch) -> dict[str, float]:
    """Learns from a batch. Returns the scalars of the update."""
    every = self.plan.config.drift_every_updates
    measure = every > 0 and batch.update % every == 0
    return await self.in_update_worker(
      lambda: self.learner.update(batch.groups, measure_drift=measure)
    )

  async def evaluate(self, update: int) -> None:
    """Evaluates the published BF16 view of `update`, and says and writes what it found."""
    version = self._follower.find(update, self.workdir.starts)
    if version is None:  # its publication failed, which was said then
      self.progress.note(f'update {update} is not evaluated: it has no {factories.EVALUATION_VIEW}')
      return
    assert self._evaluator is not None, 'the run is not open'
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
    self.evaluated.add(update)

  def record(self, step: int, batch: Batch, scalars: dict[str, float]) -> None:
    """Books, writes and shows one update. `step` counts updates applied, this one included."""
    stats = batch.stats
    of_batch, histograms = metrics.batch_metrics(batch.groups, batch.staleness)
    of_sampling, more = metrics.rollout_metrics(dataclasses.asdict(stats))
    costs = self._book(stats.turns(), stats.secs)
    for error in stats.errors:
      self.progress.note(f'lost: {error}')
    speed = {names.SAMPLER_SPEED: stats.sampled_tokens_per_sec}
    scalars = scalars | of_batch | of_sampling | costs | speed
    scalars |= servers.replica_metrics(self.samplers)
    self.writer.scalars(step, scalars)
    self.writer.histograms(step, histograms | more)
    self.writer.flush()
    self.progress.update(step, scalars)

  def _book(self, turns: dict[str, int], secs: float) -> dict[str, float]:
    """Books turns, and the time that replicas were held since the last booking.

    What is simulated holds them for the virtual `secs` since the last batch.
    """
    pools = self.plan.pools
    now = time.monotonic()
    elapsed = secs if self._schedule == 'simulated' else now - self._booked_at
    held = {pool.name: elapsed * pool.replicas for pool in pools}
    self._booked_at = now
    return self.ledger.add(
      turns=turns,
      modelled_usd=fleet.modelled_usd(pools, turns),
      billed_usd=fleet.billed_usd(pools, held),
    )

  def save(self, update: int) -> None:
    """Starts a checkpoint of everything that the run goes on from, once it is open."""
    if self.rollouts is None or update == self._checkpoints.latest():
      return
    policy = self.plan.policy
    layout = policy.origin.layout if policy.origin else None
    meta = {
      **policy_meta(policy.model, policy.tokenizer_files, layout),
      'rollouts': self.rollouts.state(),
      'ledger': self.ledger.state(),
    }
    self.learner.before_save(update)
    self._checkpoints.save(update, self.learner.state, meta)
    self._needed[update] = needed_update(meta['rollouts'])
    # The save before this one is complete: `save` waited for it.
    complete = self._checkpoints.latest()
    self._saved = self._saved if complete is None else complete

  def write_report(self) -> pathlib.Path | None:
    """Draws the report of what metrics.jsonl holds; None where it holds nothing yet."""
    config = self.plan.config
    if not writers.read(self.workdir.path / 'metrics.jsonl'):
      return None
    return report.write(
      self.workdir.path / 'report.html',
      metrics=self.workdir.path / 'metrics.jsonl',
      config=config.to_dict(),
      title=f'{config.task}, {config.arm}, seed {config.seed}',
    )

  async def close(self) -> None:
    """Stops what runs, waits for the last checkpoint and frees the directory."""
    try:
      if self.rollouts is not None:
        await self.rollouts.close()
      for sampler in (*self.samplers, *([self._evaluator] if self._evaluator else [])):
        await sampler.close()
    finally:  # the run's other processes wait for this one, whatever a sampler says as it closes
      for executor in (self._sampling, self._updating):
        if executor is not None:
          executor.shutdown()
      self.learner.close()
    self._checkpoints.wait()
    self._checkpoints.close()
    self.writer.close()
    self.progress.close()
    self.workdir.close()

  async def in_update_worker(self, work: Callable[[], _T]) -> _T:
    """Runs `work` where the update runs; without threads, here."""
    if self._updating is None:
      return work()
    return await asyncio.get_running_loop().run_in_executor(self._updating, work)

  def _make_rollouts(self) -> RolloutSource:
    config = self.plan.config
    options = dataclasses.replace(self.plan.rollouts, incarnation=self.workdir.incarnation)
    state = self._meta['rollouts']
    if self._schedule == 'simulated':
      return SimulatedRollouts(
        self.plan.task,
        self.stepped,
        options,
        limits=self.plan.limits,
        speeds=virtual.make_speeds(config, self.plan.pools),
        times=virtual.make_times(config),
        activate=self._activate,
        update_of=self._update_of,
        state=state,
      )
    if self._schedule == 'lockstep':
      return LockstepRollouts(
        self.plan.task,
        self.samplers,
        options,
        lag=config.rollouts.lag_updates,
        pin=self._pin,
        state=state,
      )
    return AsyncRollouts(
      self.plan.task,
      self.samplers,
      options,
      limits=self.plan.limits,
      update_of=self._update_of,
      state=state,
    )

  def _activate(self, replica: int, update: int) -> None:
    """Makes one simulated replica serve the weights of `update`."""
    if update not in self._version_of:
      raise ValueError(f'the store holds no publication of update {update}')
    self.stepped[replica].activate(self._version_of[update])

  async def _pin(self, update: int) -> int:
    """Makes every sampler serve the weights of `update`. Returns their publication number."""
    version = self._follower.find(update, self.workdir.starts)
    if version is None:
      raise ValueError(f'the store holds no publication of update {update}')
    for sampler in self.samplers:
      await sampler.pin(version)
    return version.number


def _evaluation_seed(seed: int, update: int) -> int:
  """Returns the seed of one evaluation: a number of its own per run and update."""
  return int(keys.key('evaluation of update', seed, update)[0])
