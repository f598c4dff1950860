"""A scripted sampler for tests: the port's behaviour without a model.

A script decides what each call draws, how long it takes and whether it fails; the sampler does the
rest as a real one would: start gate, waiting for a free place, exact-prefix check, turn limits,
version spans, release and close.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from mimo.samplers.base import SamplerContract, SamplerError
from mimo.types import (
  ROUTE_DTYPE,
  Candidates,
  FinishReason,
  Routes,
  RouteShape,
  SamplingParams,
  TurnSample,
  Version,
  VersionSpan,
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ScriptedCall:
  """One call of `sample`, as the script sees it.

  Attributes:
    session: its name.
    turn: how many turns the session has drawn before this one.
    tokens: [T] int32, the trajectory so far.
    params: how to draw.
    key: [2] uint32.
    version: the publication number served when the call got its place.
  """

  session: str
  turn: int
  tokens: np.ndarray
  params: SamplingParams
  key: np.ndarray
  version: int


Draw = Sequence[int] | TurnSample
Script = Callable[[ScriptedCall], Draw | Awaitable[Draw]]


def scripted_routes(shape: RouteShape, start: int, end: int) -> Routes:
  """Returns routes of tokens `[start, end)`: token t goes to t + l, t + l + 1, ... in layer l."""
  token, layer, choice = np.ogrid[start:end, : shape.layers, : shape.per_token]
  return Routes(start, ((token + layer + choice) % shape.experts).astype(ROUTE_DTYPE))


@dataclasses.dataclass
class _Session:
  tokens: np.ndarray
  turns: int = 0


class ScriptedSampler:
  """Implements `mimo.samplers.base.PinnableSampler` from a script.

  The script returns the ids to draw (cut at the first stop id, at `max_turn_tokens` and at the
  contract's `max_tokens`), or a whole TurnSample, or an awaitable of either (an `async def` that
  sleeps or waits for an event gives latency). What it raises reaches the caller: a SamplerError as
  it is, anything else as a SamplerError that names it.

  Each drawn id is recorded with probability 1/2, beside its successor modulo the vocabulary with
  the other half, so the candidates are the whole support; with a cap of one candidate they are a
  head. Where the contract states routes, they are `scripted_routes`. Where the version changes
  while a turn is drawn, the second half of it is stamped with the new one.

  Attributes:
    calls: every call so far, in the order in which they got a place.
    released: names released so far.
    peak_sessions: the most turns that were drawn at a time.
  """

  def __init__(self, contract: SamplerContract, script: Script, *, version: int | None = 0) -> None:
    """`version` None holds `start` until `serve` is called."""
    self._contract = contract
    self._script = script
    self._version = version
    self._served = asyncio.Event()
    if version is not None:
      self._served.set()
    self._closed = False
    self._places = asyncio.Semaphore(contract.max_sessions)
    self._sessions: dict[str, _Session] = {}
    self._tasks: set[asyncio.Task[TurnSample]] = set()
    self._drawing = 0
    self.calls: list[ScriptedCall] = []
    self.released: list[str] = []
    self.peak_sessions = 0

  @property
  def contract(self) -> SamplerContract:
    return self._contract

  @property
  def open_sessions(self) -> tuple[str, ...]:
    """Names sampled and not yet released."""
    return tuple(self._sessions)

  @property
  def version(self) -> int:
    if self._version is None:
      raise SamplerError(f'pool {self._contract.source.pool}: no version is served yet')
    return self._version

  def serve(self, version: int) -> None:
    """Changes the version served, under running sessions too."""
    self._version = version
    self._served.set()

  async def pin(self, version: Version | None) -> None:
    """Serves `version`; None changes nothing, since nothing but `serve` moves it."""
    self._check_open()
    if version is not None:
      self.serve(version.number)

  async def start(self) -> None:
    await self._served.wait()
    self._check_open()

  async def sample(
    self, session: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> TurnSample:
    self._check_open()
    if not self._served.is_set():
      raise SamplerError(f'session {session}: sampled before the first version was served')
    task = asyncio.ensure_future(self._turn(session, np.asarray(tokens, np.int32), params, key))
    self._tasks.add(task)
    try:
      return await task
    except asyncio.CancelledError:
      if self._closed:
        raise SamplerError(f'session {session}: the sampler was closed') from None
      raise
    finally:
      self._tasks.discard(task)

  async def release(self, session: str) -> None:
    self._sessions.pop(session, None)
    self.released.append(session)

  async def close(self) -> None:
    self._closed = True
    self._served.set()
    for task in self._tasks:
      task.cancel()

  def _check_open(self) -> None:
    if self._closed:
      raise SamplerError(f'pool {self._contract.source.pool}: the sampler is closed')

  async def _turn(
    self, name: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> TurnSample:
    state = self._sessions.setdefault(name, _Session(tokens[:0]))
    held = len(state.tokens)
    if not np.array_equal(tokens[:held], state.tokens):
      raise SamplerError(f'session {name}: tokens do not extend the {held} held')
    room = min(params.max_turn_tokens, self._contract.max_tokens - len(tokens))
    if room < 1:
      raise SamplerError(
        f'session {name}: {len(tokens)} tokens; expected fewer than {self._contract.max_tokens}'
      )
    async with self._places:
      self._drawing += 1
      self.peak_sessions = max(self.peak_sessions, self._drawing)
      try:
        call = ScriptedCall(name, state.turns, tokens, params, key, self.version)
        self.calls.append(call)
        drawn = await self._draw(call)
      finally:
        self._drawing -= 1
    turn = drawn if isinstance(drawn, TurnSample) else self._record(call, drawn, room)
    shape = self._contract.routes
    if shape is not None and turn.routes is None:
      routes = scripted_routes(shape, max(held - 1, 0), len(tokens) + len(turn.tokens) - 1)
      turn = dataclasses.replace(turn, routes=routes)
    state.tokens = np.concatenate([tokens, turn.tokens])
    state.turns += 1
    return turn

  async def _draw(self, call: ScriptedCall) -> Draw:
    try:
      drawn = self._script(call)
      if inspect.isawaitable(drawn):
        return await drawn
      await asyncio.sleep(0)  # other sessions get their turn, as under a real sampler
      return drawn
    except SamplerError:
      raise
    except Exception as error:
      raise SamplerError(f'session {call.session}: {type(error).__name__}: {error}') from error

  def _record(self, call: ScriptedCall, drawn: Sequence[int], room: int) -> TurnSample:
    ids = [int(i) for i in drawn][:room]
    stop = next((t for t, i in enumerate(ids) if i in call.params.stop_ids), None)
    if stop is not None:
      ids = ids[: stop + 1]
    if not ids:
      raise SamplerError(f'session {call.session}: the script drew nothing')
    tokens = np.array(ids, np.int32)
    num = len(tokens)
    both = np.stack([tokens, (tokens + 1) % self._contract.vocab_size], axis=1)
    both = both[:, : call.params.candidates]
    half = np.full(both.shape, np.log(0.5), np.float32)
    now, first = self.version, (num + 1) // 2
    spans = [VersionSpan(0, num, now)]
    if now != call.version:
      spans = [VersionSpan(0, first, call.version), VersionSpan(first, num, now)]
    return TurnSample(
      tokens=tokens,
      logps=half[:, 0],
      candidates=Candidates.from_dense(both, half),
      full_support=np.full(num, both.shape[1] == 2),
      finish=FinishReason.LENGTH if stop is None else FinishReason.STOP,
      spans=tuple(span for span in spans if span.end > span.start),
    )
