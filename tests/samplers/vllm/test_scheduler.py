"""Outputs that are held back and merged, by hand and against vLLM's own scheduler."""

import dataclasses
import json
import logging
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest

from mimo.samplers.vllm.internals import scheduler
from mimo.samplers.vllm.internals.scheduler import (
  BLOCK_SECS,
  BLOCK_TOKENS,
  IN_BLOCKS,
  HeldOutputs,
  StepLogprobs,
)
from mimo.samplers.vllm.launch import ServerSettings, server_environment

CHILD = pathlib.Path(__file__).with_name('scheduler_child.py')


class Logprobs(NamedTuple):
  logprob_token_ids: np.ndarray
  logprobs: np.ndarray
  sampled_token_ranks: np.ndarray
  cu_num_generated_tokens: list[int] | None = None

  def slice_request(self, index, count):
    if self.cu_num_generated_tokens is not None:
      index = self.cu_num_generated_tokens[index]
    return Logprobs(*(array[index : index + count] for array in self[:3]))


@dataclasses.dataclass
class Output:
  request_id: str
  new_token_ids: list[int]
  new_logprobs: Logprobs | None = None
  finish_reason: str | None = None
  events: list[str] | None = None
  routed_experts: np.ndarray | None = None


@dataclasses.dataclass
class Params:
  extra_args: dict[str, Any] | None


@dataclasses.dataclass
class Request:
  sampling_params: Params | None
  client_index: int = 0


def _held():
  return HeldOutputs(('finish_reason', 'events'))


def _output(name, token, width=3, **fields):
  """A token whose log-probs say which it is, in rows as wide as a step's."""
  ids = np.array([[token, *range(1, width)]])
  logps = np.full((1, width), -float(token))
  return Output(name, [token], Logprobs(ids, logps, np.array([token])), **fields)


def _hold(held, outputs, requests):
  """Holds the outputs of one step, with log-probs as `StepLogprobs` has them."""
  parts = [output.new_logprobs for output in outputs]
  kept = [part for part in parts if part is not None]
  if kept:
    step = StepLogprobs(
      Logprobs(*(np.concatenate(arrays) for arrays in list(zip(*kept, strict=True))[:3]))
    )
    for row, output in enumerate(output for output in outputs if output.new_logprobs is not None):
      output.new_logprobs = step.slice_request(row, 1)
  return held.hold(outputs, requests)


def test_routes_are_merged_in_order():
  """The first output has those of the prompt, and is sent; one that is sent alone keeps its own."""
  held = _held()
  told = [np.arange(8, dtype=np.uint8).reshape(4, 1, 2)]
  told += [np.full((1, 1, 2), 10 + step, np.uint8) for step in range(3)]
  sent = []
  for step, rows in enumerate([*told, None]):
    finish = 'stop' if step == 4 else None
    output = _output('a', step, routed_experts=rows, finish_reason=finish)
    sent += _hold(held, [output], REQUESTS)
  first, last = sent
  assert first.routed_experts is told[0]
  assert last.new_token_ids == [1, 2, 3, 4]
  assert last.routed_experts.dtype == np.uint8
  assert last.routed_experts.tolist() == [[[10, 10]], [[11, 11]], [[12, 12]]]
  (alone,) = _hold(held, [_output('b', 1)], REQUESTS)
  assert alone.routed_experts is None


REQUESTS = {'a': Request(Params(IN_BLOCKS)), 'b': Request(Params(IN_BLOCKS), client_index=2)}


def test_a_request_sends_its_first_output_then_full_blocks_and_the_rest_with_its_last():
  held = _held()
  sent = {}
  last = BLOCK_TOKENS + 5
  for token in range(last + 1):
    finish = 'stop' if token == last else None
    (*outputs,) = _hold(held, [_output('a', token, finish_reason=finish)], REQUESTS)
    if outputs:
      (sent[token],) = outputs
  assert list(sent) == [0, BLOCK_TOKENS, last]
  assert sent[BLOCK_TOKENS].new_token_ids == list(range(1, BLOCK_TOKENS + 1))
  assert sent[last].new_token_ids == list(range(BLOCK_TOKENS + 1, last + 1))
  assert sent[last].finish_reason == 'stop'
  assert not held
  for output in sent.values():
    ids, logps, ranks, starts = output.new_logprobs
    np.testing.assert_array_equal(ids[:, 0], output.new_token_ids)
    np.testing.assert_array_equal(logps[:, 2], -np.array(output.new_token_ids, float))
    np.testing.assert_array_equal(ranks, output.new_token_ids)
    assert starts is None


