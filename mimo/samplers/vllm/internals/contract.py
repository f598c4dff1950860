"""Which vLLM is supported, and what of it is relied on."""

from __future__ import annotations

import importlib
import re
from typing import Any

OLDEST = (0, 30)
NEWEST = (0, 32)
TESTED = ('0.32.0',)

_ASYNC_LLM = 'vllm.v1.engine.async_llm:AsyncLLM'
_RELOAD = 'vllm.model_executor.model_loader.reload.layerwise'
_SCHEDULER = 'vllm.v1.core.sched.scheduler:Scheduler'
RELIES_ON = (
  f'{_ASYNC_LLM}.add_request',
  f'{_ASYNC_LLM}.abort',
  f'{_ASYNC_LLM}.pause_generation',
  f'{_ASYNC_LLM}.resume_generation',
  f'{_ASYNC_LLM}.collective_rpc',
  f'{_ASYNC_LLM}.update_weight_version',
  f'{_ASYNC_LLM}.compute_weight_checksums',
  f'{_ASYNC_LLM}.errored',
  'vllm.inputs.engine:tokens_input',
  'vllm.logprobs:FlatLogprobs',
  'vllm.outputs:CompletionOutput.weight_versions',
  'vllm.outputs:CompletionOutput.sampling_mask',
  'vllm.outputs:WeightVersionSpan',
  'vllm.sampling_params:SamplingParams.flat_logprobs',
  'vllm.sampling_params:SamplingParams.detokenize',
  'vllm.sampling_params:SamplingParams.extra_args',
  'vllm.sampling_params:RequestOutputKind.FINAL_ONLY',
  'vllm.config:SchedulerConfig.scheduler_cls',
  'vllm.config:SchedulerConfig.async_scheduling',
  'vllm.v1.core.sched.async_scheduler:AsyncScheduler',
  'vllm.v1.core.sched.interface:PauseState.UNPAUSED',
  f'{_SCHEDULER}.update_from_output',
  f'{_SCHEDULER}.has_requests',
  f'{_SCHEDULER}.pause_state',
  'vllm.v1.engine:EngineCoreOutput.new_token_ids',
  'vllm.v1.engine:EngineCoreOutput.new_logprobs',
  'vllm.v1.engine:EngineCoreOutputs.outputs',
  'vllm.v1.outputs:LogprobsLists',
  'vllm.v1.engine.exceptions:EngineDeadError',
  'vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs',
  'vllm.v1.engine.output_processor:OutputProcessor.has_request',
  'vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait',
  'vllm.v1.metrics.loggers:AggregateStatLoggerBase.record',
  'vllm.v1.metrics.loggers:StatLoggerManager.record',
  'vllm.config:set_current_vllm_config',
  'vllm.model_executor.model_loader:get_model_loader',
  'vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights',
  'vllm.model_executor.layers.attention:is_deferred_attention_layer',
  f'{_RELOAD}:get_layerwise_info',
  f'{_RELOAD}:initialize_layerwise_reload',
  f'{_RELOAD}:finalize_layerwise_reload',
  f'{_RELOAD}:_place_kernel_tensors',
  'vllm.model_executor.kernels.linear:_POSSIBLE_NVFP4_KERNELS',
  'vllm.model_executor.kernels.linear:register_linear_kernel',
  'vllm.model_executor.kernels.linear.nvfp4.emulation:EmulationNvFp4LinearKernel',
  'vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:'
  'UnquantizedFusedMoEMethod._setup_kernel',
  'vllm.platforms:current_platform',
)


def vllm_version() -> str:
  """Returns the version of the vLLM that is installed. Raises ImportError where none is."""
  return str(importlib.import_module('vllm').__version__)


def runs_on_cpu() -> bool:
  """Whether the vLLM that is installed runs on CPU here."""
  return bool(importlib.import_module('vllm.platforms').current_platform.is_cpu())


def check_version(version: str) -> bool:
  """Returns whether a vLLM of this version is tested. Raises ValueError where it is unsupported."""
  match = re.match(r'(\d+)\.(\d+)', version)
  number = (int(match[1]), int(match[2])) if match else None
  if number is None or not OLDEST <= number <= NEWEST:
    raise ValueError(
      f'vLLM {version} is not supported; expected {OLDEST[0]}.{OLDEST[1]} to '
      f'{NEWEST[0]}.{NEWEST[1]} (tested: {", ".join(TESTED)})'
    )
  return version.split('+')[0] in TESTED


def check_internals() -> None:
  """Raises ImportError naming each thing of vLLM that is relied on and not there."""
  missing = [name for name in RELIES_ON if not resolves(name)]
  if missing:
    raise ImportError(f'vLLM {vllm_version()} lacks {", ".join(missing)}')


def resolves(name: str) -> bool:
  """Whether `module:path` is there; a path may end in a dataclass or struct field."""
  module, _, path = name.partition(':')
  try:
    found: Any = importlib.import_module(module)
  except ImportError:
    return False
  for part in path.split('.'):
    fields = getattr(found, '__dataclass_fields__', {}), getattr(found, '__struct_fields__', ())
    if hasattr(found, part):
      found = getattr(found, part)
    elif not any(part in known for known in fields):
      return False
  return True
