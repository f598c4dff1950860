"""Unbiased pass@k and its standard error over tasks, in float64."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
  """A mean over tasks and its standard error; `error` is NaN for a single task."""

  mean: float
  error: float
  tasks: int


def count_successes(rewards: np.ndarray) -> np.ndarray:
  """Returns [N] int64: how many of each task's samples have reward 1.

  Args:
    rewards: [N, n] float; NaN where a sample is missing.

  Raises:
    ValueError: a sample is missing: every task counts with all its samples, so that a score never
      has a smaller denominator than another.
  """
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 2 or not rewards.size:
    raise ValueError(f'rewards have shape {rewards.shape}; expected [tasks, samples], not empty')
  missing = np.argwhere(np.isnan(rewards))
  if len(missing):
    task, sample = missing[0]
    raise ValueError(
      f'{len(missing)} of {rewards.size} samples are missing, the first at task {task}, sample '
      f'{sample}; expected every sample of every task'
    )
  return (rewards >= 1.0).sum(axis=1)


def pass_at_k(successes: np.ndarray, samples: int, k: int) -> np.ndarray:
  """The chance that at least one of `k` samples succeeds, estimated from `samples` of them.

      pass@k = 1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n-c+1}^{n} (1 - k / i)

  which is unbiased for 1 - (1 - P)^k, where 1 - (1 - c/n)^k is not. Source: Chen et al. 2021,
  "Evaluating large language models trained on code", section 2.1.

  Args:
    successes: [N] int, c of each task.
    samples: n, the samples of every task.
    k: at least 1, at most n.

  Returns:
    [N] float64.

  Raises:
    ValueError: k is not within [1, n] or a count not within [0, n].
  """
  if not 1 <= k <= samples:
    raise ValueError(f'k is {k}; expected 1 to {samples}, the samples per task')
  successes = np.asarray(successes)
  if successes.size and not (successes.min() >= 0 and successes.max() <= samples):
    raise ValueError(
      f'successes range over [{successes.min()}, {successes.max()}]; expected 0 to {samples}'
    )
  i = np.arange(1, samples + 1, dtype=np.float64)
  # Factors below zero belong to c > n - k, where C(n - c, k) is 0.
  factors = np.maximum(1.0 - k / i, 0.0)
  failing = np.array([factors[samples - c :].prod() for c in range(samples + 1)])
  return 1.0 - failing[successes]


def estimate(successes: np.ndarray, samples: int, k: int) -> Estimate:
  """The mean of pass@k over tasks, with the standard error of that mean over tasks.

  The error is that of drawing other tasks of the same kind, the samples' own noise included:
  sqrt(var / N) with the unbiased variance of the tasks' estimates.

  Args:
    successes: [N] int.
    samples: the samples of every task.
    k: at least 1, at most `samples`.

  Raises:
    ValueError: no tasks, or as `pass_at_k`.
  """
  values = pass_at_k(successes, samples, k)
  if not len(values):
    raise ValueError('no tasks to estimate pass@k from; expected at least one')
  error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float('nan')
  return Estimate(float(values.mean()), error, len(values))
