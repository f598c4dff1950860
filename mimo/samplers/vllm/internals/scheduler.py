"""vLLM's scheduler, but that a request may have its outputs sent many tokens at a time.

vLLM packs, sends, unpacks and counts each token of each request by itself, and three small arrays
with it where log-probs are asked for, one more where routes are. Outputs of a request whose
`extra_args` are `IN_BLOCKS` are held here instead and sent merged: every `BLOCK_TOKENS` tokens,
every `BLOCK_SECS`, with the last one, and before a pause is complete, since a message has one
version of the weights for all that is in it. What is drawn is the same, and other requests are
served as ever. A step of which nothing is sent tells no statistics either, but for what `_tells`
says: a message for each step costs as much as some of its tokens.

The class to build on is the one that vLLM would have taken itself. Overridden are three methods of
its interface: `update_from_output`, `has_requests` and `make_stats`. The log-probs that the first
one reads are wrapped, so that those held are not cut into arrays of one row.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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
STATS_SECS = 0.1

# Of an output: what is kept of several, and what only some have, which are not held.
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
      # The arguments of the statistics of the step whose outputs are being read.
      self._in_step = False
      self._stats_of: tuple[tuple[Any, ...], dict[str, Any]] | None = None
      self._stats_due = 0.0
      self._counts: tuple[int, int] | None = None

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
      if model_runner_output.logprobs is not None:
        model_runner_output.logprobs = StepLogprobs(model_runner_output.logprobs)
      self._in_step, self._stats_of = True, None
      try:
        found = super().update_from_output(scheduler_output, model_runner_output)
      finally:
        self._in_step = False
      for message in found.values():
        message.outputs = self._held.hold(message.outputs, self.requests)
      if self.pause_state != PauseState.UNPAUSED or self._held.overdue():
        for index, output in self._held.release(self.requests):
          found.setdefault(index, EngineCoreOutputs()).outputs.append(output)
      found = {
        index: message
        for index, message in found.items()
        if message.outputs or message.finished_requests
      }
      if self._stats_of is not None and (found or self._tells(self._stats_of)):
        args, kwargs = self._stats_of
        message = next(iter(found.values()), None)
        if message is None:
          message = found[0] = EngineCoreOutputs()
        message.scheduler_stats = super().make_stats(*args, **kwargs)
        self._stats_due = time.monotonic() + STATS_SECS
        self._counts = self.get_request_counts()
      return found

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
      if not self._in_step:
        return super().make_stats(*args, **kwargs)
      # Made once it is known what is sent. What vLLM counts meanwhile is in the next ones.
      self._stats_of = (args, kwargs) if self.log_stats else None
      return None

    def _tells(self, stats_of: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
      """Returns whether statistics are sent without outputs.

      That is where other numbers of requests run or wait than were told, where some are of this
      step alone (arguments, such as speculation's), and every `STATS_SECS`.
      """
      args, kwargs = stats_of
      return (
        self.get_request_counts() != self._counts
        or any(value is not None for value in (*args, *kwargs.values()))
        or time.monotonic() >= self._stats_due
      )

    def has_requests(self) -> bool:
      # A pause is complete once there is nothing to do; while outputs are held, there is.
      paused = self.pause_state != PauseState.UNPAUSED
      return super().has_requests() or (paused and bool(self._held))

  return BlockScheduler


class StepLogprobs:
  """The log-probs of a step, vLLM's `LogprobsLists`: tells a request where its own are."""

  __slots__ = ('_lists',)

  def __init__(self, lists: Any):
    self._lists = lists

  def slice_request(self, index: int, count: int) -> tuple[Any, int, int]:
    """Returns what to cut, and cuts nothing yet: an array for each held row is what costs."""
    return self._lists, index, count


@dataclasses.dataclass(slots=True, eq=False)
class _Turn:
  """A request in blocks, and what is held of it.

  Attributes:
    slot: where its log-probs are held.
    tokens: as held.
    rows: how many rows of log-probs.
    width: of the narrowest step that they come from.
    routes: as held.
    last: the output that came last; None where nothing is held.
  """

  slot: int
  tokens: list[int]
  rows: int
  width: int
  routes: list[np.ndarray]
  last: Any


_WIDEST = 1 << 62


class HeldOutputs:
  """Outputs of requests in blocks, until they are sent. An entry per such request."""

  def __init__(self, rare: Sequence[str]):
    """`rare` are the fields of an output that few have; one that has any is sent at once."""
    self._rare = operator.attrgetter(*rare)
    self._turns: dict[str, _Turn] = {}
    self._free: list[int] = []
    self._rows = _Rows()
    self._due = time.monotonic() + BLOCK_SECS

  def __bool__(self) -> bool:
    return any(turn.last is not None for turn in self._turns.values())

  def hold(self, outputs: Iterable[Any], requests: Mapping[str, Any]) -> list[Any]:
    """Returns what is to be sent of a step's outputs. `requests` are those not finished."""
    sent, full = [], []
    lists, width = None, 0
    places: list[tuple[int, int, int]] = []
    for output in outputs:
      turn = self._turns.get(output.request_id)
      part = output.new_logprobs
      if turn is None:
        if _in_blocks(requests.get(output.request_id)):
          self._start(output.request_id)  # this output is sent: it tells when and how it started
        if part is not None:
          output.new_logprobs = part[0].slice_request(*part[1:])
        sent.append(output)
        continue
      turn.last = output
      turn.tokens += output.new_token_ids
      if part is not None:
        if part[0] is not lists:
          lists = part[0]
          starts, width = lists.cu_num_generated_tokens, lists.logprobs.shape[1]
        first = part[1] if starts is None else starts[part[1]]
        for row in range(first, first + part[2]):
          places.append((turn.slot, turn.rows, row))
          turn.rows += 1
        if width < turn.width:
          turn.width = width
      if output.routed_experts is not None:
        turn.routes.append(output.routed_experts)
      if len(turn.tokens) >= BLOCK_TOKENS or _any_given(self._rare(output)):
        full.append(turn)
    if places:
      self._rows.write(lists, places)
    for turn in full:
      output = self._merged(turn)
      sent.append(output)
      if output.finish_reason is not None:
        self._forget(output.request_id)
    return sent

  def overdue(self) -> bool:
    """Whether the last release is longer ago than outputs may be held."""
    return time.monotonic() >= self._due

  def release(self, requests: Mapping[str, Any]) -> Iterator[tuple[int, Any]]:
    """Yields (client, output) of all requests, and forgets those that were aborted."""
    self._due = time.monotonic() + BLOCK_SECS
    for name, turn in list(self._turns.items()):
      if name not in requests:
        self._forget(name)
      elif turn.last is not None:
        yield requests[name].client_index, self._merged(turn)

  def _start(self, name: str) -> None:
    slot = self._free.pop() if self._free else len(self._turns)
    self._turns[name] = _Turn(slot, [], 0, _WIDEST, [], None)

  def _forget(self, name: str) -> None:
    self._free.append(self._turns.pop(name).slot)

  def _merged(self, turn: _Turn) -> Any:
    """Returns a turn's last output with all that is held of it, which is held no more."""
    output = turn.last
    output.new_token_ids = turn.tokens
    output.new_logprobs = self._rows.read(turn.slot, turn.rows, turn.width) if turn.rows else None
    if turn.routes:  # those of an output are of what was run since the one before it
      output.routed_experts = np.concatenate(turn.routes)
    turn.tokens, turn.rows, turn.width, turn.routes, turn.last = [], 0, _WIDEST, [], None
    return output


class _Rows:
  """Rows of log-probs, by slot and place: the three arrays of vLLM's `LogprobsLists`.

  They grow to the most slots held at a time and the widest step, which `--max-logprobs` bounds.
  """

  def __init__(self) -> None:
    self._kind: Any = None
    self._shape = (0, 0, 0)  # slots, places, width
    self._arrays: list[np.ndarray] = []  # [slots * places, width], the third without a width

  def write(self, lists: Any, places: list[tuple[int, int, int]]) -> None:
    """Copies rows of a step to where they are held. `places` has (slot, place, row of the step)."""
    slots, at, rows = np.array(places).T
    width = lists[0].shape[1]
    self._kind = type(lists)
    self._fit(lists[:3], (int(slots.max()) + 1, int(at.max()) + 1, width))
    at = slots * self._shape[1] + at
    for array, held in zip(lists[:3], self._arrays, strict=True):
      if held.ndim == 1 or held.shape[1] == width:
        held[at] = array[rows]
      else:
        held[at, :width] = array[rows]

  def read(self, slot: int, count: int, width: int) -> Any:
    """Returns a copy of a slot's first rows."""
    start = slot * self._shape[1]
    ids, logps, ranks = (array[start : start + count] for array in self._arrays)
    return self._kind(ids[:, :width].copy(), logps[:, :width].copy(), ranks.copy(), None)

  def _fit(self, arrays: Sequence[np.ndarray], needed: tuple[int, int, int]) -> None:
    """Grows what is there to the slots, places and width that are needed."""
    there = self._shape
    if there[0] >= needed[0] and there[1] >= needed[1] and there[2] >= needed[2]:
      return
    slots, places, width = (max(pair) for pair in zip(there, needed, strict=True))
    self._shape = (1 << (slots - 1).bit_length(), max(places, BLOCK_TOKENS), width)
    before, self._arrays = self._arrays, []
    for index, array in enumerate(arrays):
      grown = np.empty(self._shape[: array.ndim + 1], array.dtype)
      if before:
        part = there[: array.ndim + 1]
        grown[tuple(slice(size) for size in part)] = before[index].reshape(part)
      self._arrays.append(grown.reshape(-1, *grown.shape[2:]))


def _any_given(values: tuple[Any, ...]) -> bool:
  return any(map(operator.is_not, values, itertools.repeat(None)))


def _in_blocks(request: Any) -> bool:
  params = None if request is None else request.sampling_params
  return params is not None and params.extra_args == IN_BLOCKS
