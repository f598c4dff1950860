"""The parts of one training run, and what the loop does with several of them at once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import pathlib
from collections.abc import Callable
from typing import TypeVar

from mimo import fleet, keys
from mimo.evaluation import evaluate as evaluation
from mimo.experiments import factories, hosts, records, servers
from mimo.experiments.prepare import Plan, start
from mimo.experiments.schema import plain
from mimo.experiments.workdir import Workdir
from mimo.rollouts.base import Batch
from mimo.rollouts.source import RolloutSource
from mimo.rollouts.versions import live_updates
from mimo.samplers.base import PinnableSampler, check_contract
from mimo.samplers.pace import DelayedFeed
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

# On a virtual clock, all that is due when an update ends happens before its weights are published:
# nothing then depends on what the loop does in between, such as an evaluation.
_SETTLE_SECS = 1e-6

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
    plan, workdir, experiment = self.plan, self.workdir, self.plan.experiment
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
    self._first = plan.schedule.first_update(self.start)
    for update in range(self._first, self.start):
      if update not in self._version_of:
        raise ValueError(
          f'the store holds no publication of update {update}; expected every one from '
          f'{self._first} to {self.start}: what led to here is drawn again'
        )
    self._saved = self.start
    self.ledger = Ledger([pool.name for pool in experiment.fleet])
    if self._meta['ledger'] is not None:
      self.ledger.restore(self._meta['ledger'])
    self.writer = records.make_writer(experiment, workdir.path, keep_through=step)
    self.evaluated = records.evaluated_updates(workdir.path)
    self.progress = Progress(experiment.updates, done=self.start, stream=None)
    # One worker for every native sampler and one for the update; else there are no threads.
    self._sampling, self._updating = (
      concurrent.futures.ThreadPoolExecutor(1, name) if plan.schedule.threads else None
      for name in ('sampler', 'update')
    )
    self.samplers: tuple[PinnableSampler, ...] = ()
    self._feeds: tuple[DelayedFeed, ...] = ()
    self.rollouts: RolloutSource | None = None
    self._evaluator: PinnableSampler | None = None
    self._booked_at = 0.0

  async def open(self) -> None:
    """Publishes the weights, starts the samplers and makes the rollouts ready."""
    plan = self.plan
    await self.publish(self.start)
    model = plan.policy.model
    self.samplers, self._feeds = factories.make_samplers(
      plan.experiment,
      self.store,
      model,
      sampling=plan.sampling,
      virtual=plan.schedule.virtual,
      max_tokens=plan.task.max_tokens,
      directory=self.workdir.path / 'servers',
      executor=self._sampling,
    )
    for feed in self._feeds:
      feed.arrive(self._version_of[self._first])
    self._evaluator = factories.make_evaluator(
      self.store,
      model,
      max_tokens=plan.task.max_tokens,
      executor=self._sampling,
    )
    for sampler in (*self.samplers, self._evaluator):
      check_contract(sampler.contract, logits_dtype=LOGITS_DTYPE, vocab_size=model.vocab_size)
    self._booked_at = asyncio.get_running_loop().time()
    await asyncio.gather(*(sampler.start() for sampler in (*self.samplers, self._evaluator)))
    self.rollouts = self._make_rollouts()
    for update in range(self._first, self.start):
      await self.rollouts.batch(update)  # which was trained on before this start
      await self._elapse()
      self._announce(self._version_of[update + 1])
      self._booked_at = asyncio.get_running_loop().time()

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
    self._announce(version)
    return version

  def _retire(self) -> None:
    """Keeps the newest publications, and what is sampled from yet or by a run that is resumed."""
    known = self._follower.versions()
    kept = {version.number for version in known[-_KEPT_VERSIONS:]}
    oldest = self._saved - self.plan.schedule.kept_updates
    kept |= {version.number for version in known if version.update >= oldest}
    self._publisher.retain(kept)

  def _announce(self, version: Version) -> None:
    """Has the version arrive at the replicas that do not look for themselves."""
    for feed in self._feeds:
      feed.announce(version)

  async def _elapse(self) -> None:
    """Waits for as long as an update takes, beyond what it took."""
    await asyncio.sleep(self.plan.schedule.update_secs + _SETTLE_SECS)

  async def batch(self, update: int) -> Batch:
    """Waits for the batch that `update` updates are followed by."""
    assert self.rollouts is not None, 'the run is not open'
    return await self.rollouts.batch(update)

  async def update(self, batch: Batch) -> dict[str, float]:
    """Learns from a batch. Returns the scalars of the update."""
    every = self.plan.experiment.drift_every_updates
    measure = every > 0 and batch.update % every == 0
    scalars = await self.in_update_worker(
      lambda: self.learner.update(batch.groups, measure_drift=measure)
    )
    await self._elapse()
    return scalars

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
      samples=self.plan.experiment.evaluation.samples,
      seed=_evaluation_seed(self.plan.experiment.seed, update),
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
    costs = self._book(stats.turns())
    for error in stats.errors:
      self.progress.note(f'lost: {error}')
    speed = {names.SAMPLER_SPEED: stats.sampled_tokens_per_sec}
    scalars = scalars | of_batch | of_sampling | costs | speed
    scalars |= servers.replica_metrics(self.samplers)
    self.writer.scalars(step, scalars)
    self.writer.histograms(step, histograms | more)
    self.writer.flush()
    self.progress.update(step, scalars)

  def _book(self, turns: dict[str, int]) -> dict[str, float]:
    """Books turns, and the time that replicas were held since the last booking."""
    pools = self.plan.experiment.fleet
    now = asyncio.get_running_loop().time()
    held = {pool.name: now - self._booked_at for pool in pools}
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
    # The save before this one is complete: `save` waited for it.
    complete = self._checkpoints.latest()
    self._saved = self._saved if complete is None else complete

  def write_report(self) -> pathlib.Path | None:
    """Draws the report of what metrics.jsonl holds; None where it holds nothing yet."""
    experiment = self.plan.experiment
    if not writers.read(self.workdir.path / 'metrics.jsonl'):
      return None
    return report.write(
      self.workdir.path / 'report.html',
      metrics=self.workdir.path / 'metrics.jsonl',
      config=plain(experiment),
      title=f'{experiment.task}, {experiment.arm}, seed {experiment.seed}',
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
    schedule = self.plan.schedule
    return RolloutSource(
      factories.make_sampled_task(self.plan.task, schedule.virtual),
      self.samplers,
      dataclasses.replace(self.plan.rollouts, incarnation=self.workdir.incarnation),
      pacing=schedule.pacing,
      update_of=self._update_of,
      version_of=self._version_of,
      state=None if schedule.redraws else self._meta['rollouts'],
    )


def _evaluation_seed(seed: int, update: int) -> int:
  """Returns the seed of one evaluation: a number of its own per run and update."""
  return int(keys.key('evaluation of update', seed, update)[0])
