"""Changes to vLLM on CPU, made only where the environment names them, and never in silence."""

from __future__ import annotations

import logging
import os
from typing import Any

from mimo.samplers.vllm.launch import MOE_RELOAD, NVFP4_EMULATION, PATCHES, PATCHES_VARIABLE

_log = logging.getLogger('vllm.mimo')


def requested_patches() -> tuple[str, ...]:
  """Returns the patches that the environment asks for. Raises ValueError for an unknown one."""
  names = tuple(name for name in os.environ.get(PATCHES_VARIABLE, '').split(',') if name)
  for name in names:
    if name not in PATCHES:
      raise ValueError(f'{PATCHES_VARIABLE} names {name!r}; expected some of {list(PATCHES)}')
  return names


def apply_patches() -> tuple[str, ...]:
  """Makes the changes that the environment asks for, on CPU only, and says so in the log."""
  from vllm.platforms import current_platform

  names = requested_patches()
  if names and not current_platform.is_cpu():
    raise ValueError(f'{PATCHES_VARIABLE} is {",".join(names)}: these patches are for CPU only')
  for name in names:
    {MOE_RELOAD: _patch_moe_reload, NVFP4_EMULATION: _patch_nvfp4_emulation}[name]()
    _log.warning('mimo: vLLM is patched in this process: %s', name)
  return names


def _patch_nvfp4_emulation() -> None:
  from vllm.model_executor.kernels import linear
  from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
  from vllm.platforms import PlatformEnum

  if EmulationNvFp4LinearKernel not in linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, []):
    linear.register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, 'nvfp4')


def _patch_moe_reload() -> None:
  from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

  method = module.UnquantizedFusedMoEMethod
  original = method._setup_kernel
  if getattr(original, '_mimo_patched', False):
    return

  def setup_kernel(self: Any, *args: Any, **kwargs: Any) -> None:
    # vLLM repacks the experts for its CPU kernel where it sets the kernel up, which is once.
    self.moe_kernel = None
    original(self, *args, **kwargs)

  setup_kernel._mimo_patched = True  # type: ignore[attr-defined]
  method._setup_kernel = setup_kernel