def test_rows_are_cut_to_those_of_the_narrowest_step():
  held = _held()
  _hold(held, [_output('a', 0)], REQUESTS)
  for token, width in ((1, 3), (2, 9), (3, 4)):
    assert _hold(held, [_output('a', token, width)], REQUESTS) == []
  (output,) = _hold(held, [_output('a', 4, 6, finish_reason='length')], REQUESTS)
  np.testing.assert_array_equal(
    output.new_logprobs.logprob_token_ids, [[token, 1, 2] for token in (1, 2, 3, 4)]
  )
  assert output.new_logprobs.logprobs.shape == (4, 3)


def test_several_tokens_an_output_and_more_requests_than_before_keep_their_rows():
  held = _held()
  names = [f'r{index}' for index in range(5)]
  requests = {name: Request(Params(IN_BLOCKS)) for name in names}
  _hold(held, [_output('r0', 0)], requests)
  _hold(held, [_output('r0', 7)], requests)
  _hold(held, [_output(name, 0) for name in names[1:]], requests)
  # A step that gives each request two tokens, and the first one another request's place.
  ids = np.arange(30).reshape(10, 3)
  lists = Logprobs(ids, ids.astype(float), np.arange(10), [0, 2, 4, 6, 8])
  step = StepLogprobs(lists)
  outputs = []
  for place, name in enumerate(reversed(names)):
    part = step.slice_request(place, 2)
    outputs.append(Output(name, ids[2 * place : 2 * place + 2, 0].tolist(), part, 'stop'))
  sent = {output.request_id: output for output in held.hold(outputs, requests)}
  for place, name in enumerate(reversed(names)):
    rows = ids[2 * place : 2 * place + 2]
    before = [[7, 1, 2]] if name == 'r0' else []
    assert sent[name].new_logprobs.logprob_token_ids.tolist() == before + rows.tolist()
    assert sent[name].new_token_ids == [row[0] for row in before + rows.tolist()]
  assert not held


def test_what_only_some_outputs_have_is_not_held_nor_overtakes_tokens_before_it():
  held = _held()
  _hold(held, [_output('a', 0)], REQUESTS)
  _hold(held, [_output('a', 1)], REQUESTS)
  (output,) = _hold(held, [_output('a', 2, events=['preempted'])], REQUESTS)
  assert output.new_token_ids == [1, 2] and output.events == ['preempted']
  # An error has neither tokens nor log-probs.
  _hold(held, [_output('a', 3)], REQUESTS)
  (output,) = _hold(held, [Output('a', [], finish_reason='error')], REQUESTS)
  assert output.new_token_ids == [3] and output.finish_reason == 'error'
  np.testing.assert_array_equal(output.new_logprobs.logprob_token_ids, [[3, 1, 2]])


@pytest.mark.parametrize(
  'request_', [Request(Params(None)), Request(Params({'other': 1})), Request(None), None]
)
def test_outputs_of_other_requests_are_sent_as_they_come(request_):
  held = _held()
  requests = {} if request_ is None else {'c': request_}
  outputs = [_output('c', token) for token in range(3)]
  for output in outputs:
    (sent,) = _hold(held, [output], requests)
    assert sent is output and sent.new_token_ids == output.new_token_ids
  assert not held


def test_a_turn_of_one_token_leaves_nothing_behind():
  held = _held()
  (output,) = _hold(held, [_output('a', 0, finish_reason='length')], {})  # freed by then
  assert output.new_token_ids == [0]
  assert not held and list(held.release(REQUESTS)) == []


def test_release_sends_what_is_held_and_forgets_what_was_aborted(monkeypatch):
  now = 100.0
  monkeypatch.setattr(scheduler.time, 'monotonic', lambda: now)
  held = _held()
  for token in range(3):
    _hold(held, [_output('a', token), _output('b', 10 + token)], REQUESTS)
  assert held and not held.overdue()
  now += BLOCK_SECS
  assert held.overdue()
  ((client, output),) = held.release({'b': REQUESTS['b']})
  assert client == 2 and output.new_token_ids == [11, 12]
  assert not held and not held.overdue()
  assert _hold(held, [_output('b', 13)], REQUESTS) == []  # goes on
  assert _hold(held, [_output('a', 3)], REQUESTS) != []  # another of that name starts anew


