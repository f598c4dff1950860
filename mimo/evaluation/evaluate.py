"""One policy's score on a split: n samples of every task, through the sampler port.

The denominator is fixed: every task of the split counts, with all its samples. An episode that the
environment or the sampler broke is no sample: it is counted apart and run again, with the same
random key, and a sample once scored is never drawn again. What still fails leaves the result
incomplete, and an incomplete result has bounds but no score.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from mimo import checks, keys
from mimo.evaluation import passk
from mimo.samplers.base import Sampler
from mimo.tasks.base import Task
from mimo.types import PromptRef, SamplingParams, Trajectory

KS = (1, 2, 4, 8, 16)

# What broken attempts said: enough to see what is wrong, however many there are.
ERRORS_KEPT = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
  """When a run is evaluated: the section `evaluation` of a configuration.

  Attributes:
    every_updates: evaluates after every so many updates, beside the first and last; 0: those only.
    samples: samples per held-out task.
  """

  every_updates: int = 20
  samples: int = 4

  def __post_init__(self) -> None:
    checks.whole('every_updates', self.every_updates, least=0)
    checks.whole('samples', self.samples, least=1, most=2**12)


class EpisodeRunner(Protocol):
  """Runs one episode to its end.

  Returns (trajectory, error): failures are ends of the trajectory, not exceptions, and `error`
  says why; it is None where the episode is scored.
  """

  async def __call__(
    self,
    sampler: Sampler,
    task: Task,
    *,
    prompt: PromptRef,
    member: int,
    params: SamplingParams,
    key: np.ndarray,
    session: str,
  ) -> tuple[Trajectory, str | None]: ...


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EvalResult:
  """What an evaluation found.

  Attributes:
    task: the task's name.
    split: the split that was sampled.
    samples: n, per task.
    seed: what the random keys were made from.
    version: the publication number that drew every token.
    sampling: how tokens were drawn.
    task_ids: [N].
    rewards: [N, n] float64, NaN where a sample is missing.
    tokens: [N, n] int64, sampled tokens; 0 where a sample is missing.
    ends: scored episodes by end.
    failures: broken attempts by end; none of them is in `rewards`.
    errors: some of what they said.
    subsets: rows of `rewards` by name of a further split, whose tasks are some of this one's.
  """

  task: str
  split: str
  samples: int
  seed: int
  version: int
  sampling: SamplingParams
  task_ids: tuple[str, ...]
  rewards: np.ndarray
  tokens: np.ndarray
  ends: Mapping[str, int]
  failures: Mapping[str, int]
  errors: tuple[str, ...]
  subsets: Mapping[str, tuple[int, ...]]

  @property
  def missing(self) -> int:
    return int(np.isnan(self.rewards).sum())

  @property
  def complete(self) -> bool:
    return self.missing == 0

  def splits(self) -> Iterator[tuple[str, np.ndarray]]:
    """Yields (name, rewards [., n]) of the split and of each subset, from the same samples."""
    yield self.split, self.rewards
    for name, rows in self.subsets.items():
      yield name, self.rewards[list(rows)]

  def estimates(self, split: str) -> dict[int, passk.Estimate]:
    """Returns pass@k by k, for `KS` up to n. Raises ValueError while samples are missing."""
    successes = passk.count_successes(dict(self.splits())[split])
    return {k: passk.estimate(successes, self.samples, k) for k in KS if k <= self.samples}

  def bounds(self, split: str, k: int) -> tuple[float, float]:
    """Returns pass@k were every missing sample a failure, and were every one a success."""
    rewards = dict(self.splits())[split]
    filled = (np.nan_to_num(rewards, nan=value) for value in (0.0, 1.0))
    low, high = (
      passk.estimate(passk.count_successes(part), self.samples, k).mean for part in filled
    )
    return low, high

  def summary(self) -> dict[str, dict[str, float]]:
    """Returns numbers by split: `pass@k` and `pass@k_error`, tasks and counts of failures.

    An incomplete result has `pass@k_low` and `pass@k_high` instead.
    """
    out: dict[str, dict[str, float]] = {}
    for name, rewards in self.splits():
      part: dict[str, float] = {'tasks': len(rewards), 'missing': int(np.isnan(rewards).sum())}
      if part['missing']:
        for k in (k for k in KS if k <= self.samples):
          part[f'pass@{k}_low'], part[f'pass@{k}_high'] = self.bounds(name, k)
      else:
        for k, value in self.estimates(name).items():
          part |= {f'pass@{k}': value.mean, f'pass@{k}_error': value.error}
      out[name] = part
    scored = max(1, self.rewards.size - self.missing)
    out[self.split] |= {
      'failures': sum(self.failures.values()),
      'response_tokens': float(self.tokens.sum() / scored),
    }
    return out

  def to_json(self) -> dict[str, Any]:
    """Returns everything, a missing reward or an undefined error being None."""
    rows = [[None if np.isnan(r) else float(r) for r in row] for row in self.rewards]
    summary = {
      name: {key: None if np.isnan(value) else value for key, value in part.items()}
      for name, part in self.summary().items()
    }
    return {
      'task': self.task,
      'split': self.split,
      'samples': self.samples,
      'seed': self.seed,
      'version': self.version,
      'complete': self.complete,
      'sampling': dataclasses.asdict(self.sampling),
      'summary': summary,
      'ends': dict(self.ends),
      'failures': dict(self.failures),
      'errors': list(self.errors),
      'subsets': {name: len(rows) for name, rows in self.subsets.items()},
      'rewards': dict(zip(self.task_ids, rows, strict=True)),
    }


def full_vocabulary(task: Task) -> SamplingParams:
  """Returns how an evaluation draws: temperature 1, the whole vocabulary."""
  return SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    candidates=1,
    max_turn_tokens=task.max_turn_tokens,
    stop_ids=task.stop_ids,
  )


def sample_key(seed: int, index: int, sample: int) -> np.ndarray:
  """Returns the random key [2] uint32 of one sample of one task: reruns draw with the same."""
  return keys.key('evaluation', seed, index, sample)


async def evaluate(
  run: EpisodeRunner,
  sampler: Sampler,
  task: Task,
  *,
  params: SamplingParams,
  samples: int,
  seed: int,
  split: str = 'heldout',
  subsets: Sequence[str] = (),
  reruns: int = 2,
) -> EvalResult:
  """Samples every task of `split` and scores it.

  Args:
    run: runs one episode.
    sampler: serves one version throughout; at most `contract.max_sessions` episodes run at a time.
    task: the task.
    params: how to draw; `full_vocabulary(task)` for a reported score.
    samples: n, per task.
    seed: of the random keys, which are never those of training.
    split: the split that is sampled.
    subsets: further splits of the task, each scored from the same samples.
    reruns: how many times what the environment or the sampler broke is run again.

  Raises:
    ValueError: the split is empty, a subset holds a task that the split doesn't, or the weights
      changed under the evaluation.
  """
  if samples < 1 or reruns < 0:
    raise ValueError(f'samples is {samples}, reruns {reruns}; expected at least 1 and at least 0')
  ids = task_ids(task, split)
  rows = {name: subset_rows(ids, task_ids(task, name), name, split) for name in subsets}
  tally = _Tally(len(ids), samples)
  for attempt in range(reruns + 1):
    waiting = iter(tally.unscored())

    async def worker(waiting: Iterator[tuple[int, int]] = waiting, attempt: int = attempt) -> None:
      for index, sample in waiting:
        trajectory, error = await run(
          sampler,
          task,
          prompt=PromptRef(index, split, index),
          member=sample,
          params=params,
          key=sample_key(seed, index, sample),
          session=f'evaluate/{split}/{index}/{sample}/{attempt}',
        )
        tally.add(index, sample, trajectory, error)

    async with asyncio.TaskGroup() as group:
      for _ in range(sampler.contract.max_sessions):
        group.create_task(worker())
  return EvalResult(
    task=task.name,
    split=split,
    samples=samples,
    seed=seed,
    version=tally.version(sampler),
    sampling=params,
    task_ids=ids,
    rewards=tally.rewards,
    tokens=tally.tokens,
    ends=dict(tally.ends),
    failures=dict(tally.failures),
    errors=tuple(tally.errors),
    subsets=rows,
  )


def task_ids(task: Task, split: str) -> tuple[str, ...]:
  """Returns the names of a split's tasks. Raises ValueError where it has none, or two alike."""
  size = task.size(split)
  if not size:
    raise ValueError(f'task {task.name}: split {split!r} holds no tasks; expected at least one')
  ids = tuple(task.task_id(split, index) for index in range(size))
  if len(set(ids)) < size:
    raise ValueError(
      f'task {task.name}: {size} tasks of split {split!r} have {len(set(ids))} names; expected '
      'each its own'
    )
  return ids


