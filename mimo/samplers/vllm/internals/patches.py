"""Changes to vLLM on CPU, made only where the environment names them, and never in silence."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from mimo.samplers.vllm.launch import (
  FAST_TOPK,
  MOE_RELOAD,
  NVFP4_EMULATION,
  PATCHES,
  PATCHES_VARIABLE,
)

_log = logging.getLogger('vllm.mimo')

# Where fewer than one in so many of a vocabulary is asked for, torch's topk keeps a heap, and is
# fast; else it parts the vocabulary and sorts what it keeps, one comparison at a time.
_HEAP_SHARE = 64


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
  made = {
    MOE_RELOAD: _patch_moe_reload,
    NVFP4_EMULATION: _patch_nvfp4_emulation,
    FAST_TOPK: _patch_topk,
  }
  for name in names:
    made[name]()
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


def _patch_topk() -> None:
  import torch
  from vllm.v1.outputs import LogprobsTensors
  from vllm.v1.sample.sampler import Sampler

  original = Sampler.gather_logprobs
  if getattr(original, '_mimo_patched', False):
    return

  def gather_logprobs(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
    if num_logprobs * _HEAP_SHARE <= logprobs.shape[-1] or logprobs.dtype != torch.float32:
      return original(logprobs, num_logprobs, token_ids)
    drawn = original(logprobs, 0, token_ids)
    ids, values = most_likely(logprobs.numpy(), num_logprobs)
    return LogprobsTensors(
      torch.cat((drawn.logprob_token_ids, torch.from_numpy(ids)), dim=1),
      torch.cat((drawn.logprobs, torch.from_numpy(values)), dim=1),
      drawn.selected_token_ranks,
    )

  gather_logprobs._mimo_patched = True  # type: ignore[attr-defined]
  Sampler.gather_logprobs = staticmethod(gather_logprobs)


def most_likely(logprobs: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns ([N, num] int32 ids, [N, num] float32 log-probs), the most likely first.

  Of equal ones the lower id comes first (-0 is less than 0). Values and ids are sorted as one
  integer, which numpy does many at a time.

  Args:
    logprobs: [N, V] float32, with no NaN.
    num: of 1 to V.
  """
  vocab = logprobs.shape[-1]
  if not 1 <= num <= vocab:
    raise ValueError(f'num is {num}; expected 1 to {vocab}')
  bits = np.ascontiguousarray(logprobs).view(np.int32)
  # As integers, floats below zero are in the opposite order.
  ordered = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
  keys = (ordered << 32) | np.arange(vocab - 1, -1, -1, dtype=np.int64)
  if num < vocab:
    keys = np.partition(keys, vocab - num, axis=-1)[:, vocab - num :]
  keys = np.sort(keys, axis=-1)[:, ::-1]
  ids = (vocab - 1 - (keys & 0xFFFFFFFF)).astype(np.int32)
  ordered = (keys >> 32).astype(np.int32)
  bits = np.where(ordered < 0, ordered ^ np.int32(0x7FFFFFFF), ordered)
  return ids, bits.view(np.float32)
