"""From prompts to batches: episodes, groups, and one source of batches on whatever clock."""

from mimo.rollouts.base import (
  Batch,
  Pacing,
  PoolStats,
  RolloutError,
  RolloutOptions,
  RolloutSettings,
  RolloutStats,
  StaleRange,
  VirtualOptions,
)
from mimo.rollouts.schedules import Schedule, schedule_of
from mimo.rollouts.source import RolloutSource

__all__ = [
  'Batch',
  'Pacing',
  'PoolStats',
  'RolloutError',
  'RolloutOptions',
  'RolloutSettings',
  'RolloutSource',
  'RolloutStats',
  'Schedule',
  'StaleRange',
  'VirtualOptions',
  'schedule_of',
]
