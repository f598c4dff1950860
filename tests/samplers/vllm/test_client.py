"""Every way in which a request can fail, against a server that a script runs."""

import asyncio
import dataclasses
import json
import resource
import time

import numpy as np
import pytest

pytest.importorskip('aiohttp', reason="needs aiohttp: install the extra 'vllm-cpu'")

from aiohttp import web

from mimo.samplers.vllm import client as http
from mimo.samplers.vllm import scripted, stock, wire
from mimo.samplers.vllm.client import ClientLimits, TurnError, VllmClient
from mimo.samplers.vllm.messages import Activation, Failure, Outcome
from mimo.types import SamplingParams, Version

# Server and client share this process: where it is slow, only the bound under test may be reached.
_LIMITS = ClientLimits(
  connect_secs=20.0,
  keep_alive_secs=0.05,
  silence_secs=20.0,
  stall_secs=20.0,
  wait_secs=20.0,
  activate_secs=20.0,
)
_SOON_SECS = 15.0
_PARAMS = SamplingParams(1.0, 1.0, 0, 16, 8, (1,))
_ACTIVATION = Activation(Version(8, 0, 1), '/nowhere', 'bf16', {}, 'keep')


def _request(name: str = 'a', *, min_version: int | None = None) -> wire.GenerateRequest:
  return wire.GenerateRequest(name, np.array([5, 6], np.int32), _PARAMS, 1, min_version, 0.05)


def _run(script, use, *, limits=_LIMITS, **options):
  """Runs `use(client, server)` against a server with a script."""

  async def main():
    server = scripted.ScriptedServer(script, served=Version(7, 0, 0))
    client = VllmClient(await server.start(), limits=limits, max_connections=8, **options)
    try:
      return await asyncio.wait_for(use(client, server), 60)
    finally:
      await client.close()
      await server.stop()

  return asyncio.run(main())


async def _until(condition) -> None:
  async with asyncio.timeout(20):
    while not condition():
      await asyncio.sleep(0.01)


def _failing(script, **options) -> TurnError:
  """Returns the failure of one turn, once the place that it took is back."""

  async def use(client, server):
    with pytest.raises(TurnError) as raised:
      await client.generate(_request())
    assert client.in_flight == 0
    return raised.value

  return _run(script, use, **options)


def test_a_turn_comes_back_as_it_was_drawn() -> None:
  async def use(client, server):
    return await client.generate(_request(min_version=7)), server.requests

  sample, (request,) = _run(scripted.at_once, use)
  assert sample.tokens.tolist() == [7, 8, 9, 10, 11, 12, 13, 14]
  assert sample.spans[0].version == 7
  assert request.tokens.tolist() == [5, 6]
  assert (request.sampling, request.min_version) == (_PARAMS, 7)


def test_a_connection_that_is_reset_in_mid_turn_is_named() -> None:
  async def script(turn):
    await turn.keep_alive(3)
    turn.reset()

  error = _failing(script)
  assert error.kind in (http.CONNECTION, http.TRUNCATED)
  assert error.passing


def test_nobody_listening_is_named() -> None:
  async def main():
    client = VllmClient('http://127.0.0.1:1', limits=_LIMITS, max_connections=1)
    with pytest.raises(TurnError) as raised:
      await client.generate(_request())
    await client.close()
    return raised.value

  error = asyncio.run(main())
  assert (error.kind, error.passing) == (http.CONNECTION, True)


@pytest.mark.parametrize('sent', [0, 2])
def test_silence_is_bounded(sent: int) -> None:
  async def script(turn):
    for _ in range(sent):
      await turn.keep_alive(1)
    await asyncio.sleep(60)

  start = time.monotonic()
  limits = dataclasses.replace(_LIMITS, silence_secs=0.3)
  assert _failing(script, limits=limits).kind == http.SILENCE
  assert time.monotonic() - start < _SOON_SECS


def test_keep_alives_alone_are_no_progress() -> None:
  async def script(turn):
    while True:
      await turn.keep_alive(4)
      await asyncio.sleep(0.05)

  start = time.monotonic()
  error = _failing(script, limits=dataclasses.replace(_LIMITS, stall_secs=0.6))
  assert error.kind == http.STALL
  assert 0.5 < time.monotonic() - start < _SOON_SECS


def test_slow_is_not_stalled() -> None:
  """Ten tokens, each in less than the bound, and far more than it in all."""

  async def script(turn):
    for drawn in range(10):
      await turn.keep_alive(drawn)
      await asyncio.sleep(0.2)
    await turn.result()

  async def use(client, server):
    start = time.monotonic()
    await client.generate(_request())
    return time.monotonic() - start

  limits = dataclasses.replace(_LIMITS, stall_secs=1.5)
  assert _run(script, use, limits=limits) > limits.stall_secs


