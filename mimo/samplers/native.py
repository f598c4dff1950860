"""The native sampler: JAX, in process, behind the asynchronous port.

It serves view directories, never a trainer's arrays, and follows the newest version of its view
under running turns. One coroutine pumps the engine; what it runs is inline on the event loop, or
in an executor of one thread that several samplers may share.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import pathlib
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.moe import route_shape
from mimo.samplers.base import SamplerContract, SamplerError
from mimo.samplers.decode import Weights
from mimo.samplers.engine import Engine, EngineSettings, EngineStats, Finished
from mimo.samplers.following import Follower, ViewFeed
from mimo.samplers.pace import PoolSpeed
from mimo.samplers.turns import TurnRequest
from mimo.types import SamplingParams, Source, TurnSample, Version
from mimo.weights.views import View

# Rounds of the event loop in which the owners of turns that ended may come back with the next:
# a batch that waits for them is fuller, and the rounds cost microseconds. From the end of a group's
# last turn to the first turn of the group that takes its place it is eight.
_SETTLE_ROUNDS = 12

_T = TypeVar('_T')

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class NativeStats:
  """What a native sampler has done since it was made.

  Attributes:
    engine: counts of tokens and steps.
    activations: versions activated.
    failures: name and count of failures that left the served version as it was, and 'engine'.
  """

  engine: EngineStats
  activations: int
  failures: dict[str, int]


def native_contract(
  source: Source, config: ModelConfig, settings: EngineSettings
) -> SamplerContract:
  """Returns what a sampler on a native engine states of itself.

  Raises ValueError where the cache dtypes of `source` and `settings` differ.
  """
  if source.kv_cache_dtype != settings.kv_cache_dtype:
    raise ValueError(
      f'pool {source.pool}: kv_cache_dtype is {settings.kv_cache_dtype!r}; expected '
      f"{source.kv_cache_dtype!r}, the pool's"
    )
  return SamplerContract(
    source=source,
    logprob_mode='processed',
    logits_dtype='float32',
    vocab_size=config.vocab_size,
    max_tokens=settings.max_tokens,
    prefix_cache=settings.prefix_cache,
    max_sessions=settings.slots,
    routes=route_shape(config) if settings.routes else None,
  )


class NativeSampler:
  """Implements `mimo.samplers.base.Sampler`.

  Drawn tokens are a function of weights, ids, sampling parameters and key alone: not of the order
  in which sessions arrive, nor of what else is in the batch.
  """

  def __init__(
    self,
    feed: ViewFeed,
    *,
    source: Source,
    config: ModelConfig,
    settings: EngineSettings,
    emulate_activations: bool = False,
    executor: Executor | None = None,
    pace: PoolSpeed | None = None,
    poll_secs: float = 0.05,
    read_view: Callable[[pathlib.Path], View] | None = None,
  ) -> None:
    """Opens nothing yet; `start` does.

    Args:
      feed: the versions of the view that is served.
      source: the pool; its format is the only one served, and its cache dtype is the settings'.
      config: the model that every version must hold.
      settings: the engine's shape.
      emulate_activations: rounds inputs of projections as the view's format states, and leaves
        quantised weights unrounded: computes as a server of that format does.
      executor: of one thread; None runs everything inline, on the event loop.
      pace: how long the replica that it stands for takes; turns that end with a step are answered
        that much later on the event loop's clock, and the next step begins then. None adds nothing.
      poll_secs: how often the feed is asked while `start` waits for a first version.
      read_view: reads a view directory; None takes mimo's own reader.

    Raises:
      ValueError: the cache dtypes of `source` and `settings` differ.
    """
    self._contract = native_contract(source, config, settings)
    self._follower = Follower(
      feed,
      read_view,
      pool=source.pool,
      config=config,
      format=source.format,
      emulate_activations=emulate_activations,
    )
    self._engine = Engine(config, settings)
    self._executor = executor
    self._pace = pace
    self._poll_secs = poll_secs
    self._pinned = False
    self._version: int | None = None
    self._activations = 0
    self._engine_failures = 0
    self._lock = asyncio.Lock()
    self._wake = asyncio.Event()
    self._closed = False
    self._pump_task: asyncio.Task[None] | None = None
    self._inbox: list[Callable[[], None]] = []
    self._waiting: dict[TurnRequest, asyncio.Future[TurnSample]] = {}

  @property
  def contract(self) -> SamplerContract:
    return self._contract

  @property
  def version(self) -> int:
    if self._version is None:
      raise SamplerError(f'{self._name}: no version is served yet')
    return self._version

  @property
  def stats(self) -> NativeStats:
    """A snapshot of the counts."""
    failures = dict(self._follower.failures)
    if self._engine_failures:
      failures['engine'] = self._engine_failures
    return NativeStats(dataclasses.replace(self._engine.stats), self._activations, failures)

  async def start(self) -> None:
    while self._version is None:
      self._check_open()
      if not await self._run(self._activate_first):
        await asyncio.sleep(self._poll_secs)
    self._check_open()
    if self._pump_task is None:
      self._pump_task = asyncio.get_running_loop().create_task(self._pump())

  async def pin(self, version: Version | None) -> None:
    """Serves exactly `version`, once this returns and until the next call; None follows again.

    Raises SamplerError when it cannot be loaded; what was served then still is.
    """
    self._check_open()
    if version is None:
      self._pinned = False
    else:
      await self._run(lambda: self._pin(version))

  async def sample(
    self, session: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> TurnSample:
    self._check_open()
    if self._pump_task is None:
      raise SamplerError(f'{self._name}: session {session} came before the sampler was started')
    request = TurnRequest(session, np.array(tokens, np.int32), params, np.asarray(key, np.uint32))
    future = asyncio.get_running_loop().create_future()
    self._waiting[request] = future
    self._tell(lambda: self._engine.submit(request))
    try:
      return await future
    except asyncio.CancelledError:
      self._waiting.pop(request, None)
      self._tell(lambda: self._engine.abandon(request))
      raise

  async def release(self, session: str) -> None:
    self._tell(lambda: self._engine.release(session))

  async def close(self) -> None:
    """Stops once the step that runs is over; turns in flight raise SamplerError."""
    self._closed = True
    self._wake.set()
    if self._pump_task is not None:
      await self._pump_task
    self._fail_waiting('the sampler was closed')

  @property
  def _name(self) -> str:
    return f'pool {self._contract.source.pool}'

  def _check_open(self) -> None:
    if self._closed:
      raise SamplerError(f'{self._name}: the sampler is closed')

  def _tell(self, command: Callable[[], None]) -> None:
    """Has the pump run `command` before its next step, in the order of these calls."""
    self._inbox.append(command)
    self._wake.set()

  async def _run(self, work: Callable[[], _T]) -> _T:
    """Runs `work` where the engine lives, one piece at a time."""
    async with self._lock:
      if self._executor is None:
        return work()
      return await asyncio.get_running_loop().run_in_executor(self._executor, work)

  async def _pump(self) -> None:
    try:
      while not self._closed:
        await self._wake.wait()
        self._wake.clear()
        for _ in range(_SETTLE_ROUNDS):
          await asyncio.sleep(0)
        await self._turn_over()
    finally:
      self._closed = True
      self._fail_waiting('the sampler was closed')

  async def _turn_over(self) -> None:
    """Runs the commands that have come in and one step, and answers the turns that have ended."""
    commands, self._inbox = self._inbox, []
    given = list(self._waiting)  # requests that the engine has, or gets with these commands
    try:
      finished, busy, secs = await self._run(lambda: self._step(commands))
    except Exception as error:
      self._engine_failures += 1
      reason = f'{self._name}: the engine failed: {type(error).__name__}: {error}'
      _log.exception(reason)
      await self._run(self._engine.reset)
      finished, busy, secs = [(request, SamplerError(reason)) for request in given], False, 0.0
    if self._pace is not None:
      await asyncio.sleep(secs)
    for request, result in finished:
      self._answer(request, result)
    if busy:
      self._wake.set()

  def _step(self, commands: list[Callable[[], None]]) -> tuple[list[Finished], bool, float]:
    """Returns the turns that ended, whether there is more to do, and how long it takes."""
    for command in commands:
      command()
    if self._engine.busy and not self._pinned:
      weights = self._follower.poll()
      if weights is not None:
        self._activate(weights)
    before = dataclasses.replace(self._engine.stats)
    finished = self._engine.step()
    secs = 0.0
    if self._pace is not None:
      secs = self._pace.secs(before, self._engine.stats, self._contract.max_sessions)
    return finished, self._engine.busy, secs

  def _activate_first(self) -> bool:
    """Activates the newest version if there is one; raises SamplerError where that fails."""
    weights = self._follower.first()
    if weights is None:
      return False
    self._activate(weights)
    return True

  def _pin(self, version: Version) -> None:
    if version != self._follower.version:
      self._activate(self._follower.load(version))
    self._pinned = True

  def _activate(self, weights: Weights) -> None:
    version = self._follower.version
    assert version is not None
    self._engine.activate(weights, version.number)
    self._version = version.number
    self._activations += 1

  def _answer(self, request: TurnRequest, result: TurnSample | SamplerError) -> None:
    future = self._waiting.pop(request, None)
    if future is None or future.done():
      return
    if isinstance(result, SamplerError):
      future.set_exception(result)
    else:
      future.set_result(result)

  def _fail_waiting(self, reason: str) -> None:
    for request in list(self._waiting):
      self._answer(request, SamplerError(f'session {request.session}: {reason}'))
