"""The routes of the plugin, as plain ASGI applications.

A turn is answered in one piece where it ends within `keep_alive_secs`, and else as a stream of
keep-alives until it does. A client that hangs up has its request aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from mimo.samplers.vllm import wire
from mimo.samplers.vllm.activation import ActivationError, Activator, Engine
from mimo.samplers.vllm.messages import (
  ACTIVATE_PATH,
  GENERATE_PATH,
  STATUS_PATH,
  Activation,
  Failure,
  Outcome,
  Status,
  WireError,
)
from mimo.samplers.vllm.records import FlatRecord, RecordError, turn_sample
from mimo.samplers.vllm.view_files import read_layout
from mimo.types import FinishReason, RouteShape

_log = logging.getLogger('vllm.mimo')

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_JSON = 'application/json'


class TurnEngine(Engine, Protocol):
  """What the routes need of the engine, beside what an activation does."""

  async def draw(self, request: wire.GenerateRequest) -> FlatRecord: ...

  def num_drawn(self, request: str) -> int: ...

  def status(self) -> dict[str, Any]:
    """Returns what it knows of a `Status`."""

  @property
  def start_directory(self) -> str: ...

  @property
  def vocab_size(self) -> int: ...

  @property
  def max_tokens(self) -> int: ...

  @property
  def max_candidates(self) -> int: ...

  @property
  def temperatures(self) -> tuple[float, float]:
    """The smallest and largest temperature beside 0."""

  @property
  def routes(self) -> RouteShape | None:
    """The shape of the routes that its turns can tell; None where they can't."""

  @property
  def dead(self) -> bool: ...


