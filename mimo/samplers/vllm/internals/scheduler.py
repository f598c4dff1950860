"""vLLM's scheduler, but that a request may have its outputs sent many tokens at a time.

vLLM packs, sends, unpacks and counts each token of each request by itself, and three small arrays
with it where log-probs are asked for, one more where routes are. Outputs of a request whose
`extra_args` are `IN_BLOCKS` are held here instead and sent merged: every `BLOCK_TOKENS` outputs,
every `BLOCK_SECS`, with the last one, and before a pause is complete, since a message has one
version of the weights for all that is in it. What is drawn is the same, and other requests are
served as ever.

The class to build on is the one that vLLM would have taken itself. Overridden are two methods of
its interface: `update_from_output` and `has_requests`.
"""

from __future__ import annotations

import functools
import logging
import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

_log = logging.getLogger('vllm.mimo')

IN_BLOCKS = {'mimo_blocks': True}
BLOCK_TOKENS = 64
BLOCK_SECS = 0.5

# Of an output: what `_merged` keeps of several, and what only some have, which are not held.
_MERGED = (
  'request_id',
  'new_token_ids',
  'new_logprobs',
  'routed_experts',
  'trace_headers',
  'num_nans_in_logits',
)
_RARE = (
  'new_prompt_logprobs_tensors',
  'pooling_output',
  'finish_reason',
  'stop_reason',
  'events',
  'kv_transfer_params',
  'ec_transfer_params',
  'prefill_stats',
  'mm_cache_miss_hashes',
  'new_sampling_mask',
  'spec_decode_metrics',
  'prompt_token_id_logprobs',
)


def block_scheduler(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
  """Returns a scheduler: what `--scheduler-cls` names."""
  make = _scheduler_class(bool(vllm_config.scheduler_config.async_scheduling))
  return make(vllm_config, *args, **kwargs)


@functools.cache
def _scheduler_class(is_async: bool) -> type:
  from vllm.v1.core.sched.async_scheduler import AsyncScheduler
  from vllm.v1.core.sched.interface import PauseState
  from vllm.v1.core.sched.scheduler import Scheduler
  from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

  base: Any = AsyncScheduler if is_async else Scheduler
  unknown = set(EngineCoreOutput.__struct_fields__).difference(_MERGED, _RARE)
  if unknown:
    _log.warning('mimo: outputs are sent one by one: this vLLM has %s in them', sorted(unknown))
    return base
  rare = tuple(name for name in _RARE if name in EngineCoreOutput.__struct_fields__)

  class BlockScheduler(base):
    """Holds back outputs of requests that ask for blocks."""

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      self._held = HeldOutputs(rare)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
      found = super().update_from_output(scheduler_output, model_runner_output)
      for message in found.values():
        message.outputs = self._held.hold(message.outputs, self.requests)
      if self.pause_state != PauseState.UNPAUSED or self._held.overdue():
        for index, output in self._held.release(self.requests):
          found.setdefault(index, EngineCoreOutputs()).outputs.append(output)
      return found

    def has_requests(self) -> bool:
      # A pause is complete once there is nothing to do; while outputs are held, there is.
      paused = self.pause_state != PauseState.UNPAUSED
      return super().has_requests() or (paused and bool(self._held))

  return BlockScheduler


class HeldOutputs:
  """Outputs of requests in blocks, until they are sent. An entry per such request."""

  def __init__(self, rare: Sequence[str]):
    """`rare` are the fields of an output that few have; one that has any is sent at once."""
    self._rare = operator.attrgetter(*rare)
    self._outputs: dict[str, list[Any]] = {}
    self._due = time.monotonic() + BLOCK_SECS

  def __bool__(self) -> bool:
    return any(self._outputs.values())

  def hold(self, outputs: Iterable[Any], requests: Mapping[str, Any]) -> list[Any]:
    """Returns what is to be sent of a step's outputs. `requests` are those not finished."""
    sent = []
    for output in outputs:
      name = output.request_id
      held = self._outputs.get(name)
      if held is None:
        if _in_blocks(requests.get(name)):
          self._outputs[name] = []  # its first output is sent: it tells when and how it started
        sent.append(output)
        continue
      held.append(output)
      if len(held) < BLOCK_TOKENS and all(value is None for value in self._rare(output)):
        continue
      sent.append(_merged(held))
      if output.finish_reason is None:
        held.clear()
      else:
        del self._outputs[name]
    return sent

  def overdue(self) -> bool:
    """Whether the last release is longer ago than outputs may be held."""
    return time.monotonic() >= self._due

  def release(self, requests: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yields (client, output) of all requests, and forgets those that were aborted."""
    self._due = time.monotonic() + BLOCK_SECS
    for name, held in list(self._outputs.items()):
      if name not in requests:
        del self._outputs[name]
      elif held:
        yield requests[name].client_index, _merged(held)
        held.clear()


def _in_blocks(request: Any) -> bool:
  params = None if request is None else request.sampling_params
  return params is not None and params.extra_args == IN_BLOCKS


def _merged(outputs: list[Any]) -> Any:
  """Returns the last of a request's outputs with the tokens of all."""
  last = outputs[-1]
  if len(outputs) > 1:
    last.new_token_ids = [token for output in outputs for token in output.new_token_ids]
    parts = [output.new_logprobs for output in outputs if output.new_logprobs is not None]
    if parts:
      ids, logps, ranks, _ = zip(*parts, strict=True)
      # A step's rows are as wide as the widest request's in it: the first columns are this one's.
      width = min(part.shape[1] for part in ids)
      last.new_logprobs = type(parts[0])(
        np.concatenate([part[:, :width] for part in ids]),
        np.concatenate([part[:, :width] for part in logps]),
        np.concatenate(ranks),
        None,
      )
    rows = [output.routed_experts for output in outputs if output.routed_experts is not None]
    if rows:
      last.routed_experts = np.concatenate(rows)  # an output's are of what was run since the last
  return last
