"""The one module that touches vLLM's internals.

What it relies on is listed in `RELIES_ON` and checked by `check_internals`. Versions of vLLM
outside [OLDEST, NEWEST] are refused: what these names mean may have changed.

The engine's own interface carries most of it: pausing, stamping and resuming are calls of
`AsyncLLM`, and (version, token range) spans are those that vLLM keeps per request. Loading is a
method of the worker, added through `--worker-extension-cls`: it drives vLLM's layerwise reload
itself, so that it can tell what was loaded.
"""

from __future__ import annotations

import copy
import importlib
import logging
import os
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from mimo.samplers.vllm.launch import MOE_RELOAD, NVFP4_EMULATION, PATCHES, PATCHES_VARIABLE
from mimo.samplers.vllm.records import FlatRecord, requested_logprobs
from mimo.samplers.vllm.view_files import read_layout
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import FinishReason

OLDEST = (0, 30)
NEWEST = (0, 32)
TESTED = ('0.32.0',)

# vLLM raises smaller temperatures to this one, and refuses larger ones than the other.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0

_ASYNC_LLM = 'vllm.v1.engine.async_llm:AsyncLLM'
_RELOAD = 'vllm.model_executor.model_loader.reload.layerwise'
RELIES_ON = (
  f'{_ASYNC_LLM}.generate',
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
  'vllm.sampling_params:RequestOutputKind.FINAL_ONLY',
  'vllm.v1.engine.exceptions:EngineDeadError',
  'vllm.v1.engine.output_processor:OutputProcessor.has_request',
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

_log = logging.getLogger('vllm.mimo')


class LoadError(Exception):
  """A view's weights did not all reach the model, or others did."""


def vllm_version() -> str:
  """Returns the version of the vLLM that is installed. Raises ImportError where none is."""
  return str(importlib.import_module('vllm').__version__)


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
  missing = [name for name in RELIES_ON if not _resolves(name)]
  if missing:
    raise ImportError(f'vLLM {vllm_version()} lacks {", ".join(missing)}')


def _resolves(name: str) -> bool:
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


class Progress:
  """Counts what the engine does: an aggregate stat logger of vLLM's, by its methods."""

  def __init__(self) -> None:
    self.steps = 0
    self.tokens = 0
    self.running = 0
    self.waiting = 0

  def record(
    self,
    scheduler_stats: Any,
    iteration_stats: Any,
    mm_cache_stats: Any = None,
    engine_idx: int = 0,
  ) -> None:
    if scheduler_stats is not None:
      self.running = scheduler_stats.num_running_reqs
      self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
    self.steps += 1
    if iteration_stats is not None:
      self.tokens += iteration_stats.num_generation_tokens

  def log_engine_initialized(self) -> None: ...

  def log(self) -> None: ...

  def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

  def record_admission_rejection(self, reason: str) -> None: ...


class VllmEngine:
  """`activation.Engine`, and turns, on a vLLM engine client in the API server."""

  def __init__(self, client: Any):
    """Raises ValueError where the server's flags do not let its log-probs be trained on."""
    config = client.vllm_config
    self._client = client
    self._model = config.model_config
    self._config = config
    self._progress = Progress()
    if client.logger_manager is None:
      raise ValueError('the server keeps no statistics; expected no --disable-log-stats')
    client.logger_manager.stat_loggers.append(self._progress)
    if self._model.logprobs_mode != 'processed_logprobs':
      raise ValueError(
        f'--logprobs-mode is {self._model.logprobs_mode}; expected processed_logprobs, of the '
        'distribution drawn from'
      )
    extension = config.parallel_config.worker_extension_cls
    if not extension.endswith(f'.{WorkerExtension.__name__}'):
      raise ValueError(f'--worker-extension-cls is {extension!r}; expected {_EXTENSION}')

  @property
  def start_directory(self) -> str:
    return str(self._model.model)

  @property
  def vocab_size(self) -> int:
    return int(self._model.get_vocab_size())

  @property
  def max_tokens(self) -> int:
    return int(self._model.max_model_len)

  @property
  def max_candidates(self) -> int:
    limit = int(self._model.max_logprobs)
    return self.vocab_size if limit < 0 or limit >= self.vocab_size else limit - 1

  @property
  def temperatures(self) -> tuple[float, float]:
    return MIN_TEMPERATURE, MAX_TEMPERATURE

  def status(self) -> dict[str, Any]:
    """Returns what the engine knows of a `messages.Status`."""
    cache, version = self._config.cache_config, vllm_version()
    cache_dtype = str(cache.cache_dtype)
    return {
      'vllm': version,
      'tested': check_version(version),
      'patches': requested_patches(),
      'running': self._progress.running,
      'waiting': self._progress.waiting,
      'tokens': self._progress.tokens,
      'steps': self._progress.steps,
      'logprob_mode': str(self._model.logprobs_mode),
      'logits_dtype': str(self._model.head_dtype).removeprefix('torch.'),
      'kv_cache_dtype': 'fp8' if cache_dtype.startswith('fp8') else 'bf16',
      'vocab_size': self.vocab_size,
      'max_tokens': self.max_tokens,
      'max_candidates': self.max_candidates,
      'prefix_caching': bool(cache.enable_prefix_caching),
      'max_running': int(self._config.scheduler_config.max_num_seqs),
    }

  @property
  def dead(self) -> bool:
    return bool(self._client.errored)

  async def pause(self, *, drop_cache: bool) -> None:
    await self._client.pause_generation(mode='keep', clear_cache=drop_cache)

  async def load(self, directory: str) -> None:
    await self._client.collective_rpc(WorkerExtension.mimo_load.__name__, args=(directory,))

  async def stamp(self, number: int) -> None:
    await self._client.update_weight_version(str(number))

  async def resume(self) -> None:
    await self._client.resume_generation()

  async def abort_all(self) -> None:
    await self._client.pause_generation(mode='abort', clear_cache=True)

  async def checksums(self) -> dict[str, str]:
    """Returns parameter -> sha256 of what the workers hold."""
    parts = await self._client.compute_weight_checksums()
    return {name: digest for part in parts for name, digest in part.items()}

  def num_drawn(self, request: str) -> int:
    """Returns how many tokens of a request in flight are drawn."""
    processor = self._client.output_processor
    states = [
      processor.request_states[name] for name in processor.external_req_ids.get(request, ())
    ]
    return sum(state.detokenizer.num_output_tokens() for state in states)

  async def draw(self, request: GenerateRequest) -> FlatRecord:
    """Draws a turn. Cancelling it aborts the request.

    Raises whatever vLLM does.
    """
    from vllm.inputs.engine import tokens_input

    prompt = tokens_input(request.tokens.tolist())
    final = None
    async for output in self._client.generate(
      prompt, self._sampling_params(request), request.request
    ):
      final = output
    if final is None or not final.finished:
      raise RuntimeError(f'request {request.request} ended without an output')
    return _flat_record(final.outputs[0])

  def _sampling_params(self, request: GenerateRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    room = self.max_tokens - len(request.tokens)
    return SamplingParams(
      temperature=sampling.temperature,
      top_p=sampling.top_p,
      top_k=sampling.top_k,
      seed=request.seed,
      max_tokens=min(sampling.max_turn_tokens, room),
      stop_token_ids=list(sampling.stop_ids),
      ignore_eos=True,  # the request says what stops it
      logprobs=requested_logprobs(sampling.candidates, self.vocab_size),
      flat_logprobs=True,
      detokenize=False,
      output_kind=RequestOutputKind.FINAL_ONLY,
      skip_clone=True,
    )


def _flat_record(output: Any) -> FlatRecord:
  tokens = np.array(output.token_ids, np.int32)
  flat = output.logprobs
  width = len(flat.token_ids) // max(1, len(tokens))
  shape = (len(tokens), width)
  kept = None if output.sampling_mask is None else output.sampling_mask.token_ids
  finish = {'stop': FinishReason.STOP, 'length': FinishReason.LENGTH}.get(
    output.finish_reason, FinishReason.ABORT
  )
  return FlatRecord(
    tokens=tokens,
    ids=np.array(flat.token_ids, np.int32).reshape(shape),
    logps=np.array(flat.logprobs, np.float32).reshape(shape),
    finish=finish,
    spans=[(int(s.version), s.start, s.end) for s in output.weight_versions or ()],
    kept=kept,
  )


class WorkerExtension:
  """Mixed into vLLM's worker: its methods are called through `collective_rpc`."""

  def mimo_load(self, directory: str) -> int:
    """Loads a view into the running model. Returns how many tensors that took.

    Raises LoadError where a tensor of the view was not read, or a parameter of the model not
    wholly loaded. The weights are then unknown, and another load may follow.
    """
    from vllm.config import set_current_vllm_config

    worker: Any = self
    with set_current_vllm_config(worker.vllm_config):
      count = _load_verified(worker.vllm_config, worker.model_runner.get_model(), directory)
    runner = worker.model_runner
    for name in ('reset_encoder_cache', 'reset_mm_cache'):  # what vLLM's own reload resets
      getattr(runner, name)()
    return count


_EXTENSION = f'{WorkerExtension.__module__}.{WorkerExtension.__name__}'


def _load_verified(vllm_config: Any, model: Any, directory: str) -> int:
  import torch
  from vllm.model_executor.model_loader.reload import layerwise

  expected = set(read_layout(directory).tensors)
  seen: list[str] = []
  with torch.device(vllm_config.device_config.device):
    owners = _owners(model)
    layerwise.initialize_layerwise_reload(model)
    try:
      model.load_weights(_tensors(vllm_config, model, directory, seen))
      unread = expected.symmetric_difference(seen)
      if unread or len(seen) != len(expected):
        raise LoadError(f'{len(seen)} tensors read of {len(expected)}: {sorted(unread)[:3]}')
      _check_loaded(owners)
      layerwise.finalize_layerwise_reload(model, vllm_config.model_config)
      _prepare_borrowers(model, owners)
    except BaseException:
      _abandon(model)
      raise
  return len(seen)


def _tensors(vllm_config: Any, model: Any, directory: str, seen: list[str]) -> Iterator[Any]:
  """Yields what vLLM's own loader reads of a directory, and notes its names."""
  from vllm.model_executor.model_loader import get_model_loader
  from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

  loader = get_model_loader(vllm_config.load_config)
  if not isinstance(loader, DefaultModelLoader):
    raise LoadError(f'{type(loader).__name__} cannot reload; expected a loader of safetensors')
  source = copy.copy(vllm_config.model_config)
  source.model, source.revision, source.model_weights = directory, None, ''
  for name, tensor in loader.get_all_weights(source, model):
    seen.append(name)
    yield name, tensor


def _owners(model: Any) -> dict[str, Any]:
  """Returns name -> layer of those that own parameters: a tied head borrows the embedding's."""
  from vllm.model_executor.layers.attention import is_deferred_attention_layer

  owners: dict[str, Any] = {}
  seen: set[int] = set()
  for name, layer in model.named_modules():
    own = {parameter.data_ptr() for parameter in layer.parameters(recurse=False)}
    # Scales of caches belong to attention layers; a view need not hold them.
    if own - seen and not is_deferred_attention_layer(layer):
      owners[name] = layer
    seen |= own
  return owners


def _prepare_borrowers(model: Any, owners: dict[str, Any]) -> None:
  """Has layers that share another's parameters derive again what they derive from them.

  vLLM's reload passes a tied head by, since nothing is loaded into it, and on CPU the head
  multiplies with a packed copy of its own: it would keep the old weights without a word.
  """
  for name, layer in model.named_modules():
    if name in owners or not list(layer.parameters(recurse=False)):
      continue
    method: Any = getattr(layer, 'quant_method', None)
    if hasattr(method, 'embedding'):  # what embeds can be a tied head
      method.process_weights_after_loading(layer)


def _check_loaded(owners: dict[str, Any]) -> None:
  """Raises LoadError for a layer that no tensor was loaded into, or only in part."""
  from vllm.model_executor.model_loader.reload import layerwise

  partly = []
  for name, layer in owners.items():
    info = layerwise.get_layerwise_info(layer)
    own = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
    # A layer that is complete has been processed already, and is no longer loading.
    if info.can_load() and info.load_numel < own:
      partly.append(f'{info.load_numel} of {own} numbers of {name} were loaded')
  if partly:
    raise LoadError(f'{partly[0]} ({len(partly)} such)')


def _abandon(model: Any) -> None:
  """Ends a load that failed, so that another can start: unfinished layers keep what they had."""
  from vllm.model_executor.model_loader.reload import layerwise

  for layer in model.modules():
    info = layerwise.get_layerwise_info(layer)
    if info.can_load():
      if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
      info.reset()


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
