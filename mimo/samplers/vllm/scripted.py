"""A server without a model, for tests: the plugin's routes, answered by a script.

    python -m mimo.samplers.vllm.scripted <port> [seconds per turn]

It implements `Server`, so that a replica can be given one in place of a process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Awaitable, Callable

import numpy as np
from aiohttp import web

from mimo.samplers.scripted import scripted_routes
from mimo.samplers.vllm import messages, wire
from mimo.samplers.vllm.client import allow_files
from mimo.samplers.vllm.messages import Activation, Failure, Outcome, Status
from mimo.types import Candidates, FinishReason, RouteShape, TurnSample, Version, VersionSpan

_MAX_CONNECTIONS = 2048
_ROUTES = RouteShape(layers=2, experts=8, per_token=2)


class ScriptedTurn:
  """One request, and what a script can do about it.

  Attributes:
    request: as the client sent it.
    version: the publication number served when it came.
    peer: the client's end of the connection.
  """

  def __init__(self, raw: web.Request, request: wire.GenerateRequest, version: int) -> None:
    self._raw = raw
    self._response: web.StreamResponse | None = None
    self.peer = raw.transport.get_extra_info('peername') if raw.transport else None
    self.request = request
    self.version = version

  async def send(self, data: bytes) -> None:
    """Sends bytes of a streamed answer."""
    if self._response is None:
      self._response = web.StreamResponse(headers={'Content-Type': wire.FRAMES_TYPE})
      await self._response.prepare(self._raw)
    await self._response.write(data)

  async def keep_alive(self, tokens: int) -> None:
    await self.send(wire.encode_keep_alive(tokens))

  async def result(self) -> None:
    """Sends the turn: as many tokens as are asked for, each its predecessor's successor."""
    await self.send(wire.encode_result(draw(self.request, self.version)))

  def reset(self) -> None:
    """Drops the connection as a killed process does."""
    assert self._raw.transport is not None
    self._raw.transport.abort()

  def finished(self) -> web.StreamResponse:
    return self._response or web.Response(status=200)


Script = Callable[[ScriptedTurn], Awaitable[web.StreamResponse | None]]


async def at_once(turn: ScriptedTurn) -> None:
  """The script of a server that is well."""
  await turn.result()


class ScriptedServer:
  """Serves on a loopback port while it is started.

  A script sends what it likes, or returns a whole response. What it does not answer ends there.

  Attributes:
    script: of turns; it may be replaced while the server runs.
    state: what the status route says; activations change its version, requests nothing.
    requests: every request for a turn, in order.
    activations: every activation asked for, in order.
    refuse: what activations fail with; None accepts them.
    activate_secs: how long they take.
    answering: whether the status route answers at all.
    hung_up: turns whose client hung up before they ended.
  """

  def __init__(self, script: Script = at_once, *, served: Version | None = None) -> None:
    self.script = script
    self.state = Status(
      vllm='0.32.0',
      version=served,
      activating=False,
      broken=None,
      running=0,
      waiting=0,
      tokens=0,
      steps=0,
      logprob_mode='processed_logprobs',
      logits_dtype='float32',
      kv_cache_dtype='bf16',
      vocab_size=128,
      max_tokens=4096,
      max_candidates=128,
      prefix_caching=True,
      max_running=4096,
      tested=True,
      patches=(),
      routes=_ROUTES,
    )
    self.requests: list[wire.GenerateRequest] = []
    self.activations: list[Activation] = []
    self.refuse: Failure | None = None
    self.activate_secs = 0.0
    self.answering = True
    self.hung_up = 0
    self.url = ''
    self._runner: web.AppRunner | None = None
    self._gone = asyncio.Event()

  async def start(self, port: int = 0) -> str:
    """Returns its URL."""
    app = web.Application()
    app.router.add_post(messages.GENERATE_PATH, self._generate)
    app.router.add_post(messages.ACTIVATE_PATH, self._activate)
    app.router.add_get(messages.STATUS_PATH, self._status)
    self._runner = web.AppRunner(
      app, keepalive_timeout=600, handler_cancellation=True, shutdown_timeout=0.1
    )
    await self._runner.setup()
    site = web.TCPSite(self._runner, '127.0.0.1', port, backlog=4096)
    await site.start()
    self.url = f'http://127.0.0.1:{self._runner.addresses[0][1]}'
    return self.url

  async def wait(self) -> int:
    await self._gone.wait()
    return 0

  async def stop(self) -> None:
    runner, self._runner = self._runner, None
    if runner is not None:
      await runner.cleanup()
    self._gone.set()

  def tail(self) -> str:
    return '(scripted)'

  def crash(self) -> None:
    """Resets every connection and says that the server is gone."""
    assert self._runner is not None and self._runner.server is not None
    for protocol in self._runner.server.connections:
      if protocol.transport is not None:
        protocol.transport.abort()
    self._gone.set()

  async def _status(self, _: web.Request) -> web.StreamResponse:
    while not self.answering:
      await asyncio.sleep(0.05)
    return web.Response(body=self.state.encode())

  async def _activate(self, raw: web.Request) -> web.StreamResponse:
    activation = Activation.decode(await raw.read())
    self.activations.append(activation)
    await asyncio.sleep(self.activate_secs)
    if self.refuse is not None:
      return _failed(self.refuse)
    self.state = dataclasses.replace(self.state, version=activation.version)
    return web.json_response({'version': activation.version.number, 'secs': 0.0})

  async def _generate(self, raw: web.Request) -> web.StreamResponse:
    request = wire.GenerateRequest.decode(await raw.read())
    self.requests.append(request)
    version = self.state.version
    if version is None:
      return _failed(Failure(Outcome.NOT_READY, 'no version is activated yet', None))
    if request.min_version is not None and version.number < request.min_version:
      message = f'expected at least {request.min_version}'
      return _failed(Failure(Outcome.STALE, message, version.number))
    turn = ScriptedTurn(raw, request, version.number)
    try:
      response = await self.script(turn)
    except asyncio.CancelledError:
      self.hung_up += 1
      raise
    return turn.finished() if response is None else response


def draw(request: wire.GenerateRequest, version: int) -> TurnSample:
  """Returns the scripted turn: each token its predecessor's successor in a vocabulary of 128."""
  length = request.sampling.max_turn_tokens
  tokens = ((int(request.tokens[-1]) + 1 + np.arange(length)) % 128).astype(np.int32)
  both = np.stack([tokens, (tokens + 1) % 128], axis=1)
  half = np.full(both.shape, np.log(0.5), np.float32)
  routes = None
  if request.routes_from is not None:
    routes = scripted_routes(_ROUTES, request.routes_from, len(request.tokens) + length - 1)
  return TurnSample(
    tokens=tokens,
    logps=half[:, 0],
    candidates=Candidates.from_dense(both, half),
    full_support=np.ones(length, bool),
    finish=FinishReason.LENGTH,
    spans=(VersionSpan(0, length, version),),
    routes=routes,
  )


def _failed(failure: Failure) -> web.StreamResponse:
  return web.Response(status=failure.outcome.status, body=failure.encode())


async def _serve(port: int, secs: float) -> None:
  async def script(turn: ScriptedTurn) -> None:
    await asyncio.sleep(secs)
    await turn.result()

  server = ScriptedServer(script, served=Version(1, 0, 0))
  await server.start(port)
  await server.wait()


def main() -> None:
  """Reads the arguments and serves until it is ended."""
  port, *secs = sys.argv[1:]
  allow_files(_MAX_CONNECTIONS)
  asyncio.run(_serve(int(port), float(secs[0]) if secs else 0.0))


if __name__ == '__main__':
  main()
