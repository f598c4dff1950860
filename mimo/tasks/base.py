"""The task port: episodes and their verifiers.

A task owns its prompts, its environment and its reward; it never sees log-probs or weights.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from mimo.types import EpisodeEnd, FinishReason


class EnvironmentFailure(Exception):
  """The environment broke through no fault of the policy. The episode is never scored."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class StepResult:
  """The environment's answer to one turn.

  Attributes:
    observation: [O] int32, ids appended to the trajectory; empty at an episode's end.
    end: why the episode ended, or None while it goes on.
    reward: in [0, 1]; 0.0 while the episode goes on.
  """

  observation: np.ndarray
  end: EpisodeEnd | None
  reward: float


class Episode(Protocol):
  """One attempt at one task. Two attempts share nothing that a policy could change."""

  @property
  def prompt(self) -> np.ndarray:
    """[P] int32."""

  async def step(self, tokens: np.ndarray, finish: FinishReason) -> StepResult:
    """Takes one turn's sampled ids [S] int32. Raises EnvironmentFailure."""

  async def close(self) -> None:
    """Frees what the episode holds."""


class Task(Protocol):
  """A family of episodes with disjoint splits.

  Splits are named 'train', 'heldout' and, where a task has one, 'hard': a subset of 'heldout'.
  """

  @property
  def name(self) -> str: ...

  @property
  def splits(self) -> tuple[str, ...]:
    """The names of its splits."""

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """Ids that end a turn."""

  @property
  def max_turn_tokens(self) -> int: ...

  @property
  def max_sampled_tokens(self) -> int:
    """No trajectory has more tokens that the policy drew."""

  @property
  def max_tokens(self) -> int:
    """No trajectory is longer."""

  def size(self, split: str) -> int:
    """How many tasks a split holds. Raises ValueError for an unknown split."""

  def task_id(self, split: str, index: int) -> str:
    """A stable name of one task: equal in 'hard' and 'heldout' where they are the same task."""

  def start(self, split: str, index: int) -> Episode:
    """Opens a fresh episode of task `index`."""
