"""From prompts to batches: episodes, groups, and the two ways of sampling them."""

from mimo.rollouts.asynchronous import AsyncLimits, AsyncRollouts
from mimo.rollouts.base import (
  Batch,
  PoolStats,
  RolloutError,
  RolloutSettings,
  RolloutSource,
  RolloutStats,
  StaleRange,
)
from mimo.rollouts.lockstep import LockstepRollouts
from mimo.rollouts.versions import live_updates

__all__ = [
  'AsyncLimits',
  'AsyncRollouts',
  'Batch',
  'LockstepRollouts',
  'PoolStats',
  'RolloutError',
  'RolloutSettings',
  'RolloutSource',
  'RolloutStats',
  'StaleRange',
  'live_updates',
]