def test_a_turn_that_waits_for_others_has_a_longer_bound() -> None:
  """Others get their tokens: the server is not stalled, but a turn does not wait for ever."""

  async def script(turn):
    if turn.request.request == 'other':
      await turn.result()
    while True:
      await turn.keep_alive(0)
      await asyncio.sleep(0.05)

  async def use(client, server):
    async def others():
      while True:
        client.moved()
        await asyncio.sleep(0.1)

    busy = asyncio.ensure_future(others())
    start = time.monotonic()
    with pytest.raises(TurnError) as raised:
      await client.generate(_request())
    busy.cancel()
    return raised.value, time.monotonic() - start

  limits = dataclasses.replace(_LIMITS, stall_secs=1.5, wait_secs=2.5)
  error, secs = _run(script, use, limits=limits)
  assert (error.kind, error.passing) == (http.WAIT, False)
  assert secs >= limits.wait_secs


def test_an_activation_is_no_stall() -> None:
  """Nothing is drawn while weights change: longer than any bound of a turn."""

  async def script(turn):
    for _ in range(30):
      await turn.keep_alive(2)
      await asyncio.sleep(0.05)
    await turn.result()

  async def use(client, server):
    server.activate_secs = 1.4
    sample, _ = await asyncio.gather(client.generate(_request()), client.activate(_ACTIVATION))
    return sample

  limits = dataclasses.replace(_LIMITS, stall_secs=0.6, wait_secs=1.2)
  assert len(_run(script, use, limits=limits).tokens) == 8


def test_an_activation_has_a_bound_of_its_own() -> None:
  async def use(client, server):
    server.activate_secs = 30.0
    with pytest.raises(TurnError) as raised:
      await client.activate(_ACTIVATION)
    return raised.value.kind

  limits = dataclasses.replace(_LIMITS, activate_secs=0.5)
  assert _run(scripted.at_once, use, limits=limits) == http.SILENCE


def _cut(part: slice):
  async def script(turn):
    whole = wire.encode_result(scripted.draw(turn.request, turn.version))
    await turn.send(whole[part])

  return script


def test_a_body_that_is_cut_short_is_named() -> None:
  assert _failing(_cut(slice(None, -5))).kind == http.TRUNCATED
  assert _failing(_cut(slice(None, 6))).kind == http.TRUNCATED


def test_a_body_that_was_altered_is_named() -> None:
  async def script(turn):
    whole = bytearray(wire.encode_result(scripted.draw(turn.request, turn.version)))
    whole[40] ^= 1
    await turn.send(bytes(whole))

  error = _failing(script)
  assert (error.kind, error.passing) == (http.CORRUPT, True)


def test_an_answer_of_another_kind_is_named() -> None:
  async def script(turn):
    return web.Response(body=b'{"choices": [], "usage": {}}')

  assert _failing(script).kind == http.CORRUPT


def test_a_server_that_is_behind_says_what_it_serves() -> None:
  async def use(client, server):
    with pytest.raises(TurnError) as raised:
      await client.generate(_request(min_version=9))
    return raised.value

  error = _run(scripted.at_once, use)
  assert (error.kind, error.served, error.passing) == (Outcome.STALE, 7, True)


@pytest.mark.parametrize(
  ('outcome', 'passing'),
  [
    (Outcome.ABORTED, True),
    (Outcome.ENGINE_DEAD, True),
    (Outcome.INTERNAL, True),
    (Outcome.BROKEN, True),
    (Outcome.BAD_REQUEST, False),
    (Outcome.TOO_LONG, False),
  ],
)
@pytest.mark.parametrize('framed', [False, True])
def test_what_the_server_names_is_handed_on(outcome: Outcome, passing: bool, framed: bool) -> None:
  failure = Failure(outcome, 'why', 7)

  async def script(turn):
    if not framed:
      return web.Response(status=outcome.status, body=failure.encode())
    await turn.keep_alive(1)
    await turn.send(wire.encode_failure(failure))

  error = _failing(script)
  assert (error.kind, error.passing, error.served) == (outcome, passing, 7)
  assert 'why' in str(error)


@pytest.mark.parametrize(('status', 'passing'), [(500, True), (502, True), (404, False)])
def test_a_status_from_elsewhere_is_named(status: int, passing: bool) -> None:
  async def script(turn):
    return web.Response(status=status, text='from a proxy')

  error = _failing(script)
  assert (error.kind, error.passing) == (http.HTTP, passing)
  assert 'from a proxy' in str(error)


