import asyncio
import dataclasses
import hashlib
import json
import re

import numpy as np
import pytest

from mimo.samplers.vllm import wire
from mimo.samplers.vllm.messages import (
  ACTIVATE_PATH,
  GENERATE_PATH,
  STATUS_PATH,
  Activation,
  Failure,
  Outcome,
  Status,
)
from mimo.samplers.vllm.records import FlatRecord
from mimo.samplers.vllm.routes import Routes
from mimo.types import FinishReason, RouteShape, SamplingParams, Version, VersionSpan

SAMPLING = SamplingParams(
  temperature=1.0, top_p=1.0, top_k=0, candidates=2, max_turn_tokens=4, stop_ids=()
)


class FakeEngine:
  """Draws the same token always, once `gate` lets it."""

  vocab_size = 8
  max_tokens = 6
  max_candidates = 2
  temperatures = (0.01, 2.0)
  routes = None

  def __init__(self, directory):
    self.start_directory = directory
    self.dead = False
    self.gate = asyncio.Event()
    self.gate.set()
    self.finish = FinishReason.LENGTH
    self.error = None
    self.asked = []
    self.cancelled = []

  async def pause(self, *, drop_cache): ...

  async def load(self, directory): ...

  async def stamp(self, number): ...

  async def resume(self): ...

  async def abort_all(self): ...

  def num_drawn(self, request):
    return 1

  async def draw(self, request):
    self.asked.append(request.request)
    try:
      await self.gate.wait()
    except asyncio.CancelledError:
      self.cancelled.append(request.request)
      raise
    if self.error is not None:
      raise self.error
    logps = np.log(np.array([[0.25, 0.75, 0.25, 1e-9]], np.float32))
    logps[0, 3] = -np.inf
    ids = np.array([[3, 5, 3, 1]], np.int32)
    return FlatRecord(np.array([3], np.int32), ids, logps, self.finish, [(1, 0, 1)])

  def status(self):
    return {
      'vllm': '0.32.0',
      'tested': True,
      'patches': (),
      'running': 0,
      'waiting': 0,
      'tokens': 0,
      'steps': 0,
      'logprob_mode': 'processed_logprobs',
      'logits_dtype': 'float32',
      'kv_cache_dtype': 'bf16',
      'vocab_size': 8,
      'max_tokens': 6,
      'max_candidates': 2,
      'prefix_caching': True,
      'max_running': 4,
    }


class Call:
  """One request to an ASGI application: what it sends, and what comes back."""

  def __init__(self, routes, path, body=b''):
    (self._app,) = [endpoint for where, _, endpoint in routes.endpoints() if where == path]
    self._inbox = asyncio.Queue()
    self._inbox.put_nowait({'type': 'http.request', 'body': body, 'more_body': False})
    self.messages = []
    self.task = asyncio.ensure_future(self._app({}, self._inbox.get, self._send))

  async def _send(self, message):
    self.messages.append(message)

  def hang_up(self):
    self._inbox.put_nowait({'type': 'http.disconnect'})

  async def answer(self):
    """Returns (status, body)."""
    await asyncio.wait_for(self.task, 60)
    return self.messages[0]['status'], b''.join(m['body'] for m in self.messages[1:])


async def _until(condition):
  async with asyncio.timeout(60):
    while not condition():
      await asyncio.sleep(0.005)


@pytest.fixture
def activation(tmp_path):
  tmp_path.joinpath('config.json').write_text('{}')
  header = json.dumps({'x': {'dtype': 'F32', 'shape': [1], 'data_offsets': [0, 4]}}).encode()
  content = len(header).to_bytes(8, 'little') + header + bytes(4)
  tmp_path.joinpath('model.safetensors').write_bytes(content)
  files = {
    path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
    for path in tmp_path.iterdir()
  }
  return Activation(Version(1, 0, 0), str(tmp_path), 'bf16', files, 'keep')


