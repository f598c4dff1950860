"""A task whose environment takes its time to answer, on whatever clock the event loop has."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np

from mimo.tasks.base import Episode, StepResult, Task
from mimo.types import FinishReason


def slow(task: Task, answer_secs: float) -> Task:
  """Returns the same task, whose answers to turns that another follows take `answer_secs`."""
  return cast(Task, _SlowTask(task, answer_secs))


class _SlowTask:
  def __init__(self, task: Task, answer_secs: float) -> None:
    self._task = task
    self._answer_secs = answer_secs

  def __getattr__(self, name: str) -> Any:
    return getattr(self._task, name)

  def start(self, split: str, index: int) -> Episode:
    return _SlowEpisode(self._task.start(split, index), self._answer_secs)


class _SlowEpisode:
  def __init__(self, episode: Episode, answer_secs: float) -> None:
    self._episode = episode
    self._answer_secs = answer_secs

  @property
  def prompt(self) -> np.ndarray:
    return self._episode.prompt

  async def step(self, tokens: np.ndarray, finish: FinishReason) -> StepResult:
    result = await self._episode.step(tokens, finish)
    if result.end is None:
      await asyncio.sleep(self._answer_secs)
    return result

  async def close(self) -> None:
    await self._episode.close()
