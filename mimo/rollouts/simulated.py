"""Sampling beside training on a virtual clock: an event simulation of an asynchronous fleet.

Tokens are really drawn, by the weights that a replica would serve at that moment: each replica runs
step after step, a step takes as long as its pool's speed says, and between two steps the replica
takes up the newest weights that have reached it. The trainer asks for a batch, updates for as long
as is stated, and asks again. So long episodes are staler than short ones and span versions, also
within a turn, and staleness is a result. Back-pressure is that of `AsyncRollouts`.

There are no threads and no real clock: what is sampled is a function of the seed and the weights.
Nothing runs between two batches. A source made from a state goes on bit for bit.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from mimo.rollouts.backlog import AsyncLimits, Backlog
from mimo.rollouts.base import Batch, RolloutError, RolloutSettings
from mimo.rollouts.cursor import Cursor
from mimo.rollouts.freeze import freeze, thaw
from mimo.rollouts.groups import GroupRunner
from mimo.rollouts.keys import session_key
from mimo.rollouts.tally import Tally
from mimo.rollouts.turnlog import Answer, Member, TurnLog, dump, parse, parse_answer
from mimo.rollouts.virtual import NEVER, Asked, Clock, PoolSpeed, Replica, Running, VirtualTimes
from mimo.samplers.base import SamplerContract, SamplerError, SteppedSampler
from mimo.tasks.base import Task
from mimo.types import SamplingParams, TurnSample

# Rounds of the event loop that environments get before it is taken that they wait for something.
_PATIENT_ROUNDS = 1000
_WAIT_SECS = 0.001

# Makes a replica serve the weights of one update of this run's history from its next step on.
Activate = Callable[[int, int], None]


class _Door:
  """The `Sampler` that episodes see of one replica: turns go through the simulation."""

  def __init__(self, simulation: SimulatedRollouts, replica: int, contract: SamplerContract):
    self._simulation = simulation
    self._replica = replica
    self.contract = contract

  @property
  def version(self) -> int:
    raise NotImplementedError('a simulated replica says its version with each token')

  async def start(self) -> None:
    """Does nothing."""

  async def close(self) -> None:
    """Does nothing."""

  async def sample(
    self, session: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> TurnSample:
    # Which start of the run it is leads a session's name, and must not matter.
    asked = Asked(session.partition('/')[2], tokens, params, key)
    return await self._simulation.sample(self._replica, asked)

  async def release(self, session: str) -> None:
    self._simulation.release(self._replica, session.partition('/')[2])


class SimulatedRollouts:
  """A RolloutSource on a virtual clock. Groups are handed out in the order in which they end."""

  def __init__(
    self,
    task: Task,
    samplers: Sequence[SteppedSampler],
    settings: RolloutSettings,
    *,
    limits: AsyncLimits,
    speeds: Sequence[PoolSpeed],
    times: VirtualTimes,
    activate: Activate,
    update_of: MutableMapping[int, int],
    state: Mapping[str, Any] | None = None,
  ) -> None:
    """Opens a source; no sampler is touched before the first batch.

    Args:
      task: where prompts and rewards come from; its environments answer equal turns equally.
      samplers: one per replica, in an order that never changes.
      settings: of groups and episodes; episodes have no bound in real time.
      limits: of back-pressure.
      speeds: one per replica.
      times: of the rest.
      activate: makes a replica serve an update's weights.
      update_of: publication number -> updates applied to its weights, as in `AsyncRollouts`.
      state: what `state` of an earlier source returned.
    """
    if len(speeds) != len(samplers):
      raise ValueError(f'{len(speeds)} speeds for {len(samplers)} replicas; expected one each')
    if settings.wall_clock_secs is not None:
      raise ValueError(
        f'wall_clock_secs is {settings.wall_clock_secs}; expected None: the clock is virtual'
      )
    self._settings = settings
    self._times = times
    self._activate = activate
    self._replicas = [Replica(s, speed) for s, speed in zip(samplers, speeds, strict=True)]
    self._tally = Tally(
      [s.contract.source.pool for s in samplers], state and state['tally']['totals']
    )
    doors = [_Door(self, i, sampler.contract) for i, sampler in enumerate(samplers)]
    self._runner = GroupRunner(task, doors, settings, self._tally)
    self._cursor = Cursor(
      split=settings.split,
      size=task.size(settings.split),
      seed=settings.seed,
      state=state and state['cursor'],
    )
    # Publications that only what was under way knows of: the store may have let go of them.
    self._known_before: dict[int, int] = {}
    self._backlog = Backlog(
      settings,
      limits,
      cursor=self._cursor,
      tally=self._tally,
      update_of=collections.ChainMap(self._known_before, update_of),
    )
    self._saved = state
    self._clock = Clock()
    self._groups: dict[int, Running] = {}  # outstanding ones, in the order of their starts
    self._log = TurnLog()
    self._played: dict[str, int] = {}  # answers that an open session has had
    self._asked: dict[str, tuple[Asked, asyncio.Future[Answer]]] = {}
    self._sought: dict[Member, int] = {}  # when each member last sought a place, as a count
    self._open = self._restoring = self._closed = False

  async def batch(self, update: int) -> Batch:
    """Lets time pass until the trainer asks and enough groups are ready, and hands them out."""
    if not self._open:
      await self._begin(update)
    clock = self._clock
    await self._settle()
    while True:
      if clock.now >= clock.asks_at:
        ready = self._backlog.take(update)
        if ready is not None:
          break
        await self._settle()  # others take the place of what was dropped
      self._start_steps()
      self._advance()
      await self._settle()
    self._forget()
    slowest = max(replica.speed.publication_secs for replica in self._replicas)
    secs, wait_secs = clock.hand_out(update, self._times.update_secs, slowest)
    groups = tuple(group for group, _ in ready)
    staleness = tuple(ranges for _, parts in ready for ranges in parts)
    stats = self._tally.drain(
      groups,
      staleness,
      secs=secs,
      wait_secs=wait_secs,
      in_flight=self._backlog.in_flight,
      buffered=self._backlog.buffered,
    )
    return Batch(update, groups, staleness, stats)

  def state(self) -> dict[str, Any]:
    """Returns everything that is under way; see RolloutSource. Prompts are not sampled again."""
    if not self._open and self._saved is not None:
      return dict(self._saved)
    return {
      'cursor': self._cursor.state(),
      'tally': self._tally.state(),
      'served': [replica.served for replica in self._replicas],
      'under_way': freeze(self._under_way()) if self._open else None,
    }

  def oldest_update(self) -> int:
    """Returns the oldest update whose weights a replica serves, -1 before the first batch."""
    return min(replica.served for replica in self._replicas)

  async def close(self) -> None:
    """Cancels what is under way and waits for it."""
    self._closed = True
    tasks = [task for group in self._groups.values() for task in group.tasks.values()]
    for task in tasks:
      task.cancel()
    if tasks:
      await asyncio.wait(tasks)

  # What happens, event by event.

  def _start_steps(self) -> None:
    """Starts a step on each replica that has something to do, under the newest weights it has."""
    for index, replica in enumerate(self._replicas):
      if replica.idle:
        newest = self._clock.landed(replica.speed.publication_secs)
        if newest > replica.served:
          self._serve(index, newest)
        replica.start(self._clock.now)

  def _serve(self, index: int, update: int) -> None:
    self._activate(index, update)
    self._replicas[index].served = update

  def _advance(self) -> None:
    """Jumps to the next event and lets it happen."""
    clock = self._clock
    due = [replica.ends_at for replica in self._replicas] + [clock.next_arrival()]
    if clock.asks_at > clock.now:
      due.append(clock.asks_at)
    if min(due) == NEVER:
      raise RolloutError('nothing is sampled and a batch is asked for; expected groups under way')
    clock.now = min(due)
    for replica in self._replicas:
      if replica.ends_at <= clock.now:
        for session, answer in replica.end():
          self._log.answer(session, answer)
          if session in self._asked:
            self._asked.pop(session)[1].set_result(answer)
    for index, session in clock.arrivals():
      # Its session may be gone.
      if session in self._asked:
        self._replicas[index].ask(self._asked[session][0])

  async def _settle(self) -> None:
    """Lets sessions act on what happened, and starts groups in the place of those that ended."""
    while True:
      await self._rest()
      self._collect()
      if not self._backlog.room:
        return
      while self._backlog.room:
        prompt = self._backlog.start()
        group = self._groups[prompt.group] = Running(prompt, self._settings.members)
        for member in range(self._settings.members):
          self._play(group, member)

  async def _rest(self) -> None:
    """Waits until every session waits for a sampler or a place, or has ended.

    A cancellation is put off until then, so that it leaves a state to go on from.
    """
    cancelled: asyncio.CancelledError | None = None
    rounds = 0
    while self._acting():
      try:
        await asyncio.sleep(0 if rounds < _PATIENT_ROUNDS else _WAIT_SECS)
      except asyncio.CancelledError as error:
        cancelled = error
      rounds += 1
    if self._closed:
      raise RolloutError('the rollouts were closed')
    if cancelled is not None:
      raise cancelled

  def _acting(self) -> bool:
    live = sum(group.live() for group in self._groups.values())
    return live > len(self._asked) + self._runner.seats.waiting

  def _collect(self) -> None:
    """Takes in the groups whose members have all ended, in the order of their starts."""
    for group in list(self._groups.values()):
      if not group.collected and group.complete():
        results = [group.tasks[m].result() for m in range(self._settings.members)]
        group.collected = True
        self._backlog.end(group.prompt, self._runner.finish(group.prompt, results))
    self._forget()

  def _forget(self) -> None:
    """Lets go of the groups that were handed out or dropped."""
    for number in [n for n in self._groups if not self._cursor.is_outstanding(n)]:
      for member in self._groups.pop(number).tasks:
        self._log.forget(Member(number, member))
        self._sought.pop(Member(number, member), None)

  # Sessions.

  def _play(self, group: Running, member: int) -> None:
    prompt = group.prompt
    key = session_key(seed=self._settings.seed, group=prompt.group, member=member)
    place = functools.partial(self._place, Member(prompt.group, member))
    group.tasks[member] = asyncio.ensure_future(self._runner.member(prompt, member, key, place))

  def _place(self, member: Member, number: int) -> int | None:
    """Where an attempt was before a resume; else the least-loaded replica takes it."""
    self._sought[member] = self._clock.count()
    return self._log.replica(member, number)

  async def sample(self, replica: int, asked: Asked) -> TurnSample:
    """Answers a session's turn: from the log, or when the replica has drawn it."""
    session = asked.session
    answers, num = self._log.attempt(session, replica).answers, self._played.get(session, 0)
    if num == len(answers):
      future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
      self._asked[session] = (asked, future)
      if not self._restoring:
        # The first turn follows from no answer of the environment.
        self._clock.arrive(self._times.answer_secs if num else 0.0, replica, session)
      try:
        await future
      finally:
        self._asked.pop(session, None)
    self._played[session] = num + 1
    answer = answers[num]
    if isinstance(answer, SamplerError):
      raise answer
    return answer

  def release(self, replica: int, session: str) -> None:
    """Frees a session."""
    self._played.pop(session, None)
    self._replicas[replica].release(session)

  # From one source to the next.

  async def _begin(self, update: int) -> None:
    """Serves the weights that are trained on, or what was served, and plays on from there."""
    under_way = self._saved and self._saved['under_way']
    for index in range(len(self._replicas)):
      self._serve(index, self._saved['served'][index] if self._saved and under_way else update)
    if under_way:
      await self._restore(thaw(under_way))
    self._open = True
    self._saved = None

  def _under_way(self) -> dict[str, Any]:
    members = {
      Member(n, m): task for n, group in self._groups.items() for m, task in group.tasks.items()
    }
    seated = {parse(session)[0] for session in self._asked}
    waiting = [m for m, task in members.items() if not task.done() and m not in seated]
    return {
      'clock': self._clock.state(),
      'groups': list(self._groups),
      'collected': [n for n, group in self._groups.items() if group.collected],
      'ended': [m for m, task in members.items() if task.done()],
      'seated': [m for m in members if m in seated],
      'waiting': sorted(waiting, key=lambda m: self._sought[m]),
      'log': self._log.state(),
      'updates': [list(known) for known in self._backlog.update_of.items()],
      'replicas': [replica.state(dump) for replica in self._replicas],
      'backlog': self._backlog.state(),
    }

  async def _restore(self, saved: Mapping[str, Any]) -> None:
    """Plays what was under way up to where it was."""
    self._clock.restore(saved['clock'])
    self._log.restore(saved['log'])
    self._known_before |= dict(saved['updates'])
    prompts = {p.group: p for p in (self._backlog.start() for _ in saved['groups'])}
    for number in saved['groups']:
      self._groups[number] = Running(prompts[number], self._settings.members)
    self._restoring = True
    # What ended needs a place for a moment; who waits for one comes last, and in order.
    for stage in ('ended', 'seated', 'waiting'):
      for number, member in saved[stage]:
        self._play(self._groups[number], member)
      await self._rest()
    self._restoring = False
    asked = {session: turn for session, (turn, _) in self._asked.items()}
    for replica, state in zip(self._replicas, saved['replicas'], strict=True):
      replica.restore(state, asked, parse_answer)
    for group in (self._groups[number] for number in saved['collected']):
      results = [group.tasks[m].result() for m in range(self._settings.members)]
      group.collected = True
      self._backlog.end(group.prompt, self._runner.finish(group.prompt, results))
    self._backlog.restore(saved['backlog'])
    assert self._saved is not None
    self._tally.restore(self._saved['tally'])


def needed_update(state: Mapping[str, Any]) -> float:
  """Returns the oldest update whose views a source needs that goes on from a state of any source.

  Infinity where it needs none.
  """
  return min(state['served'], default=math.inf) if 'served' in state else math.inf
