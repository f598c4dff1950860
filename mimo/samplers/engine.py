"""The native sampler's engine: slots, their cache on the device, and the turns that run in them.

Synchronous and single-threaded: its owner calls it from one thread at a time. A session is one
trajectory. It needs a slot only while a turn of it runs; between turns it keeps its slot, and with
it the cached prefix, until a turn that has none needs it. Turns wait for slots in the order in
which they were submitted, and an idle session never holds one against them, so an environment
that is slow to answer starves nobody.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.decoder import Cache, init_cache
from mimo.models.moe import route_shape
from mimo.samplers.base import SamplerError
from mimo.samplers.decode import Decoded, Program, Rows, Weights, computed, decode, prefill
from mimo.samplers.draw import Draw, DrawParams
from mimo.samplers.routes import RouteBook
from mimo.samplers.turns import Part, Session, TurnRequest, assemble
from mimo.types import SamplingParams, TurnSample

KV_QUANT = {'float32': None, 'bf16': 'bf16', 'fp8': 'fp8'}
PREFIX_CACHES = ('keep', 'drop')

# Stop ids are padded to a multiple of this, so that their number compiles nothing new.
_STOP_IDS = 4

# A decode ends early once this share of its rows has nothing left to do, so that others may take
# their places. Measured on `repair`-like turns: 0.1 to 0.35 are within 5% of each other.
_EARLY_SHARE = 0.25

# The cache is read up to this many positions, or the next power of two times it.
_WINDOW_TOKENS = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
  """The shape of an engine.

  Attributes:
    slots: B, how many turns run at a time.
    max_tokens: the longest trajectory.
    kv_cache_dtype: 'bf16' or 'fp8', what keys and values are rounded to; they are stored and
      computed with in float32. 'float32' rounds nothing.
    prefix_cache: 'keep' what is cached at a weight update, or 'drop' it.
    decode_steps: N, the most tokens a row takes per dispatch.
    prefill_rows: how many slots are prefilled together.
    prefill_tokens: C, how many tokens of each.
    routes: whether turns tell the experts that tokens were sent to.
  """

  slots: int
  max_tokens: int
  kv_cache_dtype: str
  prefix_cache: str = 'keep'
  decode_steps: int = 8
  prefill_rows: int = 16
  prefill_tokens: int = 16
  routes: bool = False

  def __post_init__(self) -> None:
    for name in ('slots', 'max_tokens', 'decode_steps', 'prefill_rows', 'prefill_tokens'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} is {getattr(self, name)}; expected at least 1')
    if self.kv_cache_dtype not in KV_QUANT:
      raise ValueError(
        f'kv_cache_dtype is {self.kv_cache_dtype!r}; expected one of {list(KV_QUANT)}'
      )
    if self.prefix_cache not in PREFIX_CACHES:
      raise ValueError(
        f'prefix_cache is {self.prefix_cache!r}; expected one of {list(PREFIX_CACHES)}'
      )


@dataclasses.dataclass(slots=True)
class EngineStats:
  """Counts since the engine was made.

  Attributes:
    sampled_tokens: drawn.
    forced_tokens: known ones fed while decoding.
    prefilled_tokens: known ones fed in chunks.
    decode_steps: steps run.
    idle_row_steps: rows times steps in which nothing was fed.
    prefills: chunks dispatched.
    evictions: idle sessions that lost their slot.
  """

  sampled_tokens: int = 0
  forced_tokens: int = 0
  prefilled_tokens: int = 0
  decode_steps: int = 0
  idle_row_steps: int = 0
  prefills: int = 0
  evictions: int = 0


Finished = tuple[TurnRequest, TurnSample | SamplerError]


class Engine:
  """Runs turns in slots under the weights it was last given."""

  def __init__(self, config: ModelConfig, settings: EngineSettings) -> None:
    if settings.routes and config.moe is None:
      raise ValueError(f'routes is True of a {config.family} model; expected one with experts')
    self._config = computed(config)
    self._settings = settings
    self._weights: Weights | None = None
    self._version = -1
    self._sessions: dict[str, Session] = {}
    self._queue: collections.deque[TurnRequest] = collections.deque()
    self._finished: list[Finished] = []
    self.stats = EngineStats()
    self._reset_slots()

  def _reset_slots(self) -> None:
    s = self._settings
    with jax.transfer_guard_host_to_device('allow'):  # of zeros
      self._cache: Cache = init_cache(self._config, s.slots, s.max_tokens, jnp.float32)
    self._holders: list[Session | None] = [None] * s.slots
    self._told = RouteBook(route_shape(self._config) if s.routes else None, s.slots, s.max_tokens)
    self._idle: dict[str, Session] = {}  # sessions with a slot and no turn, longest idle first
    self._tokens = np.zeros((s.slots, s.max_tokens), np.int32)
    self._given = np.zeros(s.slots, np.int32)  # tokens that the running turn began with
    self._known = np.zeros(s.slots, np.int32)  # of these and the drawn ones
    self._written = np.zeros(s.slots, np.int32)  # of the known, in the cache
    self._absorbed = np.zeros(s.slots, np.int32)  # by what the cache holds of a slot's delta nets
    self._limit = np.zeros(s.slots, np.int32)  # how long the trajectory may be at the turn's end
    self._running = np.zeros(s.slots, bool)
    self._keys = np.zeros((s.slots, 2), np.uint32)
    self._stop_ids = np.full((s.slots, _STOP_IDS), -1, np.int32)
    self._draw = DrawParams(
      temperature=np.ones(s.slots, np.float32),
      top_k=np.zeros(s.slots, np.int32),
      top_p=np.ones(s.slots, np.float32),
      cap=np.ones(s.slots, np.int32),
    )

  @property
  def busy(self) -> bool:
    """Whether `step` has anything to do."""
    return bool(self._running.any() or self._queue or self._finished)

  def activate(self, weights: Weights, version: int) -> None:
    """Serves `weights` from the next step on, under running turns too."""
    self._weights, self._version = weights, version
    if self._settings.prefix_cache == 'drop':
      self._written[:] = 0

  def submit(self, request: TurnRequest) -> None:
    """Takes a turn. A request that cannot be met is finished with an error at the next step."""
    problem = self._problem(request)
    if problem is not None:
      error = SamplerError(f'session {request.session}: {problem}')
      self._finished.append((request, error))
      return
    session = self._sessions.setdefault(request.session, Session(request.session))
    session.request = request
    if session.slot is None:
      self._queue.append(request)
    else:
      del self._idle[session.name]
      self._begin(session)

  def abandon(self, request: TurnRequest) -> None:
    """Stops a turn that nobody waits for; its session is as it was before it."""
    session = self._sessions.get(request.session)
    if session is not None and session.request is request:
      self._stop(session)

  def release(self, name: str) -> None:
    """Forgets a session; a turn of it that runs or waits is finished with an error."""
    session = self._sessions.pop(name, None)
    if session is None:
      return
    if session.request is not None:
      error = SamplerError(f'session {name}: released while a turn of it was sampled')
      self._finished.append((session.request, error))
    self._stop(session)

  def reset(self) -> None:
    """Gives up every turn and starts afresh with an empty cache; sessions keep their ids."""
    for session in self._sessions.values():
      session.request = session.slot = None
      session.parts = []
    self._finished = []
    self._queue.clear()
    self._reset_slots()

  def step(self) -> list[Finished]:
    """Admits turns, feeds known tokens, decodes, and returns the turns that have ended."""
    self._admit()
    if self._running.any():
      if self._weights is None:
        raise SamplerError('no version is served yet')
      self._prefill(self._weights)
      self._decode(self._weights)
    finished, self._finished = self._finished, []
    return finished

  def _problem(self, request: TurnRequest) -> str | None:
    """Returns why a request cannot be met, or None."""
    tokens, session = request.tokens, self._sessions.get(request.session)
    if len(tokens) == 0:
      return 'no tokens; expected at least one'
    if tokens.min() < 0 or tokens.max() >= self._config.vocab_size:
      return f'ids in [{tokens.min()}, {tokens.max()}]; expected [0, {self._config.vocab_size})'
    if len(tokens) >= self._settings.max_tokens:
      return f'{len(tokens)} tokens; expected fewer than {self._settings.max_tokens}'
    if session is None:
      return None
    if session.request is not None:
      return 'a turn of it is being sampled already'
    held = session.tokens
    if len(tokens) < len(held) or not np.array_equal(tokens[: len(held)], held):
      return f'tokens do not extend the {len(held)} that it holds'
    return None

  def _admit(self) -> None:
    """Gives slots to waiting turns, first come first served; idle sessions give way."""
    while self._queue:
      if None not in self._holders:
        if not self._idle:
          return
        self._vacate(next(iter(self._idle.values())))
        self.stats.evictions += 1
      session = self._sessions[self._queue.popleft().session]
      slot = self._holders.index(None)
      self._holders[slot], session.slot = session, slot
      self._written[slot] = 0
      self._begin(session)

  def _stop(self, session: Session) -> None:
    if session.request is not None and session.slot is None:
      self._queue.remove(session.request)
    session.request = None
    session.parts = []
    self._vacate(session)

  def _vacate(self, session: Session) -> None:
    self._idle.pop(session.name, None)
    if session.slot is not None:
      self._holders[session.slot] = None
      self._running[session.slot] = False
      session.slot = None

  def _begin(self, session: Session) -> None:
    """Starts the turn of a session that has a slot."""
    request, slot = session.request, session.slot
    assert request is not None and slot is not None
    params, num = request.params, len(request.tokens)
    self._tokens[slot, :num] = request.tokens
    self._given[slot] = self._known[slot] = num
    self._limit[slot] = min(num + params.max_turn_tokens, self._settings.max_tokens)
    self._keys[slot] = request.key
    self._told.begin(slot)
    self._set_stop_ids(slot, params)
    for column, value in zip(
      self._draw, (params.temperature, params.top_k, params.top_p, params.candidates), strict=True
    ):
      column[slot] = value
    self._running[slot] = True
    session.parts = []

  def _set_stop_ids(self, slot: int, params: SamplingParams) -> None:
    missing = len(params.stop_ids) - self._stop_ids.shape[1]
    if missing > 0:
      wider = -(-missing // _STOP_IDS) * _STOP_IDS
      self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, wider)), constant_values=-1)
    self._stop_ids[slot] = -1
    self._stop_ids[slot, : len(params.stop_ids)] = params.stop_ids

  def _program(self, num_candidates: int, top_k: int, end: int) -> Program:
    """Returns what is compiled in for turns like these, `end` being where the longest may end."""
    window = _WINDOW_TOKENS
    while window < end:
      window *= 2
    vocab = self._config.vocab_size
    return Program(
      config=self._config,
      kv_quant=KV_QUANT[self._settings.kv_cache_dtype],
      num_candidates=min(num_candidates, vocab),
      width=min(max(num_candidates, top_k), vocab),
      window=min(window, self._settings.max_tokens),
      routes=self._settings.routes,
    )

  def _prefill(self, weights: Weights) -> None:
    """Feeds known tokens in chunks while that is cheaper than feeding them one by one.

    The last known token of a row is left: what it predicts is drawn from, while decoding.
    """
    for slots, count in self._chunks():
      num_rows = min(self._settings.prefill_rows, len(self._holders))
      num_tokens = self._settings.prefill_tokens
      rows = np.full(num_rows, len(self._holders), np.int32)  # beyond the last: padding
      tokens = np.zeros((num_rows, num_tokens), np.int32)
      starts, counts = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
      rows[: len(slots)], counts[: len(slots)] = slots, count
      starts[: len(slots)] = self._written[slots]
      self._check_absorbed(slots)
      for row, (slot, taken) in enumerate(zip(slots, count, strict=True)):
        start = self._written[slot]
        tokens[row, :taken] = self._tokens[slot, start : start + taken]
      program = self._program(1, 1, int((starts + counts).max()))
      fed = jax.device_put((rows, tokens, starts, counts))
      self._cache, ids = prefill(program, weights, self._cache, *fed)
      if ids is not None:
        for slot, taken, told in zip(slots, count, jax.device_get(ids), strict=False):
          self._told.add(slot, self._written[slot], told[:taken])
      self._written[slots] += count
      self._absorbed[slots] = self._written[slots]
      self.stats.prefilled_tokens += int(count.sum())
      self.stats.prefills += 1

  def _chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (slots, how many tokens of each) while a chunk is worth its cost.

    A decode step is shared by all that run, and a chunk costs about as much as one plus a third
    per batch of tokens (measured on CPU; on an accelerator it costs less).
    """
    size, slots_held = self._settings.prefill_tokens, len(self._holders)
    rows = min(self._settings.prefill_rows, slots_held)
    cost_steps = 1.0 + rows * size / (3.0 * slots_held)
    enough = cost_steps * int(self._running.sum())
    while True:
      pending = np.where(self._running, self._known - self._written - 1, 0)
      slots = np.argsort(-pending, kind='stable')[:rows]
      slots = slots[pending[slots] > 0]
      count = np.minimum(pending[slots], size)
      if count.sum() <= enough:
        return
      yield slots, count

  def _decode(self, weights: Weights) -> None:
    """Runs one dispatch of decode steps and books what it drew."""
    steps = self._settings.decode_steps
    pending = np.where(self._running, self._known - self._written, 0)
    ahead = np.minimum(
      self._written[:, None] + np.arange(steps, dtype=np.int32), self._tokens.shape[1] - 1
    )
    rows = Rows(
      known_ids=np.take_along_axis(self._tokens, ahead, axis=1),
      num_known=pending,
      start=self._written,
      room=self._limit - self._known,
      keys=self._keys,
      stop_ids=self._stop_ids,
      draw=self._draw,
    )
    active = np.flatnonzero(self._running)
    self._check_absorbed(active)
    min_active = np.int32(len(active) - max(1, int(len(active) * _EARLY_SHARE)) + 1)
    program = self._program(
      int(self._draw.cap[active].max()),
      int(self._draw.top_k[active].max()),
      int(self._written[active].max()) + steps,
    )
    rows, min_active = jax.device_put((rows, min_active))
    self._cache, out = decode(program, weights, self._cache, rows, min_active)
    self._book(jax.device_get(out), pending)

  def _check_absorbed(self, slots: np.ndarray) -> None:
    """Keys and values past a position can be written over; a delta net's state can't be taken back.

    So a slot goes on from exactly what its state has seen, or starts anew.
    """
    start = self._written[slots]
    assert np.all((start == self._absorbed[slots]) | (start == 0)), (start, self._absorbed[slots])

  def _book(self, out: Decoded, pending: np.ndarray) -> None:
    if out.routes is not None:
      for slot in np.flatnonzero(out.num_fed):
        self._told.add(int(slot), self._written[slot], out.routes[: out.num_fed[slot], slot])
    forced = np.clip(self._given - self._written, 0, out.num_fed)
    self._written += out.num_fed
    self._absorbed = np.where(out.num_fed > 0, self._written, self._absorbed)
    self.stats.sampled_tokens += int(out.num_drawn.sum())
    self.stats.forced_tokens += int(forced.sum())
    self.stats.decode_steps += int(out.num_steps)
    self.stats.idle_row_steps += int(out.num_steps) * len(pending) - int(out.num_fed.sum())
    for slot in np.flatnonzero(out.num_drawn):
      first, num = pending[slot] - 1, out.num_drawn[slot]
      part = Part(Draw(*(a[first : first + num, slot] for a in out.draws)), self._version)
      known = self._known[slot]
      self._tokens[slot, known : known + num] = part.draws.ids
      self._known[slot] += num
      session = self._holders[slot]
      assert session is not None
      session.parts.append(part)
      if out.stopped[slot] or self._known[slot] >= self._limit[slot]:
        self._finish(session, bool(out.stopped[slot]))

  def _finish(self, session: Session, stopped: bool) -> None:
    request, slot = session.request, session.slot
    assert request is not None and slot is not None
    self._running[slot] = False
    routes = self._told.told(slot, session.untold, int(self._known[slot]) - 1)
    session.tokens = self._tokens[slot, : self._known[slot]].copy()
    session.request = None
    self._idle[session.name] = session
    self._finished.append((request, assemble(request, session.parts, stopped, routes)))
    session.parts = []