def _run(activation, scenario, *, activated=True):
  async def main():
    engine = FakeEngine(activation.directory)
    routes = Routes()
    routes.connect(engine)
    if activated:
      status, body = await Call(routes, ACTIVATE_PATH, activation.encode()).answer()
      assert status == 200, body
      assert json.loads(body)['version'] == 1
    await scenario(routes, engine)

  asyncio.run(main())


def _request(
  tokens=(1, 2), *, sampling=SAMPLING, min_version=None, keep_alive_secs=5.0, routes_from=None
):
  ids = np.array(tokens, np.int32)
  return wire.GenerateRequest(
    'r', ids, sampling, None, min_version, keep_alive_secs, routes_from
  ).encode()


def test_a_turn_in_one_piece(activation):
  async def scenario(routes, engine):
    call = Call(routes, GENERATE_PATH, _request(min_version=1))
    status, body = await call.answer()
    assert status == 200
    headers = dict(call.messages[0]['headers'])
    assert headers[b'content-length'] == str(len(body)).encode()
    reader = wire.FrameReader()
    (sample,) = reader.feed(body)
    reader.finish()
    assert sample.tokens.tolist() == [3]
    assert sample.candidates.ids.tolist() == [5, 3]
    assert sample.full_support.tolist() == [True]
    assert sample.spans == (VersionSpan(0, 1, 1),)

  _run(activation, scenario)


def test_a_long_turn_is_kept_alive(activation):
  async def scenario(routes, engine):
    engine.gate.clear()
    call = Call(routes, GENERATE_PATH, _request(keep_alive_secs=0.01))
    await _until(lambda: len(call.messages) >= 4)
    engine.gate.set()
    status, body = await call.answer()
    messages = wire.FrameReader().feed(body)
    assert status == 200
    assert messages[:2] == [wire.KeepAlive(1), wire.KeepAlive(1)]
    assert messages[-1].tokens.tolist() == [3]

  _run(activation, scenario)


def test_a_failure_after_keep_alives_is_a_frame(activation):
  async def scenario(routes, engine):
    engine.gate.clear()
    engine.finish = FinishReason.ABORT
    call = Call(routes, GENERATE_PATH, _request(keep_alive_secs=0.01))
    await _until(lambda: len(call.messages) >= 2)
    engine.gate.set()
    _, body = await call.answer()
    assert wire.FrameReader().feed(body)[-1].outcome == Outcome.ABORTED

  _run(activation, scenario)


def test_a_client_that_hangs_up_has_its_request_cancelled(activation):
  async def scenario(routes, engine):
    engine.gate.clear()
    call = Call(routes, GENERATE_PATH, _request())
    await _until(lambda: engine.asked)
    call.hang_up()
    await asyncio.wait_for(call.task, 60)
    await _until(lambda: engine.cancelled)
    assert engine.cancelled == ['r']
    assert call.messages == []

  _run(activation, scenario)


def _changed(**changes):
  return dataclasses.replace(SAMPLING, **changes)


@pytest.mark.parametrize(
  ('body', 'outcome', 'message'),
  [
    (_request()[:-1], Outcome.BAD_REQUEST, 'expected'),
    (_request(min_version=2), Outcome.STALE, 'version 1 is served; expected at least 2'),
    (_request(()), Outcome.BAD_REQUEST, '0 prompt ids'),
    (_request((8,)), Outcome.BAD_REQUEST, r'all in \[0, 8\)'),
    (_request((-1,)), Outcome.BAD_REQUEST, r'all in \[0, 8\)'),
    (_request(range(6)), Outcome.TOO_LONG, 'a prompt of 6 ids; expected less than 6'),
    (_request(sampling=_changed(candidates=3)), Outcome.BAD_REQUEST, 'candidates is 3'),
    (_request(sampling=_changed(temperature=0.001)), Outcome.BAD_REQUEST, 'temperature is 0.001'),
    (_request(sampling=_changed(temperature=3.0)), Outcome.BAD_REQUEST, 'temperature is 3.0'),
    (_request(keep_alive_secs=0.0), Outcome.BAD_REQUEST, 'keep_alive_secs is 0.0'),
    (_request(routes_from=0), Outcome.BAD_REQUEST, 'expected a server that tells them'),
  ],
)
def test_refusals_have_a_status_and_a_name(activation, body, outcome, message):
  async def scenario(routes, engine):
    status, got = await Call(routes, GENERATE_PATH, body).answer()
    failure = Failure.decode(got)
    assert (failure.outcome, failure.served, status) == (outcome, 1, outcome.status)
    assert re.search(message, failure.message)

  _run(activation, scenario)


