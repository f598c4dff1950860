"""One training run: what it owns, and what the loop has each part of it do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax

from mimo import keys
from mimo.evaluation import evaluate as evaluation
from mimo.experiments import factories, hosts, servers
from mimo.experiments.exits import Exits
from mimo.experiments.learner import PendingUpdate
from mimo.experiments.prepare import Plan, start
from mimo.experiments.publications import Publications
from mimo.experiments.records import Records
from mimo.experiments.workdir import Workdir
from mimo.rollouts.base import Batch
from mimo.rollouts.source import RolloutSource
from mimo.samplers.base import PinnableSampler, check_contract
from mimo.samplers.pace import DelayedFeed
from mimo.trainer.update import LOGITS_DTYPE
from mimo.types import Version
from mimo.weights.checkpoints import policy_meta

# On a virtual clock, all that is due when an update ends happens before its weights are published:
# nothing then depends on what the loop does in between, such as an evaluation.
_SETTLE_SECS = 1e-6

_T = TypeVar('_T')


class _Unrecorded(NamedTuple):
  """An update whose numbers are still to be taken: the arguments of `Records.update`."""

  step: int
  batch: Batch
  costs: dict[str, float]
  pending: PendingUpdate


class Run:
  """The resources of a run. Used on one event loop; `exits` closes them, last opened first."""

  def __init__(self, plan: Plan, workdir: Workdir, exits: Exits) -> None:
    """Restores the newest checkpoint, or starts from the policy.

    Raises ValueError where the checkpoint or the store cannot be gone on from.
    """
    self.plan = plan
    self._exits = exits
    schedule = plan.schedule
    plan.peers.tell(hosts.BEGIN)
    try:
      self._checkpoints, step, state, self._meta = start(plan, workdir.path)
    except BaseException:  # the others wait for what comes next
      plan.peers.tell(hosts.STOP)
      raise
    exits.own(self._checkpoints.close)
    exits.own(self._checkpoints.wait)
    # Before checkpoints are waited for, which the others then do as well.
    exits.own(lambda: plan.peers.tell(hosts.STOP))
    self.learner = plan.learner_of(state)
    self.start = step or 0
    self._saved = self.start
    workdir.begin(self.start)
    self._incarnation = workdir.incarnation
    self._servers_dir = workdir.path / 'servers'
    self.publications = Publications(
      workdir.path / 'store', plan.policy, plan.views, workdir.starts
    )
    self._first = schedule.first_update(self.start)
    self.publications.check_held(range(self._first, self.start))
    self.records = Records(plan.experiment, workdir.path, step=step, ledger=self._meta['ledger'])
    exits.own(self.records.close)
    exits.own(self.settle)
    # One worker for every native sampler and one for the update; else there are no threads.
    self._sampling, self._updating = (
      _thread(name, exits) if schedule.threads else None for name in ('sampler', 'update')
    )
    self.samplers: tuple[PinnableSampler, ...] = ()
    self._feeds: tuple[DelayedFeed, ...] = ()
    self._evaluator: PinnableSampler | None = None
    self.rollouts: RolloutSource | None = None
    self._unrecorded: _Unrecorded | None = None
    self._booked_at = 0.0

  async def open(self) -> None:
    """Publishes the weights, starts the samplers and makes the rollouts ready.

    Raises FirstPublicationError where samplers would have nothing to serve.
    """
    plan, model = self.plan, self.plan.policy.model
    await self.publish(self.start)
    self.publications.check_started()
    self.samplers, self._feeds = factories.make_samplers(
      plan.experiment,
      self.publications.store,
      model,
      sampling=plan.sampling,
      virtual=plan.schedule.virtual,
      max_tokens=plan.task.max_tokens,
      directory=self._servers_dir,
      executor=self._sampling,
    )
    for feed in self._feeds:
      feed.arrive(self.publications.timeline.version_of[self._first])
    self._evaluator = factories.make_evaluator(
      self.publications.store, model, max_tokens=plan.task.max_tokens, executor=self._sampling
    )
    everyone = (*self.samplers, self._evaluator)
    for sampler in everyone:
      self._exits.own(sampler.close)
      check_contract(sampler.contract, logits_dtype=LOGITS_DTYPE, vocab_size=model.vocab_size)
    self._booked_at = asyncio.get_running_loop().time()
    await asyncio.gather(*(sampler.start() for sampler in everyone))
    rollouts = self._make_rollouts()
    self._exits.own(rollouts.close)
    for update in range(self._first, self.start):
      await rollouts.batch(update)  # which was trained on before this start
      self._booked_at = asyncio.get_running_loop().time()
      await self._elapse()
      self._announce(self.publications.timeline.version_of[update + 1])
    self.rollouts = rollouts

  async def publish(self, update: int) -> None:
    """Publishes the policy as it is now, and deletes what nothing can need any more."""
    needed_from = self._saved - self.plan.schedule.kept_updates
    version = await self._in_update_worker(
      lambda: self.publications.publish(update, self.learner.snapshot(), needed_from=needed_from)
    )
    for view, reason in self.publications.failures.items():
      self.records.note(f'view {view} stays at its last version: {reason}')
    self._announce(version)

  async def batch(self, update: int) -> Batch:
    """Waits for the batch that `update` updates are followed by."""
    assert self.rollouts is not None, 'the run is not open'
    return await self.rollouts.batch(update)

  async def update(self, batch: Batch) -> None:
    """Learns from a batch. While the device does, the numbers of the update before are taken."""
    every = self.plan.experiment.drift_every_updates
    measure = every > 0 and batch.update % every == 0
    costs = self._book(batch)
    pending = await self._in_update_worker(
      lambda: self.learner.update(batch.groups, measure_drift=measure)
    )
    self.settle()
    self._unrecorded = _Unrecorded(batch.update + 1, batch, costs, pending)
    await self._elapse()

  def settle(self) -> None:
    """Writes and shows the newest update, if that is still to be done."""
    unrecorded, self._unrecorded = self._unrecorded, None
    if unrecorded is not None:
      step, batch, costs, pending = unrecorded
      replicas = servers.replica_metrics(self.samplers)
      self.records.update(step, batch, {**pending.scalars(), **costs, **replicas})

  async def evaluate(self, update: int) -> None:
    """Evaluates the published BF16 view of `update`, and says and writes what it found."""
    self.settle()
    version = self.publications.evaluated(update)
    if version is None:  # its publication failed, which was said then
      self.records.note(f'update {update} is not evaluated: it has no {factories.EVALUATION_VIEW}')
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
    self.records.evaluation(update, result)

  def save(self, update: int) -> None:
    """Starts a checkpoint of everything that the run goes on from, once it is open."""
    self.settle()  # a checkpoint's records are there before it is
    if self.rollouts is None or update == self._checkpoints.latest():
      return
    policy = self.plan.policy
    layout = policy.origin.layout if policy.origin else None
    meta = {
      **policy_meta(policy.model, policy.tokenizer_files, layout),
      'rollouts': self.rollouts.state(),
      'ledger': self.records.ledger.state(),
    }
    self.learner.before_save(update)
    self._checkpoints.save(update, self.learner.state, meta)
    # The save before this one is complete: `save` waited for it.
    complete = self._checkpoints.latest()
    self._saved = self._saved if complete is None else complete

  def _make_rollouts(self) -> RolloutSource:
    plan, schedule, timeline = self.plan, self.plan.schedule, self.publications.timeline
    return RolloutSource(
      factories.make_sampled_task(plan.task, schedule.virtual),
      self.samplers,
      dataclasses.replace(plan.rollouts, incarnation=self._incarnation),
      pacing=schedule.pacing,
      update_of=timeline.update_of,
      version_of=timeline.version_of,
      state=None if schedule.redraws else self._meta['rollouts'],
    )

  def _announce(self, version: Version) -> None:
    """Has the version arrive at the replicas that do not look for themselves."""
    for feed in self._feeds:
      feed.announce(version)

  async def _elapse(self) -> None:
    """Waits for as long as an update takes, beyond what it took."""
    await asyncio.sleep(self.plan.schedule.update_secs + _SETTLE_SECS)

  def _book(self, batch: Batch) -> dict[str, float]:
    """Books a batch's turns, and the time that replicas were held since the last booking."""
    now = asyncio.get_running_loop().time()
    elapsed_secs, self._booked_at = now - self._booked_at, now
    return self.records.book(batch.stats, elapsed_secs)

  async def _in_update_worker(self, work: Callable[[], _T]) -> _T:
    """Runs `work` where the update runs; without threads, here."""
    if self._updating is None:
      return work()
    return await asyncio.get_running_loop().run_in_executor(self._updating, work)


@contextlib.contextmanager
def guarded() -> Iterator[None]:
  """Refuses transfers to a device, or between devices, that nobody asked for, on this thread.

  The other direction is left alone: a CPU, which is all that this was tried on, has no such
  transfers, so that one that was missed would end a run on a GPU.
  """
  with (
    jax.transfer_guard_host_to_device('disallow'),
    jax.transfer_guard_device_to_device('disallow'),
  ):
    yield


def _thread(name: str, exits: Exits) -> concurrent.futures.Executor:
  """Returns an executor of one thread, which is guarded for as long as it lives."""
  held: list[Any] = []

  def guard() -> None:
    held.append(guarded())
    held[0].__enter__()

  executor = concurrent.futures.ThreadPoolExecutor(1, name, initializer=guard)
  exits.own(executor.shutdown)
  return executor


def _evaluation_seed(seed: int, update: int) -> int:
  """Returns the seed of one evaluation: a number of its own per run and update."""
  return int(keys.key('evaluation of update', seed, update)[0])