def test_a_turn_that_is_cancelled_is_given_up_by_the_server_too() -> None:
  async def script(turn):
    await turn.keep_alive(1)
    await asyncio.sleep(60)

  async def use(client, server):
    turn = asyncio.ensure_future(client.generate(_request()))
    await _until(lambda: server.requests)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    await _until(lambda: server.hung_up)
    return client.in_flight, server.hung_up

  assert _run(script, use) == (0, 1)


@pytest.mark.parametrize('begun', [False, True])
def test_closing_fails_what_is_in_flight_at_once(begun: bool) -> None:
  async def script(turn):
    if begun:
      await turn.keep_alive(1)
    await asyncio.sleep(60)

  async def use(client, server):
    turn = asyncio.ensure_future(client.generate(_request()))
    await _until(lambda: server.requests)
    await asyncio.sleep(0.1)  # so that what was sent is there, most often
    start = time.monotonic()
    await client.close()
    with pytest.raises(TurnError) as raised:
      await turn
    assert not client._waiting
    return raised.value.kind, time.monotonic() - start

  kind, secs = _run(script, use, limits=dataclasses.replace(_LIMITS, silence_secs=60.0))
  assert (kind, secs < _SOON_SECS) == (http.CONNECTION, True)


def test_connections_stay_open_and_are_bounded() -> None:
  peers, at_a_time = set(), []

  async def script(turn):
    at_a_time.append(1)
    peers.add(turn.peer)
    await asyncio.sleep(0.01)
    await turn.keep_alive(1)
    await turn.result()

  async def use(client, server):
    for _ in range(3):
      await asyncio.gather(*(client.generate(_request(str(n))) for n in range(20)))

  _run(script, use)
  assert len(at_a_time) == 60
  assert len(peers) <= 8


def test_an_activation_is_one_call() -> None:
  async def use(client, server):
    await client.activate(_ACTIVATION)
    status = await client.status()
    server.refuse = Failure(Outcome.NOT_ACTIVATED, 'weights.safetensors is corrupt', 8)
    with pytest.raises(TurnError, match='is corrupt') as raised:
      await client.activate(dataclasses.replace(_ACTIVATION, version=Version(9, 0, 2)))
    return status, raised.value, server.activations[0]

  status, error, activation = _run(scripted.at_once, use)
  assert status.version == Version(8, 0, 1)
  assert (error.kind, error.passing, error.served) == (Outcome.NOT_ACTIVATED, False, 8)
  assert activation == _ACTIVATION


def test_a_process_is_allowed_the_files_that_connections_take(monkeypatch) -> None:
  allowed = []
  monkeypatch.setattr(resource, 'setrlimit', lambda _, limits: allowed.append(limits))
  monkeypatch.setattr(resource, 'getrlimit', lambda _: (1024, 4096))
  http.allow_files(100)
  assert not allowed
  http.allow_files(2000)
  assert 2000 < allowed[0][0] < 4096 == allowed[0][1]
  with pytest.raises(ValueError, match=r'5000 connections need .* open files'):
    http.allow_files(5000)


def test_limits_that_find_nothing_are_refused() -> None:
  with pytest.raises(ValueError, match=r'silence_secs is 3\.0; expected more than'):
    ClientLimits(keep_alive_secs=5.0, silence_secs=3.0)
  with pytest.raises(ValueError, match=r'wait_secs is 1\.0; expected at least'):
    ClientLimits(stall_secs=2.0, wait_secs=1.0)


def test_a_server_without_the_plugin_is_talked_to_in_its_own_words() -> None:
  """The stock route: the same turn, in JSON."""
  seen = []

  async def answer(raw):
    seen.append(json.loads(await raw.read()))
    return web.Response(body=STOCK_ANSWER)

  async def main():
    app = web.Application()
    app.router.add_post(stock.PATH, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, '127.0.0.1', 0).start()
    url = f'http://127.0.0.1:{runner.addresses[0][1]}'
    client = VllmClient(url, limits=_LIMITS, max_connections=1, packed=False)
    try:
      return await client.generate(_request())
    finally:
      await client.close()
      await runner.cleanup()

  sample = asyncio.run(main())
  assert sample.tokens.tolist() == [7, 1]
  assert seen[0]['token_ids'] == [5, 6]


STOCK_ANSWER = json.dumps(
  {
    'choices': [
      {
        'index': 0,
        'finish_reason': 'stop',
        'token_ids': [7, 1],
        'weight_versions': [{'version': '7', 'start': 0, 'end': 2}],
        'logprobs': {
          'content': [
            {
              'token_id': token,
              'logprob': -0.6931472,
              'top_logprobs': [
                {'token_id': token, 'logprob': -0.6931472},
                {'token_id': 9, 'logprob': -0.6931472},
                {'token_id': 3, 'logprob': -9999.0},
              ],
            }
            for token in (7, 1)
          ]
        },
      }
    ]
  }
).encode()
