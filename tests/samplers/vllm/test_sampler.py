"""Sessions on a scripted server: what is retried, what is named, and a thousand at a time."""

import asyncio
import dataclasses
import pathlib
import resource
import socket
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip('aiohttp', reason="needs aiohttp: install the extra 'vllm-cpu'")

from mimo.rollouts import contract as rules
from mimo.samplers.base import SamplerContract, SamplerError
from mimo.samplers.vllm import scripted
from mimo.samplers.vllm.client import ClientLimits, VllmClient
from mimo.samplers.vllm.messages import Failure, Outcome
from mimo.samplers.vllm.replica import ReplicaReport
from mimo.samplers.vllm.sampler import RetryLimits, VllmSampler, check_status
from mimo.types import RouteShape, SamplingParams, Source, Version

# Server and client share this process: where it is slow, no bound may be reached by that.
_LIMITS = ClientLimits(
  connect_secs=20.0, keep_alive_secs=0.1, silence_secs=20.0, stall_secs=20.0, wait_secs=20.0
)
_RETRY = RetryLimits(retries=2, backoff_secs=0.01, recovery_secs=20.0)
_CONTRACT = SamplerContract(
  source=Source('pool', 'CPU', 'bf16', 'bf16'),
  logprob_mode='processed',
  logits_dtype='float32',
  vocab_size=128,
  max_tokens=64,
  prefix_cache='keep',
  max_sessions=8,
)
_PARAMS = SamplingParams(1.0, 1.0, 0, 16, 8, (1,))
_KEY = np.array([1, 2], np.uint32)


class _Host:
  """A server that is always there."""

  def __init__(self, client: VllmClient, version: Version | None) -> None:
    self._client = client
    self.version = version
    self.pinned: Version | None = None

  def report(self) -> ReplicaReport:
    raise NotImplementedError

  async def start(self) -> None: ...

  async def serving(self, secs: float) -> tuple[VllmClient, int]:
    assert self.version is not None
    return self._client, self.version.number

  def doubt(self, client: VllmClient) -> None:
    assert client is self._client

  async def pin(self, version: Version | None) -> None:
    self.pinned = version

  async def close(self) -> None:
    await self._client.close()


def _run(script, use, *, retry=_RETRY, **changes):
  """Runs `use(sampler, server)` on a started sampler."""

  async def main():
    server = scripted.ScriptedServer(script, served=Version(7, 0, 0))
    contract = dataclasses.replace(_CONTRACT, **changes)
    client = VllmClient(await server.start(), limits=_LIMITS, max_connections=contract.max_sessions)
    host = _Host(client, Version(7, 0, 0))
    sampler = VllmSampler(host, contract, limits=_LIMITS, retry=retry)
    await sampler.start()
    try:
      return await asyncio.wait_for(use(sampler, server), 60)
    finally:
      await sampler.close()
      await server.stop()

  return asyncio.run(main())


async def _until(condition) -> None:
  async with asyncio.timeout(20):
    while not condition():
      await asyncio.sleep(0.01)


def _tokens(*ids: int) -> np.ndarray:
  return np.array(ids, np.int32)


def test_each_turn_asks_for_the_routes_that_none_before_it_told() -> None:
  shape = RouteShape(layers=2, experts=8, per_token=2)

  async def use(sampler, server):
    check_status(server.state, sampler.contract, candidates=16)
    other = dataclasses.replace(sampler.contract, routes=RouteShape(2, 8, 3))
    with pytest.raises(ValueError, match=r'routes are RouteShape.*per_token=2\); expected Route'):
      check_status(server.state, other, candidates=16)
    first = await sampler.sample('s', _tokens(5, 6), _PARAMS, _KEY)
    longer = np.concatenate([_tokens(5, 6), first.tokens, _tokens(90)])
    second = await sampler.sample('s', longer, _PARAMS, _KEY)
    return first, second, [request.routes_from for request in server.requests]

  first, second, asked = _run(scripted.at_once, use, routes=shape)
  assert len(first.tokens) == 8 and asked == [0, 9]
  rules.check_routes(first.routes, shape, start=0, end=9)
  rules.check_routes(second.routes, shape, start=9, end=18)


def test_a_session_of_two_turns() -> None:
  async def use(sampler, server):
    first = await sampler.sample('s', _tokens(5), _PARAMS, _KEY)
    longer = np.concatenate([_tokens(5), first.tokens, _tokens(90)])
    second = await sampler.sample('s', longer, _PARAMS, _KEY)
    await sampler.release('s')
    await sampler.release('s')
    return first, second, server.requests, sampler.version

  first, second, requests, version = _run(scripted.at_once, use)
  for turn in (first, second):
    rules.check_turn(turn, _PARAMS)
  assert second.tokens[0] == 91
  assert version == 7
  assert [request.min_version for request in requests] == [7, 7]
  # Each turn has random numbers of its own, and each try a name of its own.
  assert requests[0].seed != requests[1].seed
  assert requests[0].request != requests[1].request