class Routes:
  """The three routes, before and after they have an engine."""

  def __init__(self) -> None:
    self._engine: TurnEngine | None = None
    self._activator: Activator | None = None
    self._tasks: set[asyncio.Task[Any]] = set()

  def connect(self, engine: TurnEngine) -> None:
    """Gives the routes an engine that was started with a view."""
    self._activator = Activator(engine, layout=read_layout(engine.start_directory))
    self._engine = engine

  def endpoints(self) -> list[tuple[str, str, Callable[[Scope, Receive, Send], Awaitable[None]]]]:
    """Returns (path, method, ASGI application) of each."""
    return [
      (GENERATE_PATH, 'POST', _Application(self._generate)),
      (ACTIVATE_PATH, 'POST', _Application(self._activate)),
      (STATUS_PATH, 'GET', _Application(self._status)),
    ]

  async def _status(self, receive: Receive, send: Send) -> None:
    if self._engine is None or self._activator is None:
      await _fail(send, Failure(Outcome.NOT_READY, 'the server is starting', None))
      return
    if self._engine.dead:
      await _fail(send, Failure(Outcome.ENGINE_DEAD, 'the engine is dead', None))
      return
    status = Status(
      version=self._activator.version,
      activating=self._activator.activating,
      broken=self._activator.broken,
      **self._engine.status(),
    )
    await _respond(send, 200, _JSON, status.encode())

  async def _activate(self, receive: Receive, send: Send) -> None:
    activator = self._activator
    if activator is None:
      await _fail(send, Failure(Outcome.NOT_READY, 'the server is starting', None))
      return
    try:
      activation = Activation.decode(await _body(receive))
    except WireError as error:
      await _fail(send, Failure(Outcome.BAD_REQUEST, str(error), activator.number))
      return
    # In a task of its own: who asked may hang up, and weights must not stay half-loaded.
    task = asyncio.get_running_loop().create_task(activator.activate(activation))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    try:
      secs = await asyncio.shield(task)
    except ActivationError as error:
      _log.error('mimo: %s', error)
      await _fail(send, Failure(error.outcome, str(error), activator.number))
    except Exception as error:
      _log.exception('mimo: an activation failed')
      message = f'{type(error).__name__}: {error}'
      await _fail(send, Failure(Outcome.INTERNAL, message, activator.number))
    else:
      number = activation.version.number
      _log.info('mimo: version %d is served; requests stood still for %.3f s', number, secs)
      body = f'{{"version": {number}, "secs": {secs:.6f}}}'.encode()
      await _respond(send, 200, _JSON, body)

  async def _generate(self, receive: Receive, send: Send) -> None:
    try:
      request = wire.GenerateRequest.decode(await _body(receive))
    except WireError as error:
      await _fail(send, Failure(Outcome.BAD_REQUEST, str(error), self._number))
      return
    failure = self._refuse(request)
    if failure is not None:
      await _fail(send, failure)
      return
    turn = asyncio.ensure_future(self._turn(request))
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
      await self._answer(request, turn, gone, send)
    finally:
      turn.cancel()
      gone.cancel()

  async def _answer(
    self,
    request: wire.GenerateRequest,
    turn: asyncio.Future[bytes | Failure],
    gone: asyncio.Future[None],
    send: Send,
  ) -> None:
    """Waits for a turn and sends it, with keep-alives before it where it takes long."""
    assert self._engine is not None
    started = False
    while True:
      done, _ = await asyncio.wait(
        (turn, gone), timeout=request.keep_alive_secs, return_when=asyncio.FIRST_COMPLETED
      )
      if turn in done:
        break
      if gone in done:
        return
      if not started:
        await _start(send, 200, wire.FRAMES_TYPE, None)
        started = True
      await _chunk(send, wire.encode_keep_alive(self._engine.num_drawn(request.request)))
    answer = turn.result()
    if not started:
      if isinstance(answer, Failure):
        await _fail(send, answer)
      else:
        await _respond(send, 200, wire.FRAMES_TYPE, answer)
      return
    await _chunk(send, wire.encode_failure(answer) if isinstance(answer, Failure) else answer)
    await send({'type': 'http.response.body', 'body': b'', 'more_body': False})

  async def _turn(self, request: wire.GenerateRequest) -> bytes | Failure:
    """Returns the frame of a turn, or why there is none."""
    assert self._engine is not None and self._activator is not None
    try:
      record = await self._engine.draw(request)
      if record.finish == FinishReason.ABORT:
        return Failure(Outcome.ABORTED, 'the engine aborted the request', self._number)
      sample = turn_sample(record, candidates=request.sampling.candidates)
      return wire.encode_result(sample)
    except RecordError as error:
      _log.error('mimo: request %s: %s', request.request, error)
      return Failure(Outcome.INTERNAL, str(error), self._number)
    except Exception as error:
      outcome = Outcome.ENGINE_DEAD if self._engine.dead else Outcome.INTERNAL
      return Failure(outcome, f'{type(error).__name__}: {error}', self._number)

  @property
  def _number(self) -> int | None:
    return None if self._activator is None else self._activator.number

  def _refuse(self, request: wire.GenerateRequest) -> Failure | None:
    engine, activator = self._engine, self._activator
    if engine is None or activator is None:
      return Failure(Outcome.NOT_READY, 'the server is starting', None)
    if engine.dead:
      return Failure(Outcome.ENGINE_DEAD, 'the engine is dead', None)
    failure = activator.refuse(request.min_version)
    if failure is not None:
      return failure
    sampling, tokens = request.sampling, request.tokens
    low, high = engine.temperatures
    bad = None
    if not len(tokens) or tokens.min() < 0 or tokens.max() >= engine.vocab_size:
      bad = f'{len(tokens)} prompt ids, expected at least one and all in [0, {engine.vocab_size})'
    elif sampling.candidates > engine.max_candidates:
      bad = f'candidates is {sampling.candidates}; expected at most {engine.max_candidates}'
    elif sampling.temperature and not low <= sampling.temperature <= high:
      bad = f'temperature is {sampling.temperature}; expected 0 or a number in [{low}, {high}]'
    elif request.routes_from is not None and engine.routes is None:
      bad = 'routes are asked for; expected a server that tells them'
    elif request.routes_from is not None and not 0 <= request.routes_from <= len(tokens):
      bad = f'routes_from is {request.routes_from}; expected a number in [0, {len(tokens)}]'
    elif request.keep_alive_secs <= 0:
      bad = f'keep_alive_secs is {request.keep_alive_secs}; expected a positive number'
    if bad is not None:
      return Failure(Outcome.BAD_REQUEST, bad, activator.number)
    if len(tokens) >= engine.max_tokens:
      message = f'a prompt of {len(tokens)} ids; expected less than {engine.max_tokens}'
      return Failure(Outcome.TOO_LONG, message, activator.number)
    return None


class _Application:
  """A class, so that a router takes it for an ASGI application and not for a handler."""

  def __init__(self, handle: Callable[[Receive, Send], Awaitable[None]]):
    self._handle = handle

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    await self._handle(receive, send)


async def _body(receive: Receive) -> bytes:
  parts = []
  while True:
    message = await receive()
    if message['type'] == 'http.disconnect':
      raise WireError('the client hung up in its request')
    parts.append(message.get('body', b''))
    if not message.get('more_body', False):
      return b''.join(parts)


async def _disconnected(receive: Receive) -> None:
  while (await receive())['type'] != 'http.disconnect':
    pass


async def _start(send: Send, status: int, content_type: str, size_bytes: int | None) -> None:
  headers = [(b'content-type', content_type.encode())]
  if size_bytes is not None:
    headers.append((b'content-length', str(size_bytes).encode()))
  await send({'type': 'http.response.start', 'status': status, 'headers': headers})


async def _chunk(send: Send, body: bytes) -> None:
  await send({'type': 'http.response.body', 'body': body, 'more_body': True})


async def _respond(send: Send, status: int, content_type: str, body: bytes) -> None:
  await _start(send, status, content_type, len(body))
  await send({'type': 'http.response.body', 'body': body})


async def _fail(send: Send, failure: Failure) -> None:
  await _respond(send, failure.outcome.status, _JSON, failure.encode())
