"""Advantages: how much better a sample did than the others of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

RULES = ('group_mean', 'group_mean_std')

# Added to the standard deviation. It never decides: equal rewards are caught before the division.
EPSILON = 1e-6


def advantages(
  rewards: npt.ArrayLike | Sequence[npt.ArrayLike], rule: str
) -> np.ndarray | list[np.ndarray]:
  """Returns each sample's reward relative to its group, on the host.

  With R the rewards of one group of n samples:

    group_mean      A = R - mean(R)
    group_mean_std  A = (R - mean(R)) / (std(R) + 1e-6),   std over n (GRPO divides by n as well)

  A group whose rewards are all equal gets exact zeros under both rules, also where the mean
  rounds. Computed in float64 and rounded once.

  Args:
    rewards: [G, n] array; or one group, [n]; or a sequence of groups of unequal sizes.
    rule: 'group_mean' or 'group_mean_std'.

  Returns:
    float32 of the shape of `rewards`; a list of arrays for a sequence of unequal groups.

  Raises:
    ValueError: an unknown rule, an empty group, or a reward that is not finite.
  """
  if rule not in RULES:
    raise ValueError(f'advantage rule is {rule!r}; expected one of {RULES}')
  if isinstance(rewards, list | tuple) and rewards and np.ndim(rewards[0]) == 1:
    groups = [np.asarray(group, np.float64) for group in rewards]
    out = [_one_group(group, rule) for group in groups]
    return np.stack(out) if len({len(group) for group in groups}) == 1 else out
  array = np.asarray(rewards, np.float64)
  if array.ndim not in (1, 2):
    raise ValueError(f'rewards have shape {array.shape}; expected [G, n] or [n]')
  if array.ndim == 1:
    return _one_group(array, rule)
  if not len(array):
    return array.astype(np.float32)
  return np.stack([_one_group(group, rule) for group in array])


def _one_group(rewards: np.ndarray, rule: str) -> np.ndarray:
  if rewards.ndim != 1 or not rewards.size:
    raise ValueError(f'a group has rewards of shape {rewards.shape}; expected [n] with n >= 1')
  if not np.isfinite(rewards).all():
    raise ValueError(f'a group has rewards {rewards}; expected finite numbers')
  if (rewards == rewards[0]).all():
    return np.zeros(rewards.shape, np.float32)
  centred = rewards - rewards.mean()
  if rule == 'group_mean_std':
    centred = centred / (rewards.std() + EPSILON)
  return centred.astype(np.float32)