def test_tokens_must_extend_the_session() -> None:
  async def use(sampler, server):
    turn = await sampler.sample('s', _tokens(5, 6), _PARAMS, _KEY)
    with pytest.raises(SamplerError, match='do not extend the 10 held'):
      await sampler.sample('s', np.concatenate([_tokens(5, 9), turn.tokens]), _PARAMS, _KEY)
    await sampler.release('s')
    await sampler.sample('s', _tokens(5, 9), _PARAMS, _KEY)

  _run(scripted.at_once, use)


def test_a_turn_ends_where_the_context_does() -> None:
  async def use(sampler, server):
    turn = await sampler.sample('s', np.full(60, 5, np.int32), _PARAMS, _KEY)
    with pytest.raises(SamplerError, match='64 tokens; expected fewer than 64'):
      await sampler.sample('t', np.full(64, 5, np.int32), _PARAMS, _KEY)
    return turn

  assert len(_run(scripted.at_once, use).tokens) == 4


def test_what_fails_in_passing_is_tried_again_with_the_same_seed() -> None:
  calls = []

  async def script(turn):
    calls.append(turn.request)
    if len(calls) == 1:
      turn.reset()
    elif len(calls) == 2:
      await turn.keep_alive(2)
      await turn.send(b'mimo')  # cut short
    else:
      await turn.result()

  async def use(sampler, server):
    await sampler.sample('s', _tokens(5), _PARAMS, _KEY)
    return dict(sampler.failures)

  failures = _run(script, use)
  assert sum(failures.values()) == 2
  assert failures['truncated'] == 1
  assert len({request.request for request in calls}) == 3
  assert len({request.seed for request in calls}) == 1


def test_tries_are_bounded_and_the_failure_says_them_all() -> None:
  calls = []

  async def script(turn):
    calls.append(1)
    await turn.send(b'not frames at all, not at all')

  async def use(sampler, server):
    with pytest.raises(SamplerError, match=r'pool pool: session s; corrupt: .*; corrupt: ') as e:
      await sampler.sample('s', _tokens(5), _PARAMS, _KEY)
    return str(e.value)

  assert _run(script, use).count('corrupt') == 3
  assert len(calls) == 3


def test_what_will_fail_again_is_not_tried_again() -> None:
  calls = []

  async def script(turn):
    calls.append(1)
    await turn.send(
      scripted.wire.encode_failure(Failure(Outcome.BAD_REQUEST, 'candidates is 9000', 7))
    )

  async def use(sampler, server):
    with pytest.raises(SamplerError, match='candidates is 9000'):
      await sampler.sample('s', _tokens(5), _PARAMS, _KEY)

  _run(script, use)
  assert len(calls) == 1


def test_a_server_that_is_behind_is_waited_for() -> None:
  """More often than a turn is retried: no turn was lost by it."""

  async def use(sampler, server):
    server.state = dataclasses.replace(server.state, version=Version(6, 0, 0))

    async def catch_up():
      while len(server.requests) < 5:
        await asyncio.sleep(0.01)
      server.state = dataclasses.replace(server.state, version=Version(7, 0, 0))

    sample, _ = await asyncio.gather(sampler.sample('s', _tokens(5), _PARAMS, _KEY), catch_up())
    return sample, sampler.failures

  sample, failures = _run(scripted.at_once, use)
  assert sample.spans[0].version == 7
  assert failures['stale'] >= 5


def test_a_server_that_stays_behind_is_a_named_failure() -> None:
  async def use(sampler, server):
    server.state = dataclasses.replace(server.state, version=Version(6, 0, 0))
    with pytest.raises(SamplerError, match='stale: expected at least 7'):
      await sampler.sample('s', _tokens(5), _PARAMS, _KEY)

  _run(scripted.at_once, use, retry=dataclasses.replace(_RETRY, recovery_secs=0.5))


def test_a_turn_of_an_older_version_than_asked_for_is_refused() -> None:
  async def script(turn):
    await turn.send(scripted.wire.encode_result(scripted.draw(turn.request, 6)))

  async def use(sampler, server):
    with pytest.raises(SamplerError, match='version 6 drew a turn that asked for 7'):
      await sampler.sample('s', _tokens(5), _PARAMS, _KEY)

  _run(script, use)


