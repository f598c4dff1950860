"""A clock of its own for a simulated fleet: how long things take, and what happens when.

Seconds here are virtual. Nothing waits for them: the clock jumps from event to event.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mimo.samplers.base import SamplerError, Step, SteppedSampler
from mimo.types import PromptRef, SamplingParams, Trajectory, TurnSample

NEVER = math.inf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpeed:
  """How fast a replica of a pool is.

  A decode step of n sessions takes max(1 / session, n / replica) seconds: few sessions are as slow
  as one, many share what the replica can do.

  Attributes:
    session_tokens_per_sec: of one session, at most.
    replica_tokens_per_sec: of all sessions together, at most.
    prefill_tokens_per_sec: known tokens that are not cached yet.
    publication_secs: from the end of an update until the replica serves its weights.
  """

  session_tokens_per_sec: float
  replica_tokens_per_sec: float
  prefill_tokens_per_sec: float
  publication_secs: float

  def __post_init__(self) -> None:
    for name in ('session_tokens_per_sec', 'replica_tokens_per_sec', 'prefill_tokens_per_sec'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} is {getattr(self, name)}; expected a number > 0')
    if not 0 <= self.publication_secs < math.inf:
      raise ValueError(f'publication_secs is {self.publication_secs}; expected a number >= 0')

  def secs(self, step: Step) -> float:
    """Returns how long a step takes."""
    decode = max(
      step.decode_steps / self.session_tokens_per_sec, step.fed_tokens / self.replica_tokens_per_sec
    )
    return decode + step.prefilled_tokens / self.prefill_tokens_per_sec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VirtualTimes:
  """How long the rest takes.

  Attributes:
    update_secs: an update, from its batch to its weights.
    answer_secs: an environment's answer to a turn, before the next turn can be asked for.
  """

  update_secs: float
  answer_secs: float

  def __post_init__(self) -> None:
    for name in ('update_secs', 'answer_secs'):
      if not 0 <= getattr(self, name) < math.inf:
        raise ValueError(f'{name} is {getattr(self, name)}; expected a number >= 0')


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Asked:
  """A turn asked for: the arguments of `SteppedSampler.submit`."""

  session: str
  tokens: np.ndarray
  params: SamplingParams
  key: np.ndarray


class Clock:
  """What time it is, and what is due.

  Attributes:
    now: seconds since the start of the run.
    asks_at: when the trainer asks, or has asked, for its next batch.
  """

  def __init__(self) -> None:
    self.now = 0.0
    self.asks_at = 0.0
    self._handed_out_at = 0.0
    self._updated_at: dict[int, float] = {}  # update -> when its weights are, or were, made
    self._arrivals: list[tuple[float, int, int, str]] = []  # a heap: due, number, replica, session
    self._counted = 0

  def count(self) -> int:
    """Returns numbers that rise."""
    self._counted += 1
    return self._counted

  def arrive(self, delay_secs: float, replica: int, session: str) -> None:
    """Has a session's turn arrive at its replica after a while."""
    heapq.heappush(self._arrivals, (self.now + delay_secs, self.count(), replica, session))

  def next_arrival(self) -> float:
    """Returns when the next turn arrives."""
    return self._arrivals[0][0] if self._arrivals else NEVER

  def arrivals(self) -> Iterator[tuple[int, str]]:
    """Yields (replica, session) of the turns that have arrived by now, and forgets them."""
    while self.next_arrival() <= self.now:
      _, _, replica, session = heapq.heappop(self._arrivals)
      yield replica, session

  def landed(self, publication_secs: float) -> int:
    """Returns the newest update whose weights a replica has, -1 for those it started with."""
    return max(
      (u for u, at in self._updated_at.items() if at + publication_secs <= self.now), default=-1
    )

  def hand_out(self, update: int, update_secs: float, slowest_secs: float) -> tuple[float, float]:
    """Hands out the batch of `update`, which is trained on from now on.

    Args:
      update: updates applied before.
      update_secs: how long it takes.
      slowest_secs: the longest that a publication takes.

    Returns:
      How long it is since the last one, and how long the trainer waited for this one.
    """
    secs, wait_secs = self.now - self._handed_out_at, self.now - self.asks_at
    self._handed_out_at = self.now
    self.asks_at = self.now + update_secs
    newest = self.landed(slowest_secs)
    self._updated_at = {u: at for u, at in self._updated_at.items() if u >= newest}
    self._updated_at[update + 1] = self.asks_at
    return secs, wait_secs

  def state(self) -> dict[str, Any]:
    """Returns a JSON object."""
    return {
      'now': self.now,
      'asks_at': self.asks_at,
      'handed_out_at': self._handed_out_at,
      'updated_at': [[update, at] for update, at in self._updated_at.items()],
      'arrivals': sorted(self._arrivals),
      'counted': self._counted,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes what `state` returned."""
    self.now = state['now']
    self.asks_at = state['asks_at']
    self._handed_out_at = state['handed_out_at']
    self._updated_at = {update: at for update, at in state['updated_at']}
    self._arrivals = [(due, n, replica, session) for due, n, replica, session in state['arrivals']]
    self._counted = state['counted']


class Replica:
  """One replica: its sampler, the step that runs, and the turns that wait for the next.

  Attributes:
    served: updates applied to the weights that it serves.
    ends_at: when its step ends; NEVER while none runs.
  """

  def __init__(self, sampler: SteppedSampler, speed: PoolSpeed) -> None:
    self.sampler = sampler
    self.speed = speed
    self.served = -1
    self.ends_at = NEVER
    self._asked: list[Asked] = []
    self._finished: tuple[tuple[str, TurnSample | SamplerError], ...] = ()

  @property
  def idle(self) -> bool:
    """Whether it could start a step, and has something to do."""
    return self.ends_at == NEVER and bool(self._asked or self.sampler.busy)

  def ask(self, asked: Asked) -> None:
    """Takes a turn, which waits for the next step."""
    self._asked.append(asked)

  def start(self, now: float) -> None:
    """Starts a step. What it draws is known at once, and handed out at its end."""
    for asked in self._asked:
      self.sampler.submit(asked.session, asked.tokens, asked.params, asked.key)
    self._asked = []
    step = self.sampler.step()
    self._finished = step.finished
    self.ends_at = now + self.speed.secs(step)

  def end(self) -> tuple[tuple[str, TurnSample | SamplerError], ...]:
    """Ends the step that runs. Returns the turns that ended with it."""
    finished, self._finished = self._finished, ()
    self.ends_at = NEVER
    return finished

  def release(self, session: str) -> None:
    """Frees a session; a turn of it that waits is forgotten."""
    self._asked = [asked for asked in self._asked if asked.session != session]
    self.sampler.release(session)

  def state(self, dump: Any) -> dict[str, Any]:
    """Returns JSON values and numpy arrays; `dump` turns an answer into such."""
    return {
      'served': self.served,
      'ends_at': None if self.ends_at == NEVER else self.ends_at,
      'asked': [asked.session for asked in self._asked],
      'finished': [[session, dump(answer)] for session, answer in self._finished],
      'sampler': self.sampler.state(),
    }

  def restore(self, state: Mapping[str, Any], asked: Mapping[str, Asked], parse: Any) -> None:
    """Goes on from a state, under the weights served then.

    Args:
      state: what `state` returned.
      asked: the turns of sessions under way, by session.
      parse: the inverse of `dump`.
    """
    self.ends_at = NEVER if state['ends_at'] is None else state['ends_at']
    self._asked = [asked[session] for session in state['asked']]
    self._finished = tuple((session, parse(answer)) for session, answer in state['finished'])
    self.sampler.restore(state['sampler'])


@dataclasses.dataclass(slots=True)
class Running:
  """A group under way.

  Attributes:
    prompt: the task and group.
    members: how many it has.
    tasks: their episodes, by member.
    collected: whether the backlog has it.
  """

  prompt: PromptRef
  members: int
  tasks: dict[int, asyncio.Task[Trajectory | None]] = dataclasses.field(default_factory=dict)
  collected: bool = False

  def live(self) -> int:
    """Returns how many episodes go on."""
    return 0 if self.collected else sum(not task.done() for task in self.tasks.values())

  def complete(self) -> bool:
    """Returns whether all of it has ended."""
    return len(self.tasks) == self.members and not self.live()