@pytest.fixture(scope='module')
def drawn(views, tmp_path_factory):
  """What `scheduler_child` found."""
  root = tmp_path_factory.mktemp('scheduler')
  job = {'view': str(views['bf16', 0]), 'out': str(root / 'out.npz')}
  (root / 'job.json').write_text(json.dumps(job))
  settings = ServerSettings(model=job['view'], port=1, cpu_threads=1)
  environment = server_environment(settings, os.environ) | {'VLLM_ENABLE_V1_MULTIPROCESSING': '0'}
  environment.pop('XLA_FLAGS', None)
  done = subprocess.run(
    [sys.executable, str(CHILD), str(root / 'job.json')],
    env=environment,
    capture_output=True,
    text=True,
    timeout=400,
    check=False,
  )
  assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
  out = np.load(job['out'])
  return {key: out[key] for key in out.files}


@pytest.mark.vllm
def test_turns_in_blocks_equal_those_of_the_own_scheduler_bit_for_bit(drawn):
  """Through a stop id, lengths, a nucleus, widths, an abort, a pause and preemptions."""
  turns = {key.split('.')[1] for key in drawn if key.startswith('stock.') and key.count('.') == 2}
  assert turns == set('0134567')  # 2 is the one that is aborted
  for key, value in drawn.items():
    if key.startswith('stock.') and not key.endswith('.outputs'):
      other = drawn[key.replace('stock', 'blocks')]
      assert value.dtype == other.dtype
      np.testing.assert_array_equal(value, other, err_msg=key)
  assert drawn['blocks.1.finish'].tolist()[0] == 'stop'
  assert drawn['blocks.0.finish'].tolist()[0] == 'length'
  assert np.isneginf(drawn['blocks.3.logprobs']).any(), 'the nucleus cut nothing'
  assert drawn['blocks.preempted'] >= 1


@pytest.mark.vllm
def test_only_turns_in_blocks_take_fewer_outputs(drawn):
  for index in '0134567':
    tokens = len(drawn[f'blocks.{index}.tokens'])
    assert drawn[f'stock.{index}.outputs'] == tokens
    if index == '5':  # not in blocks
      assert drawn[f'blocks.{index}.outputs'] == tokens
    else:
      assert drawn[f'blocks.{index}.outputs'] <= tokens / 5


@pytest.mark.vllm
def test_a_step_tells_statistics_with_outputs_or_where_something_changed_or_when_due(drawn):
  running, outputs = drawn['told.1000000000.0'].T
  assert len(running) == 40
  # The first tokens of both, what is left of one after the abort, and its last tokens.
  assert [(step, int(n)) for step, n in enumerate(running) if n >= 0] == [(0, 2), (10, 1), (39, 0)]
  assert outputs[[0, 10, 39]].tolist() == [2, 0, 1] and outputs.sum() == 3
  running, outputs = drawn['told.0'].T
  assert running.tolist() == [2] * 10 + [1] * 29 + [0]
  assert outputs.sum() == 3


@pytest.mark.vllm
def test_it_builds_on_the_scheduler_that_vllm_would_take():
  from vllm.v1.core.sched.async_scheduler import AsyncScheduler

  make = scheduler._scheduler_class
  assert issubclass(make(True), AsyncScheduler)
  assert not issubclass(make(False), AsyncScheduler)
  assert {make(True).__name__, make(False).__name__} == {'BlockScheduler'}


@pytest.mark.vllm
def test_outputs_with_fields_that_are_not_known_are_not_held(monkeypatch, caplog):
  from vllm.v1.core.sched.scheduler import Scheduler

  known = tuple(name for name in scheduler._RARE if name != 'events')
  monkeypatch.setattr(scheduler, '_RARE', known)
  with caplog.at_level(logging.WARNING, logger='vllm.mimo'):
    monkeypatch.setattr(logging.getLogger('vllm'), 'propagate', True)
    assert scheduler._scheduler_class.__wrapped__(False) is Scheduler
  assert "sent one by one: this vLLM has ['events'] in them" in caplog.text