def test_cancelling_and_closing() -> None:
  async def script(turn):
    await turn.keep_alive(1)
    await asyncio.sleep(60)

  async def use(sampler, server):
    turns = [
      asyncio.ensure_future(sampler.sample(name, _tokens(5), _PARAMS, _KEY)) for name in 'abc'
    ]
    await _until(lambda: len(server.requests) == 3)
    turns[0].cancel()
    await _until(lambda: server.hung_up)
    hung_up = server.hung_up
    await sampler.close()
    with pytest.raises(SamplerError, match='closed'):
      await sampler.sample('d', _tokens(5), _PARAMS, _KEY)
    return hung_up, await asyncio.gather(*turns, return_exceptions=True)

  hung_up, (cancelled, *closed) = _run(script, use)
  assert hung_up == 1
  assert isinstance(cancelled, asyncio.CancelledError)
  assert all(isinstance(error, SamplerError) for error in closed), closed


def test_a_sampler_that_was_not_started_draws_nothing() -> None:
  async def main():
    client = VllmClient('http://127.0.0.1:1', limits=_LIMITS, max_connections=1)
    sampler = VllmSampler(_Host(client, None), _CONTRACT, limits=_LIMITS, retry=_RETRY)
    with pytest.raises(SamplerError, match='came before the sampler was started'):
      await sampler.sample('s', _tokens(5), _PARAMS, _KEY)
    with pytest.raises(SamplerError, match='no version is served'):
      _ = sampler.version
    await sampler.pin(Version(3, 0, 0))
    assert sampler._host.pinned == Version(3, 0, 0)
    await sampler.close()

  asyncio.run(main())


@pytest.mark.parametrize(
  ('field', 'value', 'words'),
  [
    ('logprob_mode', 'raw_logprobs', "'raw_logprobs'; expected 'processed_logprobs'"),
    ('logits_dtype', 'bfloat16', "'bfloat16'; expected 'float32'"),
    ('kv_cache_dtype', 'fp8', "'fp8'; expected 'bf16'"),
    ('vocab_size', 64, 'vocabulary of 64; expected 128'),
    ('max_tokens', 32, 'max_tokens is 32; expected at least 64'),
    ('max_candidates', 8, 'max_candidates is 8; expected at least 16'),
    ('max_running', 4, 'max_running is 4; expected at least 8'),
  ],
)
def test_a_server_that_breaks_the_contract_is_refused(field: str, value, words: str) -> None:
  async def main():
    return scripted.ScriptedServer().state

  state = asyncio.run(main())
  check_status(state, _CONTRACT, candidates=16)
  with pytest.raises(ValueError, match=words):
    check_status(dataclasses.replace(state, **{field: value}), _CONTRACT, candidates=16)


def test_a_thousand_sessions_on_one_client() -> None:
  """Three turns each, all at a time, in bounded memory and without one connection error."""
  sessions, turns = 1000, 3
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  server = subprocess.Popen(
    [sys.executable, '-m', 'mimo.samplers.vllm.scripted', str(port), '0.5'],
    cwd=pathlib.Path(__file__).parents[3],
  )
  url = f'http://127.0.0.1:{port}'
  # Each answer may come late where a machine is slow: nothing here measures that.
  limits = ClientLimits(keep_alive_secs=30.0, silence_secs=60.0, connect_secs=60.0)
  contract = dataclasses.replace(_CONTRACT, max_sessions=sessions)

  async def session(sampler, number: int) -> int:
    tokens = np.full(8, number % 100 + 2, np.int32)
    for _ in range(turns):
      turn = await sampler.sample(f's{number}', tokens, _PARAMS, _KEY)
      tokens = np.concatenate([tokens, turn.tokens])
    await sampler.release(f's{number}')
    return len(tokens)

  async def main():
    client = VllmClient(url, limits=limits, max_connections=sessions)
    sampler = VllmSampler(_Host(client, Version(1, 0, 0)), contract, limits=limits, retry=_RETRY)
    await sampler.start()
    for _ in range(600):
      try:
        await client.status()
        break
      except Exception:
        await asyncio.sleep(0.1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lengths = await asyncio.gather(*(session(sampler, n) for n in range(sessions)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    held = len(sampler._sessions), len(sampler._tasks), client.in_flight
    failures = sampler.failures
    await sampler.close()
    return lengths, grown, held, failures

  try:
    lengths, grown_kib, held, failures = asyncio.run(main())
  finally:
    server.kill()
    server.wait()
  assert lengths == [8 + turns * 8] * sessions
  assert not failures
  assert held == (0, 0, 0)
  assert grown_kib < 200 * 1024, f'{grown_kib / 1024:.0f} MiB for {sessions} sessions'
