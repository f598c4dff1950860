"""From prompts to batches: episodes, groups, and the three ways of sampling them."""

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
from mimo.rollouts.simulated import SimulatedRollouts
from mimo.rollouts.versions import live_updates
from mimo.rollouts.virtual import PoolSpeed, VirtualTimes

__all__ = [
  'AsyncLimits',
  'AsyncRollouts',
  'Batch',
  'LockstepRollouts',
  'PoolSpeed',
  'PoolStats',
  'RolloutError',
  'RolloutSettings',
  'RolloutSource',
  'RolloutStats',
  'SimulatedRollouts',
  'StaleRange',
  'VirtualTimes',
  'live_updates',
]
