"""The one place that touches vLLM's internals.

What it relies on is listed in `RELIES_ON` and checked by `check_internals`. Versions of vLLM
outside [OLDEST, NEWEST] are refused: what these names mean may have changed.
"""

from mimo.samplers.vllm.internals.contract import (
  NEWEST,
  OLDEST,
  RELIES_ON,
  TESTED,
  check_internals,
  check_version,
  resolves,
  runs_on_cpu,
  vllm_version,
)
from mimo.samplers.vllm.internals.engine import Progress, VllmEngine
from mimo.samplers.vllm.internals.patches import apply_patches, requested_patches
from mimo.samplers.vllm.internals.scheduler import block_scheduler
from mimo.samplers.vllm.internals.worker import LoadError, WorkerExtension

__all__ = [
  'NEWEST',
  'OLDEST',
  'RELIES_ON',
  'TESTED',
  'LoadError',
  'Progress',
  'VllmEngine',
  'WorkerExtension',
  'apply_patches',
  'block_scheduler',
  'check_internals',
  'check_version',
  'requested_patches',
  'resolves',
  'runs_on_cpu',
  'vllm_version',
]
