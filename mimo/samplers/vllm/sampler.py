"""The `vllm` sampler: a server of its own behind the sampler port.

A turn goes to the newest version that the server can serve, and says so: a server that is behind
refuses it. What fails in passing, a lost connection among it, is tried again within the episode a
bounded number of times, under another request name and the same seed; while the server is
restarted, turns wait for it. What cannot be mended is a SamplerError that names its kind.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import uuid
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mimo import keys
from mimo.samplers.base import SamplerContract, SamplerError
from mimo.samplers.vllm.client import CORRUPT, ClientLimits, TurnError, VllmClient
from mimo.samplers.vllm.messages import Outcome, Status
from mimo.samplers.vllm.replica import ReplicaReport
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import SamplingParams, TurnSample, Version

# The server has nothing to serve, or something older: it says so at once, and no turn was lost.
_NOT_NOW = frozenset({Outcome.STALE, Outcome.NOT_READY, Outcome.BROKEN})


class Host(Protocol):
  """What the sampler needs of a `Replica`."""

  @property
  def version(self) -> Version | None: ...

  def report(self) -> ReplicaReport: ...

  async def start(self) -> None: ...

  async def serving(self, secs: float) -> tuple[VllmClient, int]: ...

  def doubt(self, client: VllmClient) -> None: ...

  async def pin(self, version: Version | None) -> None: ...

  async def close(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class RetryLimits:
  """How a turn is tried again.

  Attributes:
    retries: after the first try, of a turn that failed in passing.
    backoff_secs: before the first of them; each waits twice as long as the one before.
    recovery_secs: how long a turn waits, each time, for a server that serves the newest version.
  """

  retries: int = 2
  backoff_secs: float = 0.25
  recovery_secs: float = 180.0


class VllmSampler:
  """Implements `mimo.samplers.base.Sampler`.

  A turn's random numbers come of its session's key and of where it starts. Servers batch as they
  please, so the same key need not draw the same tokens twice.
  """

  def __init__(
    self,
    host: Host,
    contract: SamplerContract,
    *,
    limits: ClientLimits,
    retry: RetryLimits,
  ) -> None:
    """Starts nothing yet.

    Args:
      host: the server. It is this sampler's alone, and is closed with it.
      contract: what the server is started to keep; `check_status` finds whether it does.
      limits: when to stop waiting for an answer.
      retry: how turns are tried again.
    """
    self._host = host
    self._contract = contract
    self._limits = limits
    self._retry = retry
    self._sessions: dict[str, np.ndarray] = {}
    self._tasks: set[asyncio.Task[TurnSample]] = set()
    self._failures: collections.Counter[str] = collections.Counter()
    self._started = False
    self._closed = False

  @property
  def contract(self) -> SamplerContract:
    return self._contract

  @property
  def version(self) -> int:
    served = self._host.version
    if served is None:
      raise SamplerError(f'{self._name}: no version is served')
    return served.number

  @property
  def failures(self) -> Mapping[str, int]:
    """Requests that failed, by kind; those that a retry made good are among them."""
    return dict(self._failures)

  def report(self) -> ReplicaReport:
    """Returns how its server is."""
    return self._host.report()

  async def start(self) -> None:
    self._check_open()
    await self._host.start()
    self._check_open()
    self._started = True

  async def pin(self, version: Version | None) -> None:
    """Serves exactly `version`, once this returns and until the next call; None follows again.

    Raises SamplerError when it cannot be activated; what was served then still is.
    """
    self._check_open()
    await self._host.pin(version)

  async def sample(
    self, session: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> TurnSample:
    self._check_open()
    if not self._started:
      raise SamplerError(f'{self._name}: session {session} came before the sampler was started')
    tokens = np.array(tokens, np.int32)
    held = self._sessions.setdefault(session, tokens[:0])
    if not np.array_equal(tokens[: len(held)], held):
      raise SamplerError(f'session {session}: tokens do not extend the {len(held)} held')
    room = self._contract.max_tokens - len(tokens)
    if room < 1:
      raise SamplerError(
        f'session {session}: {len(tokens)} tokens; expected fewer than {self._contract.max_tokens}'
      )
    if room < params.max_turn_tokens:
      params = dataclasses.replace(params, max_turn_tokens=room)
    untold = None if self._contract.routes is None else max(len(held) - 1, 0)
    task = asyncio.ensure_future(self._turn(session, tokens, params, key, untold))
    self._tasks.add(task)
    try:
      sample = await task
    except asyncio.CancelledError:
      if self._closed and not _cancelling():
        raise SamplerError(f'session {session}: the sampler was closed') from None
      raise
    finally:
      task.cancel()
      self._tasks.discard(task)
    if session in self._sessions:
      self._sessions[session] = np.concatenate([tokens, sample.tokens])
    return sample

  async def release(self, session: str) -> None:
    """Frees what is held here; what the server caches of it goes when others need the place."""
    self._sessions.pop(session, None)

  async def close(self) -> None:
    self._closed = True
    for task in self._tasks:
      task.cancel()
    await self._host.close()

  @property
  def _name(self) -> str:
    return f'pool {self._contract.source.pool}'

  def _check_open(self) -> None:
    if self._closed:
      raise SamplerError(f'{self._name}: the sampler is closed')

  async def _turn(
    self,
    session: str,
    tokens: np.ndarray,
    params: SamplingParams,
    key: np.ndarray,
    routes_from: int | None,
  ) -> TurnSample:
    """Draws one turn, in as many tries as it may take. Raises SamplerError."""
    request = GenerateRequest(
      request='',
      tokens=tokens,
      sampling=params,
      seed=_seed(key, len(tokens)),
      min_version=None,
      keep_alive_secs=self._limits.keep_alive_secs,
      routes_from=routes_from,
    )
    now = asyncio.get_running_loop().time
    give_up_at = now() + self._retry.recovery_secs
    told = [f'session {session}']
    failed = waited = 0
    while True:
      client, served = await self._host.serving(self._retry.recovery_secs)
      name = f'{session}/{len(tokens)}/{uuid.uuid4().hex}'
      try:
        sample = await client.generate(
          dataclasses.replace(request, request=name, min_version=served)
        )
        return _checked(sample, served)
      except TurnError as error:
        self._failures[error.kind] += 1
        if error.kind in _NOT_NOW and now() < give_up_at:
          waited = min(waited + 1, 4)
        else:
          told.append(str(error))
          if not error.passing or failed >= self._retry.retries:
            raise SamplerError(f'{self._name}: {"; ".join(told)}') from None
          failed += 1
          self._host.doubt(client)
      await asyncio.sleep(self._retry.backoff_secs * 2 ** max(failed - 1, waited - 1))


def check_status(status: Status, contract: SamplerContract, *, candidates: int) -> None:
  """Checks that a server keeps what is stated of it.

  Raises ValueError naming what was got and what was expected.
  """
  source = contract.source
  expected = {
    'logprob_mode': f'{contract.logprob_mode}_logprobs',
    'logits_dtype': contract.logits_dtype,
    'kv_cache_dtype': source.kv_cache_dtype,
  }
  for name, stated in expected.items():
    if getattr(status, name) != stated:
      raise ValueError(f'{name} is {getattr(status, name)!r}; expected {stated!r}')
  if status.vocab_size != contract.vocab_size:
    raise ValueError(f'vocabulary of {status.vocab_size}; expected {contract.vocab_size}')
  if contract.routes is not None and status.routes != contract.routes:
    raise ValueError(f'routes are {status.routes}; expected {contract.routes}')
  at_least = {
    'max_tokens': contract.max_tokens,
    'max_candidates': min(candidates, contract.vocab_size),
    'max_running': contract.max_sessions,
  }
  for name, value in at_least.items():
    if getattr(status, name) < value:
      raise ValueError(f'{name} is {getattr(status, name)}; expected at least {value}')


def _checked(sample: TurnSample, min_version: int) -> TurnSample:
  oldest = min((span.version for span in sample.spans), default=min_version)
  if oldest < min_version:
    raise TurnError(CORRUPT, f'version {oldest} drew a turn that asked for {min_version}')
  return sample


def _seed(key: np.ndarray, start: int) -> int:
  """Returns the seed of the turn that starts at a position: 63 bits of the key and of it."""
  high, low = keys.key('turn', *np.asarray(key, np.uint32).tolist(), start)
  return (int(high) << 32 | int(low)) & (2**63 - 1)


def _cancelling() -> bool:
  """Whether the running task itself is asked to stop."""
  task = asyncio.current_task()
  return task is not None and task.cancelling() > 0
