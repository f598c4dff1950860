import asyncio

import numpy as np

from mimo.tasks.base import StepResult
from mimo.tasks.slow import slow
from mimo.types import EpisodeEnd, FinishReason

_NONE = np.zeros(0, np.int32)


class _Episode:
  prompt = np.array([1, 2], np.int32)
  closed = False

  async def step(self, tokens, finish):
    end = EpisodeEnd.SUBMITTED if tokens[0] == 9 else None
    return StepResult(_NONE, end, 1.0 if end else 0.0)

  async def close(self):
    self.closed = True


class _Task:
  name = 'tiny'
  max_tokens = 64

  def __init__(self):
    self.episode = _Episode()

  def size(self, split):
    return len(split)

  def start(self, split, index):
    return self.episode


def test_answers_that_a_turn_follows_take_their_time(monkeypatch):
  slept = []

  async def sleep(secs):
    slept.append(secs)

  async def main():
    task = _Task()
    episode = slow(task, 2.5).start('train', 0)
    assert episode.prompt.tolist() == [1, 2]
    first = await episode.step(np.array([3]), FinishReason.STOP)
    assert first.end is None and slept == [2.5]
    last = await episode.step(np.array([9]), FinishReason.STOP)
    assert last.end is EpisodeEnd.SUBMITTED and last.reward == 1.0 and slept == [2.5]
    await episode.close()
    assert task.episode.closed

  monkeypatch.setattr(asyncio, 'sleep', sleep)
  asyncio.run(main())


def test_all_else_is_the_task_s_own():
  task = slow(_Task(), 1.0)
  assert (task.name, task.max_tokens, task.size('train')) == ('tiny', 64, 5)
