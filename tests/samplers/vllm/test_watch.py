"""When a server counts as hung, on a clock that the tests turn."""

import asyncio
import dataclasses

import pytest

from mimo.samplers.vllm.client import CONNECTION, TurnError
from mimo.samplers.vllm.messages import Outcome, Status
from mimo.samplers.vllm.watch import Down, ReplicaLimits, Watch

_STATUS = Status(
  vllm='0.32.0',
  version=None,
  activating=False,
  broken=None,
  running=0,
  waiting=0,
  tokens=0,
  steps=0,
  logprob_mode='processed_logprobs',
  logits_dtype='float32',
  kv_cache_dtype='bf16',
  vocab_size=128,
  max_tokens=64,
  max_candidates=16,
  prefix_caching=True,
  max_running=8,
  tested=True,
  patches=(),
)
_LIMITS = ReplicaLimits(unanswered_secs=10.0, stall_secs=20.0, status_secs=1.0)


class _Client:
  """Answers as it is told."""

  def __init__(self) -> None:
    self.in_flight = 0
    self.steps = 0
    self.error: TurnError | None = None
    self.moves = 0

  def moved(self) -> None:
    self.moves += 1

  async def status(self) -> Status:
    if self.error is not None:
      raise self.error
    return dataclasses.replace(_STATUS, steps=self.steps)


def _watch(use) -> None:
  async def main():
    client, clock = _Client(), [100.0]
    watch = Watch(client, _LIMITS)
    watch._now = lambda: clock[0]
    await watch.ask()

    async def later(secs: float):
      clock[0] += secs
      return await watch.ask()

    await use(client, watch, later)

  asyncio.run(main())


def test_idle_is_not_hung() -> None:
  async def use(client, watch, later):
    for _ in range(5):
      assert await later(100.0) is not None

  _watch(use)


def test_work_without_a_step_is_hung_and_with_one_is_slow() -> None:
  async def use(client, watch, later):
    client.in_flight = 2
    for _ in range(5):
      client.steps += 1
      moves = client.moves
      await later(19.0)
      assert client.moves == moves + 1
    await later(19.0)
    assert client.moves == moves + 1
    with pytest.raises(Down, match='2 turns are in flight and the engine has taken no step for 21'):
      await later(2.0)

  _watch(use)


def test_work_that_came_after_a_long_idle_time_is_not_hung() -> None:
  async def use(client, watch, later):
    await later(500.0)
    client.in_flight = 1
    assert await later(5.0) is not None

  _watch(use)


def test_no_answer_is_borne_for_a_while_and_more_than_once() -> None:
  async def use(client, watch, later):
    client.error = TurnError(CONNECTION, 'refused')
    assert await later(1.0) is None
    assert await later(100.0) is None  # but the second: this process may have stood still
    client.error = None
    assert await later(1.0) is not None
    client.error = TurnError(CONNECTION, 'refused')
    for _ in range(3):
      assert await later(4.0) is None
    with pytest.raises(Down, match='its state has been unknown for 12 s: connection: refused'):
      await later(4.0)

  _watch(use)


def test_a_dead_engine_is_not_borne() -> None:
  async def use(client, watch, later):
    client.error = TurnError(Outcome.ENGINE_DEAD, 'the engine is dead')
    with pytest.raises(Down, match='the engine is dead'):
      await later(1.0)

  _watch(use)


def test_it_is_asked_now_and_then() -> None:
  async def use(client, watch, later):
    assert not watch.due
    await later(0.0)
    watch._now = lambda: 101.5
    assert watch.due

  _watch(use)
