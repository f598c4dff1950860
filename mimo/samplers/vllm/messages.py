"""What client and server of the `vllm` sampler say in JSON, and how either says it failed.

Bodies are strict: a key that is missing, or a value that cannot be what it should, raises.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mimo.types import RouteShape, Version

PROTOCOL = 2

# Under a prefix that vLLM's --api-key guards.
GENERATE_PATH = '/inference/mimo/generate'
ACTIVATE_PATH = '/inference/mimo/activate'
STATUS_PATH = '/inference/mimo/status'

_T = TypeVar('_T')


class WireError(ValueError):
  """Bytes that are not what the protocol says."""


class TruncatedError(WireError):
  """The bytes end before their message does."""


class CorruptError(WireError):
  """A checksum, a length or a value does not fit."""


class Outcome(enum.StrEnum):
  """Why a server did not do what it was asked."""

  STALE = 'stale'  # it serves an older version than the request's minimum
  NOT_READY = 'not_ready'  # no version is activated yet
  BAD_REQUEST = 'bad_request'
  TOO_LONG = 'too_long'  # the prompt leaves no room for a token
  ABORTED = 'aborted'  # the engine gave the request up
  ENGINE_DEAD = 'engine_dead'
  INTERNAL = 'internal'
  NOT_ACTIVATED = 'not_activated'  # the version that was served before still is
  BROKEN = 'broken'  # weights are in an unknown state: nothing is served until an activation

  @property
  def status(self) -> int:
    """The HTTP status, where no frame has been sent yet."""
    return _STATUSES[self]


_STATUSES = {
  Outcome.STALE: 409,
  Outcome.NOT_READY: 503,
  Outcome.BAD_REQUEST: 400,
  Outcome.TOO_LONG: 413,
  Outcome.ABORTED: 503,
  Outcome.ENGINE_DEAD: 500,
  Outcome.INTERNAL: 500,
  Outcome.NOT_ACTIVATED: 422,
  Outcome.BROKEN: 503,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
  """A failure as a body or a frame.

  Attributes:
    outcome: its name.
    message: one line.
    served: the publication number that the server serves; None where it serves none.
  """

  outcome: Outcome
  message: str
  served: int | None

  def encode(self) -> bytes:
    return json.dumps(dataclasses.asdict(self)).encode()

  @staticmethod
  def decode(body: bytes) -> Failure:
    """Raises CorruptError for what `encode` did not write."""
    return from_json(body, lambda raw: Failure(Outcome(raw['outcome']), *_rest(raw)))


def _rest(raw: Mapping[str, Any]) -> tuple[str, int | None]:
  return str(raw['message']), None if raw['served'] is None else int(raw['served'])


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
  """A version of a view to serve.

  Attributes:
    version: what to stamp.
    directory: the view, as the server sees it.
    format: its weight format.
    files: every file of the view -> (sha256, size in bytes), as its manifest states.
    prefix_cache: 'keep' or 'drop'.
  """

  version: Version
  directory: str
  format: str
  files: Mapping[str, tuple[str, int]]
  prefix_cache: str

  def encode(self) -> bytes:
    return json.dumps({'protocol': PROTOCOL, **dataclasses.asdict(self)}).encode()

  @staticmethod
  def decode(body: bytes) -> Activation:
    """Raises CorruptError for what `encode` did not write."""
    return from_json(body, _activation)


def _activation(raw: Mapping[str, Any]) -> Activation:
  check_protocol(raw)
  if raw['prefix_cache'] not in ('keep', 'drop'):
    raise CorruptError(f"prefix_cache is {raw['prefix_cache']!r}; expected 'keep' or 'drop'")
  return Activation(
    version=Version(**raw['version']),
    directory=str(raw['directory']),
    format=str(raw['format']),
    files={name: (str(sha256), int(size)) for name, (sha256, size) in raw['files'].items()},
    prefix_cache=raw['prefix_cache'],
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
  """What a server says of itself.

  Attributes:
    vllm: its vLLM's version.
    version: the publication that it serves; None before the first activation.
    activating: whether an activation is under way.
    broken: why it serves nothing though it did; None where all is well.
    running: requests that are decoded now.
    waiting: requests that wait for a place.
    tokens: drawn since it started.
    steps: that its engine told of since it started: all that send tokens and, of others, as in
      prefill or in the middle of a block, up to ten a second.
    patches: changes to vLLM that were asked for and made, by name.
    routes: the shape of the routes that turns can tell; None where they can't.
    logprob_mode: vLLM's `logprobs_mode`.
    logits_dtype: the dtype of log-probs and of the sampler's logits.
    kv_cache_dtype: 'bf16', 'fp8' or as vLLM names it.
    vocab_size: V.
    max_tokens: the longest prompt and answer together.
    max_candidates: the largest K that a request may ask for.
    prefix_caching: whether vLLM caches prefixes.
    max_running: how many requests are decoded at a time.
    tested: whether this vLLM's version is one the plugin was tested with.
  """

  vllm: str
  version: Version | None
  activating: bool
  broken: str | None
  running: int
  waiting: int
  tokens: int
  steps: int
  logprob_mode: str
  logits_dtype: str
  kv_cache_dtype: str
  vocab_size: int
  max_tokens: int
  max_candidates: int
  prefix_caching: bool
  max_running: int
  tested: bool
  patches: tuple[str, ...]
  routes: RouteShape | None = None

  def encode(self) -> bytes:
    return json.dumps({'protocol': PROTOCOL, **dataclasses.asdict(self)}).encode()

  @staticmethod
  def decode(body: bytes) -> Status:
    """Raises CorruptError for what `encode` did not write."""
    return from_json(body, _status)


def _status(raw: Mapping[str, Any]) -> Status:
  check_protocol(raw)
  stated = {field.name: raw[field.name] for field in dataclasses.fields(Status)}
  if stated['version'] is not None:
    stated['version'] = Version(**stated['version'])
  stated['patches'] = tuple(stated['patches'])
  if stated['routes'] is not None:
    stated['routes'] = RouteShape(**stated['routes'])
  return Status(**stated)


def check_protocol(raw: Mapping[str, Any]) -> None:
  """Raises CorruptError unless a body is of this protocol."""
  if raw['protocol'] != PROTOCOL:
    raise CorruptError(f'protocol {raw["protocol"]}; expected {PROTOCOL}')


def from_json(body: bytes, build: Callable[[Any], _T]) -> _T:
  """Returns what `build` makes of JSON. Raises CorruptError, also where `build` cannot."""
  try:
    return build(json.loads(body))
  except WireError:
    raise
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise CorruptError(f'{type(error).__name__}: {error}') from None
