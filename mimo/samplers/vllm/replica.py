"""One vLLM server that follows one view: started, fed with versions, watched and restarted.

    no version -> starting -> activating the first -> serving -> ... -> closed
                     ^________________________________|  it died, hung or lost its weights

It takes no traffic before its first activation, and reports a version only after the server has
verified it. A version that cannot be activated leaves the one before it serving, and is tried again
ever less often. A server is restarted when it is gone, when it does not answer, or when turns are
in flight and its engine takes no step: slow is not hung.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Awaitable, Callable, Mapping

from mimo.samplers.base import SamplerError
from mimo.samplers.vllm import client as http
from mimo.samplers.vllm.client import TurnError, VllmClient
from mimo.samplers.vllm.held import Feed, HeldViews
from mimo.samplers.vllm.messages import Activation, Outcome, Status
from mimo.samplers.vllm.process import Server
from mimo.samplers.vllm.watch import Down, ReplicaLimits, Watch
from mimo.types import Version

_START_POLL_SECS = 0.2
_MAX_WAIT_SECS = 60.0

# What an activation can fail with while the server goes on as before.
_REFUSED = frozenset({Outcome.NOT_ACTIVATED, Outcome.BAD_REQUEST})

_log = logging.getLogger(__name__)


# Starts a server on a view directory whose weights nobody is served.
Launch = Callable[[pathlib.Path], Awaitable[Server]]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaReport:
  """How a replica is.

  Attributes:
    state: 'starting', 'serving' or 'closed'.
    version: what it serves, or None.
    in_flight: turns that wait for it.
    running: requests that its engine decodes, as of its last answer.
    waiting: requests that wait in its engine.
    starts: processes started.
    activations: versions activated.
    failures: name -> how often: 'launch', 'activate', 'poll', 'down'.
    last_failure: what the newest of them said.
  """

  state: str
  version: Version | None
  in_flight: int
  running: int
  waiting: int
  starts: int
  activations: int
  failures: Mapping[str, int]
  last_failure: str | None


class Replica:
  """Owns one server. Made and used on one event loop."""

  def __init__(
    self,
    feed: Feed,
    launch: Launch,
    *,
    name: str,
    format: str,
    prefix_cache: str,
    directory: pathlib.Path,
    check: Callable[[Status], None],
    new_client: Callable[[str], VllmClient],
    limits: ReplicaLimits,
  ) -> None:
    """Starts nothing yet.

    Args:
      feed: the versions of the view.
      launch: starts a server.
      name: of the pool, for messages.
      format: the view's.
      prefix_cache: 'keep' or 'drop' at an activation.
      directory: of this replica's own: it keeps the views that are served.
      check: raises ValueError where the server's state is not what it must be.
      new_client: url -> a client.
      limits: when the server counts as hung.
    """
    self._feed = feed
    self._launch = launch
    self._name = name
    self._format = format
    self._prefix_cache = prefix_cache
    self._directory = directory
    self._check = check
    self._new_client = new_client
    self._limits = limits
    self._client: VllmClient | None = None
    self._status: Status | None = None
    self._served: Version | None = None  # by the process that runs now
    self._good: Version | None = None  # the last that was activated
    self._pinned: Version | None = None
    self._refused: dict[Version, tuple[int, float]] = {}  # how often, and not again before
    self._views: HeldViews | None = None
    self._model: Version | None = None  # what servers are started with: the shape of all others
    self._failures: collections.Counter[str] = collections.Counter()
    self._last_failure: str | None = None
    self._starts = self._activations = 0
    self._task: asyncio.Task[None] | None = None
    self._wake = asyncio.Event()
    self._changed = asyncio.Event()
    self._doubted = False  # a turn failed, and the server has not answered since
    self._closed = False

  @property
  def version(self) -> Version | None:
    """What is served now."""
    return self._served

  def report(self) -> ReplicaReport:
    """Returns how it is."""
    state = 'closed' if self._closed else 'serving' if self._served is not None else 'starting'
    return ReplicaReport(
      state=state,
      version=self._served,
      in_flight=0 if self._client is None else self._client.in_flight,
      running=0 if self._status is None else self._status.running,
      waiting=0 if self._status is None else self._status.waiting,
      starts=self._starts,
      activations=self._activations,
      failures=dict(self._failures),
      last_failure=self._last_failure,
    )

  async def start(self) -> None:
    """Returns once a version is served. Raises SamplerError at the first failure before that."""
    self._check_open()
    if self._task is None:
      self._task = asyncio.get_running_loop().create_task(self._run())
    while self._served is None and not self._failures:
      await self._until_changed()
    if self._served is None:
      raise SamplerError(f'pool {self._name}: {self._last_failure}')

  async def serving(self, secs: float) -> tuple[VllmClient, int]:
    """Returns a client and the number that its server serves: the newest that can be served.

    Raises SamplerError when there is none for `secs`.
    """
    try:
      async with asyncio.timeout(secs):
        while True:
          self._check_open()
          if self._client is not None and self._served is not None and not self._doubted:
            if self._target() in (self._served, None):
              return self._client, self._served.number
            self._wake.set()
          await self._until_changed()
    except TimeoutError:
      raise SamplerError(
        f'pool {self._name}: no server served the newest version within {secs} s; last failure: '
        f'{self._last_failure}'
      ) from None

  def doubt(self, client: VllmClient) -> None:
    """Says that a server failed a turn: it gets no other before it has answered for itself."""
    if client is self._client:
      self._doubted = True
      self._wake.set()

  async def pin(self, version: Version | None) -> None:
    """Serves exactly `version` once this returns; None follows the pointer again.

    Raises SamplerError when it cannot be activated; what was served then still is.
    """
    before, self._pinned = self._pinned, version
    if version is None:
      return
    self._refused.pop(version, None)
    while self._served != version:
      self._check_open()
      if version in self._refused:
        self._pinned = before
        raise SamplerError(f'pool {self._name}: {self._last_failure}')
      self._wake.set()
      await self._until_changed()

  async def close(self) -> None:
    """Ends the server. May be called more than once."""
    self._closed = True
    if self._task is not None:
      self._task.cancel()
      await asyncio.gather(self._task, return_exceptions=True)
    self._notify()
    if self._views is not None:
      self._views.close()

  def _check_open(self) -> None:
    if self._closed:
      raise SamplerError(f'pool {self._name}: the sampler is closed')

  def _notify(self) -> None:
    self._changed.set()
    self._changed = asyncio.Event()

  async def _until_changed(self) -> None:
    # The pointer moves without a word: look again before long.
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(1.0):
        await self._changed.wait()

  def _fail(self, kind: str, reason: str) -> None:
    self._failures[kind] += 1
    self._last_failure = reason
    _log.warning('pool %s: %s', self._name, reason)
    self._notify()

  async def _run(self) -> None:
    """Keeps a server running until this is cancelled."""
    failed = 0
    while True:
      before = self._activations
      try:
        await self._live()
      except Down as down:
        self._fail('down' if self._activations > before else 'launch', str(down))
      except Exception as error:  # a bug, or a resource that is short: others train on meanwhile
        _log.exception('pool %s', self._name)
        self._fail('launch', f'{type(error).__name__}: {error}')
      failed = failed + 1 if self._activations == before else 0
      await asyncio.sleep(min(2.0**failed, _MAX_WAIT_SECS) - 1)

  async def _live(self) -> None:
    """Starts a server and feeds it. Raises Down when it must be started again."""
    while (first := self._target()) is None:
      await asyncio.sleep(self._limits.poll_secs)
    try:
      if self._views is None:
        self._views = HeldViews(self._feed, self._directory)
      model = await asyncio.to_thread(self._views.hold, self._model or first)
      self._model = self._model or first
      server = await self._launch(model.directory)
    except (ValueError, OSError) as error:
      raise Down(f'no server could be started: {error}') from error
    self._starts += 1
    client = self._new_client(server.url)
    gone = asyncio.ensure_future(server.wait())
    fed = asyncio.ensure_future(self._feed_server(client))
    try:
      await asyncio.wait({gone, fed}, return_when=asyncio.FIRST_COMPLETED)
      if gone.done():
        raise Down(f'the server exited with status {gone.result()}; it wrote:\n{server.tail()}')
      try:
        fed.result()
      except TurnError as error:
        raise Down(f'{error}; the server wrote:\n{server.tail()}') from error
    finally:
      self._client = self._served = self._status = None
      self._notify()
      fed.cancel()
      await asyncio.gather(fed, return_exceptions=True)
      await client.close()
      await server.stop()
      await gone

  async def _feed_server(self, client: VllmClient) -> None:
    """Activates versions as they come, and watches. Raises TurnError or Down when that ends."""
    await self._until_up(client)
    self._client, self._doubted = client, False
    watch = Watch(client, self._limits)
    while True:
      self._wake.clear()
      await self._follow(client)
      if watch.due or self._doubted:
        status = await watch.ask()
        if status is not None:
          self._expect(status)
          self._status = status
          if self._doubted:
            self._doubted = False
            self._notify()
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(self._limits.poll_secs):
          await self._wake.wait()

  async def _until_up(self, client: VllmClient) -> None:
    try:
      async with asyncio.timeout(self._limits.start_secs):
        while True:
          try:
            self._check(await client.status())
            return
          except ValueError as error:
            raise Down(f'the server cannot be used: {error}') from None
          except TurnError as error:
            if error.kind not in (http.CONNECTION, http.SILENCE, Outcome.NOT_READY):
              raise
          await asyncio.sleep(_START_POLL_SECS)
    except TimeoutError:
      raise Down(f'the server did not answer within {self._limits.start_secs} s') from None

  def _expect(self, status: Status) -> None:
    if status.broken is not None:
      raise Down(f'it lost its weights: {status.broken}')
    if status.version != self._served:
      raise Down(f'it serves {status.version}; expected {self._served}')

  def _target(self) -> Version | None:
    """Returns the newest version that is not known to fail, or the last that did not, or None."""
    wanted = self._pinned
    if wanted is None:
      try:
        wanted = self._feed.latest()
      except (ValueError, OSError) as error:
        self._failures['poll'] += 1
        self._last_failure = f'the newest version is unknown: {error}'
    now = asyncio.get_running_loop().time()
    for version in (wanted, self._good):
      if version is not None and now >= self._refused.get(version, (0, 0.0))[1]:
        return version
    return None

  async def _follow(self, client: VllmClient) -> None:
    """Activates the version to serve, if it is another than the one served."""
    target = self._target()
    if target is None or target == self._served:
      return
    assert self._views is not None
    try:
      view = await asyncio.to_thread(self._views.hold, target)
    except (ValueError, OSError) as error:
      self._refuse(target, str(error))
      return
    activation = Activation(
      version=target,
      directory=str(view.directory),
      format=self._format,
      files={name: (blob.sha256, blob.size_bytes) for name, blob in view.files.items()},
      prefix_cache=self._prefix_cache,
    )
    try:
      await client.activate(activation)
    except TurnError as error:
      if error.kind not in _REFUSED:
        raise Down(f'version {target.number}: {error}') from error
      self._refuse(target, str(error))
    else:
      self._served = self._good = target
      self._activations += 1
      self._refused.clear()
      self._notify()
    await asyncio.to_thread(self._views.keep, {self._model, self._good})

  def _refuse(self, version: Version, reason: str) -> None:
    """Notes that a version cannot be served for now."""
    times = self._refused.get(version, (0, 0.0))[0] + 1
    wait_secs = min(2.0**times, _MAX_WAIT_SECS)
    again_at = asyncio.get_running_loop().time() + wait_secs
    self._refused[version] = times, again_at
    self._fail('activate', f'version {version.number} cannot be served: {reason}')
