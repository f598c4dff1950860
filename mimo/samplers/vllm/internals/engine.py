"""vLLM's engine client in the API server: turns, pauses, stamps, and what it knows of itself.

Versions per token range are those that vLLM keeps per request. Log-probs stay the arrays that they
come in.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import numpy as np

from mimo.samplers.vllm.internals.contract import check_version, vllm_version
from mimo.samplers.vllm.internals.patches import requested_patches
from mimo.samplers.vllm.internals.scheduler import IN_BLOCKS
from mimo.samplers.vllm.internals.worker import WorkerExtension
from mimo.samplers.vllm.launch import SCHEDULER, WORKER_EXTENSION
from mimo.samplers.vllm.records import FlatRecord, requested_logprobs, told_routes
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import FinishReason, RouteShape

_log = logging.getLogger('vllm.mimo')

# vLLM raises smaller temperatures to this one, and refuses larger ones than the other.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0


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
      raise ValueError(f'--worker-extension-cls is {extension!r}; expected {WORKER_EXTENSION}')
    scheduler = config.scheduler_config.scheduler_cls
    if scheduler != SCHEDULER:
      _log.warning(
        'mimo: --scheduler-cls is %s: turns are as they would be with %s, but slower',
        scheduler,
        SCHEDULER,
      )

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

  @property
  def routes(self) -> RouteShape | None:
    aux = vars(self._config).get('aux_output_config')  # which an older vLLM has not
    if aux is None or not aux.enable_return_routed_experts:
      return None
    model = self._model
    return RouteShape(
      model.get_total_num_hidden_layers(),
      model.get_num_experts(),
      model.get_num_experts_per_tok(),
    )

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
      'routes': self.routes,
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

    queue = await self._client.add_request(
      request.request, tokens_input(request.tokens.tolist()), self._sampling_params(request)
    )
    try:
      self._pack_logprobs(queue.request_id)
      output = queue.get_nowait() or await queue.get()
      while not output.finished:
        output = await queue.get()
    except BaseException:
      if not self.dead:
        await self._client.abort(queue.request_id, internal=True)
      raise
    finally:
      queue.close()
    return _flat_record(output.outputs[0], request)

  def _pack_logprobs(self, request_id: str) -> None:
    """Has a request's log-probs kept as the arrays that they come in.

    vLLM turns each into Python numbers, which costs more than the rest of a token together.
    """
    state = self._client.output_processor.request_states.get(request_id)
    if state is not None:
      processor = state.logprobs_processor
      processor.logprobs = _Rows(processor.logprobs)
      processor.__class__ = _packed_processor()

  def _sampling_params(self, request: GenerateRequest) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling = request.sampling
    room = self.max_tokens - len(request.tokens)
    told: dict[str, int] = {}
    if self.routes is not None:
      # A server that tells routes tells them of every request: of these as few as it can.
      first = request.routes_from
      told['routed_experts_prompt_start'] = len(request.tokens) if first is None else first
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
      extra_args=dict(IN_BLOCKS),
      skip_clone=True,
      **told,
    )


class _Rows:
  """Log-probs of a request: arrays [n, 1 + K], as many as steps."""

  def __init__(self, before: Any):
    self.ids: list[np.ndarray] = []
    self.logps: list[np.ndarray] = []
    if len(before):  # what came in before the request's processor was changed
      shape = (len(before), -1)
      self.ids.append(np.array(before.token_ids, np.int32).reshape(shape))
      self.logps.append(np.array(before.logprobs, np.float32).reshape(shape))


@functools.cache
def _packed_processor() -> type:
  from vllm.v1.engine.logprobs import LogprobsProcessor

  class PackedProcessor(LogprobsProcessor):
    """Keeps the arrays of sampled log-probs."""

    def _update_sample_logprobs(self, logprobs_lists: Any) -> None:
      width = 1 + self.num_logprobs  # others in the batch may have asked for more
      self.logprobs.ids.append(logprobs_lists[0][:, :width])
      self.logprobs.logps.append(logprobs_lists[1][:, :width])

  return PackedProcessor


def _flat_record(output: Any, request: GenerateRequest) -> FlatRecord:
  tokens = np.array(output.token_ids, np.int32)
  rows = output.logprobs
  if not isinstance(rows, _Rows):
    rows = _Rows(rows)
  finish = {'stop': FinishReason.STOP, 'length': FinishReason.LENGTH}.get(
    output.finish_reason, FinishReason.ABORT
  )
  empty = np.zeros((0, 1))
  routes = None
  if request.routes_from is not None and finish != FinishReason.ABORT:
    # The last token drawn was not run.
    end = len(request.tokens) + len(tokens) - 1
    routes = told_routes(output.routed_experts, start=request.routes_from, end=end)
  return FlatRecord(
    tokens=tokens,
    ids=np.concatenate(rows.ids or [empty]).astype(np.int32, copy=False),
    logps=np.concatenate(rows.logps or [empty]).astype(np.float32, copy=False),
    finish=finish,
    spans=[(int(span.version), span.start, span.end) for span in output.weight_versions or ()],
    kept=None if output.sampling_mask is None else output.sampling_mask.token_ids,
    routes=routes,
  )