def test_errors_of_the_engine_are_named(activation):
  async def scenario(routes, engine):
    engine.error = RuntimeError('boom')
    _, body = await Call(routes, GENERATE_PATH, _request()).answer()
    assert Failure.decode(body) == Failure(Outcome.INTERNAL, 'RuntimeError: boom', 1)
    engine.dead = True
    status, body = await Call(routes, GENERATE_PATH, _request()).answer()
    assert (status, Failure.decode(body).outcome) == (500, Outcome.ENGINE_DEAD)
    status, _ = await Call(routes, STATUS_PATH).answer()
    assert status == 500

  _run(activation, scenario)


def test_status_and_traffic_before_an_activation(activation):
  async def scenario(routes, engine):
    status, body = await Call(routes, STATUS_PATH).answer()
    assert status == 200
    assert Status.decode(body).version is None
    status, body = await Call(routes, GENERATE_PATH, _request()).answer()
    assert (status, Failure.decode(body).outcome) == (503, Outcome.NOT_READY)
    await Call(routes, ACTIVATE_PATH, activation.encode()).answer()
    _, body = await Call(routes, STATUS_PATH).answer()
    assert Status.decode(body).version == Version(1, 0, 0)

  _run(activation, scenario, activated=False)


def test_routes_are_asked_for_from_a_token_of_the_prompt(activation):
  async def scenario(routes, engine):
    engine.routes = RouteShape(2, 8, 2)
    for first, expected in ((0, 200), (2, 200), (3, 400), (-1, 400)):
      status, body = await Call(routes, GENERATE_PATH, _request(routes_from=first)).answer()
      assert status == expected
    assert 'routes_from is -1; expected a number in [0, 2]' in Failure.decode(body).message

  _run(activation, scenario)


def test_nothing_is_served_without_an_engine():
  async def main():
    for path in (STATUS_PATH, ACTIVATE_PATH, GENERATE_PATH):
      status, body = await Call(Routes(), path, _request()).answer()
      assert (status, Failure.decode(body).outcome) == (503, Outcome.NOT_READY)

  asyncio.run(main())


def test_an_activation_that_fails_says_what_is_served(activation):
  async def scenario(routes, engine):
    other = dataclasses.replace(activation, version=Version(2, 0, 1), directory='/nowhere')
    status, body = await Call(routes, ACTIVATE_PATH, other.encode()).answer()
    failure = Failure.decode(body)
    assert (status, failure.outcome, failure.served) == (422, Outcome.NOT_ACTIVATED, 1)
    status, body = await Call(routes, ACTIVATE_PATH, b'{}').answer()
    assert (status, Failure.decode(body).outcome) == (400, Outcome.BAD_REQUEST)

  _run(activation, scenario)


def test_an_activation_outlives_who_asked_for_it(activation):
  async def scenario(routes, engine):
    loading = asyncio.Event()
    go_on = asyncio.Event()

    async def load(directory):
      loading.set()
      await go_on.wait()

    engine.load = load
    call = Call(routes, ACTIVATE_PATH, activation.encode())
    await asyncio.wait_for(loading.wait(), 60)
    call.task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    for _ in range(2000):
      await asyncio.sleep(0.01)
      _, body = await Call(routes, STATUS_PATH).answer()
      if Status.decode(body).version is not None:
        return
    pytest.fail('the activation ended with its caller')

  _run(activation, scenario, activated=False)