def subset_rows(
  ids: Sequence[str], subset_ids: Sequence[str], subset: str, split: str
) -> tuple[int, ...]:
  """Returns where a subset's tasks are among a split's. Raises ValueError for one that isn't."""
  where = {name: row for row, name in enumerate(ids)}
  strangers = [name for name in subset_ids if name not in where]
  if strangers:
    raise ValueError(
      f'split {subset!r} holds {len(strangers)} tasks such as {strangers[0]!r} that {split!r} does '
      'not; expected a subset'
    )
  return tuple(where[name] for name in subset_ids)


class _Tally:
  """What has been scored so far."""

  def __init__(self, tasks: int, samples: int) -> None:
    self.rewards = np.full((tasks, samples), np.nan)
    self.tokens = np.zeros((tasks, samples), np.int64)
    self.ends: collections.Counter[str] = collections.Counter()
    self.failures: collections.Counter[str] = collections.Counter()
    self.errors: list[str] = []
    self._versions: set[int] = set()

  def unscored(self) -> list[tuple[int, int]]:
    return [(int(i), int(j)) for i, j in np.argwhere(np.isnan(self.rewards))]

  def add(self, index: int, sample: int, trajectory: Trajectory, error: str | None) -> None:
    if not trajectory.end.scored:
      self.failures[str(trajectory.end)] += 1
      if len(self.errors) < ERRORS_KEPT:
        self.errors.append(f'{trajectory.end}: {error}'[:300])
      return
    self.ends[str(trajectory.end)] += 1
    self.rewards[index, sample] = trajectory.reward
    self.tokens[index, sample] = trajectory.num_sampled
    self._versions.update(span.version for turn in trajectory.turns for span in turn.spans)

  def version(self, sampler: Sampler) -> int:
    """Returns the one version that drew everything, or the served one where nothing was drawn."""
    if len(self._versions) > 1:
      raise ValueError(
        f'the evaluation was drawn by publications {sorted(self._versions)}; expected one: hold '
        "the sampler's version while it runs"
      )
    return next(iter(self._versions), sampler.version)
