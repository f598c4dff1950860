"""Finds out that a server hangs: it does not answer, or its engine takes no step with work left."""

from __future__ import annotations

import asyncio
import dataclasses

from mimo.samplers.vllm.client import TurnError, VllmClient
from mimo.samplers.vllm.messages import Outcome, Status

# So many in a row, whatever their time: where this process stood still, one may be its own fault.
_MIN_UNANSWERED = 3


class Down(Exception):
  """The server must be started again."""


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaLimits:
  """When a server counts as hung, in seconds.

  Attributes:
    start_secs: from its start until it answers.
    unanswered_secs: without an answer about its state.
    stall_secs: without a step of its engine while turns are in flight.
    poll_secs: how often the pointer is read.
    status_secs: how often its state is asked for.
  """

  start_secs: float = 1800.0
  unanswered_secs: float = 60.0
  stall_secs: float = 120.0
  poll_secs: float = 0.1
  status_secs: float = 1.0


class Watch:
  """Asks one server for its state, time and again."""

  def __init__(self, client: VllmClient, limits: ReplicaLimits) -> None:
    self._client = client
    self._limits = limits
    self._now = asyncio.get_running_loop().time
    self._asked_at: float | None = None
    self._steps = -1
    self._stepped_at = self._now()
    self._unanswered = 0
    self._unanswered_since = 0.0

  @property
  def due(self) -> bool:
    """Whether it is time to ask again."""
    return self._asked_at is None or self._now() - self._asked_at >= self._limits.status_secs

  async def ask(self) -> Status | None:
    """Returns the server's state, or None where it did not answer this time.

    A step of the engine is progress of every turn. Raises Down when the server hangs.
    """
    self._asked_at = self._now()
    try:
      status = await self._client.status()
    except TurnError as error:
      self._count(error)
      return None
    self._unanswered = 0
    now = self._now()
    # The engine's own counts are as old as its last step: turns that were given up are among them.
    if status.steps != self._steps or not self._client.in_flight:
      self._steps, self._stepped_at = status.steps, now
      self._client.moved()
    if now - self._stepped_at > self._limits.stall_secs:
      raise Down(
        f'{self._client.in_flight} turns are in flight and the engine has taken no step for '
        f'{now - self._stepped_at:.0f} s'
      )
    return status

  def _count(self, error: TurnError) -> None:
    if self._unanswered == 0:
      self._unanswered_since = self._now()
    self._unanswered += 1
    secs = self._now() - self._unanswered_since
    hangs = self._unanswered >= _MIN_UNANSWERED and secs > self._limits.unanswered_secs
    if hangs or error.kind == Outcome.ENGINE_DEAD:
      raise Down(f'its state has been unknown for {secs:.0f} s: {error}') from None
