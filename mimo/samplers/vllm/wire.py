"""The protocol between the `vllm` sampler and the plugin inside its server.

    POST GENERATE_PATH   a packed request; answers with frames, or with a failure and its status
    POST ACTIVATE_PATH   JSON of an `Activation`; answers {'version': n, ...} or a failure
    GET  STATUS_PATH     JSON of a `Status`

A request is magic, header length and checksum, a JSON header and the prompt's ids. An answer is a
stream of frames: any number of keep-alives, then one result or one failure. Whatever is cut short
or altered raises; nothing is guessed. Numbers are little-endian, arrays are laid end to end, and
nothing here knows HTTP or vLLM.

    frame   = 'mimo' kind:u8 0:u8[3] length:u32 crc32(kind, payload):u32 payload
    result  = S:u32 C:u32 spans:u32 finish:u8 0:u8[3] start:u32 N:u32 L:u16 k:u16
              spans:i64[spans, 3] ids:i32[S] logps:f32[S] counts:u32[S] candidate_ids:i32[C]
              candidate_logps:f32[C] full_support:bits[S] routes:i16[N, L, k]

Routes are of N tokens from `start` of the prompt on; L is 0 where there are none.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mimo.samplers.vllm.messages import (
  PROTOCOL,
  CorruptError,
  Failure,
  TruncatedError,
  check_protocol,
  from_json,
)
from mimo.types import Candidates, FinishReason, Routes, SamplingParams, TurnSample, VersionSpan

REQUEST_TYPE = 'application/x-mimo-request'
FRAMES_TYPE = 'application/x-mimo-frames'

_MAGIC = b'mimo'
_REQUEST = struct.Struct('<4sIII')  # magic, header bytes, number of ids, crc32 of the rest
_FRAME = struct.Struct('<4sB3xII')  # magic, kind, payload bytes, crc32 of kind and payload
_RESULT = struct.Struct('<IIIB3xIIHH')
_KEEP_ALIVE = struct.Struct('<I')
_MAX_PAYLOAD_BYTES = 1 << 30
_NO_ROUTES = Routes(0, np.zeros((0, 0, 0), np.int16))
_FINISHES = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GenerateRequest:
  """One turn to draw.

  Attributes:
    request: a name that no other request in flight has.
    tokens: [T] int32, the prompt.
    sampling: how to draw.
    seed: of this request's random numbers, in [0, 2**63); None leaves it to the server.
    min_version: the oldest publication number that may serve it; None takes any.
    keep_alive_secs: how long the answer may be silent.
    routes_from: the first token whose routes the answer is to tell; None for no routes.
  """

  request: str
  tokens: np.ndarray
  sampling: SamplingParams
  seed: int | None
  min_version: int | None
  keep_alive_secs: float
  routes_from: int | None = None

  def encode(self) -> bytes:
    sampling = dataclasses.asdict(self.sampling)
    names = ('request', 'seed', 'min_version', 'keep_alive_secs', 'routes_from')
    fields = {name: getattr(self, name) for name in names}
    header = json.dumps({'protocol': PROTOCOL, 'sampling': sampling, **fields}).encode()
    rest = header + np.ascontiguousarray(self.tokens, '<i4').tobytes()
    return _REQUEST.pack(_MAGIC, len(header), len(self.tokens), zlib.crc32(rest)) + rest

  @staticmethod
  def decode(body: bytes) -> GenerateRequest:
    """Raises TruncatedError or CorruptError."""
    if len(body) < _REQUEST.size:
      raise TruncatedError(f'a request of {len(body)} bytes; expected at least {_REQUEST.size}')
    magic, header_bytes, count, checksum = _REQUEST.unpack_from(body)
    if magic != _MAGIC:
      raise CorruptError(f'a request starts with {magic!r}; expected {_MAGIC!r}')
    rest = memoryview(body)[_REQUEST.size :]
    _expect_size('a request', len(rest), header_bytes + 4 * count)
    if zlib.crc32(rest) != checksum:
      raise CorruptError('the checksum of a request does not fit')
    tokens = np.frombuffer(rest, '<i4', count, header_bytes)
    return from_json(bytes(rest[:header_bytes]), lambda raw: _request(raw, tokens))


def _request(raw: Mapping[str, Any], tokens: np.ndarray) -> GenerateRequest:
  check_protocol(raw)
  stated = dict(raw['sampling'])
  stated['stop_ids'] = tuple(stated['stop_ids'])
  return GenerateRequest(
    request=str(raw['request']),
    tokens=tokens,
    sampling=SamplingParams(**stated),
    seed=raw['seed'],
    min_version=raw['min_version'],
    keep_alive_secs=float(raw['keep_alive_secs']),
    routes_from=raw['routes_from'],
  )


class FrameKind(enum.IntEnum):
  """What a frame's payload is."""

  KEEP_ALIVE = 1  # drawn tokens of the turn so far: u32
  RESULT = 2
  FAILURE = 3


@dataclasses.dataclass(frozen=True, slots=True)
class KeepAlive:
  """The turn is alive.

  Attributes:
    tokens: drawn so far, as far as the server knows.
  """

  tokens: int


def encode_keep_alive(tokens: int) -> bytes:
  """Returns the frame of a `KeepAlive`."""
  return _frame(FrameKind.KEEP_ALIVE, _KEEP_ALIVE.pack(tokens))


def encode_failure(failure: Failure) -> bytes:
  """Returns the frame of a failure after keep-alives."""
  return _frame(FrameKind.FAILURE, failure.encode())


def encode_result(sample: TurnSample) -> bytes:
  """Returns the frame of a turn."""
  spans = np.array([[s.start, s.end, s.version] for s in sample.spans], '<i8').reshape(-1, 3)
  counts = np.diff(sample.candidates.offsets).astype('<u4')
  routes = sample.routes or _NO_ROUTES
  head = _RESULT.pack(
    len(sample.tokens),
    len(sample.candidates.ids),
    len(spans),
    _FINISHES.index(sample.finish),
    routes.start,
    *routes.ids.shape,
  )
  arrays = (
    spans,
    sample.tokens.astype('<i4', copy=False),
    sample.logps.astype('<f4', copy=False),
    counts,
    sample.candidates.ids.astype('<i4', copy=False),
    sample.candidates.logps.astype('<f4', copy=False),
    np.packbits(sample.full_support),
    routes.ids.astype('<i2', copy=False),
  )
  return _frame(FrameKind.RESULT, b''.join([head, *(array.tobytes() for array in arrays)]))


class FrameReader:
  """Cuts a stream of bytes into messages. `feed` it what arrives, then `finish` it."""

  def __init__(self) -> None:
    self._buffer = bytearray()
    self._ended = False

  def feed(self, data: bytes) -> list[KeepAlive | TurnSample | Failure]:
    """Returns the messages that these bytes complete.

    Raises CorruptError for what no server sends, bytes after a result or failure among it.
    """
    if self._ended and data:
      raise CorruptError('bytes after the end of an answer')
    self._buffer += data
    messages: list[KeepAlive | TurnSample | Failure] = []
    while len(self._buffer) >= _FRAME.size:
      magic, kind, length, checksum = _FRAME.unpack_from(self._buffer)
      if magic != _MAGIC or length > _MAX_PAYLOAD_BYTES:
        raise CorruptError(f'a frame starts with {magic!r} and {length} bytes')
      if len(self._buffer) < _FRAME.size + length:
        break
      payload = bytes(self._buffer[_FRAME.size : _FRAME.size + length])
      del self._buffer[: _FRAME.size + length]
      if _checksum(kind, payload) != checksum:
        raise CorruptError('the checksum of a frame does not fit')
      messages.append(_message(kind, payload))
      if kind != FrameKind.KEEP_ALIVE:
        self._ended = True
        if self._buffer:
          raise CorruptError('bytes after the end of an answer')
    return messages

  def finish(self) -> None:
    """Raises TruncatedError unless a result or a failure has come whole."""
    if not self._ended:
      raise TruncatedError(
        f'the answer ended before its result, with {len(self._buffer)} bytes of an unfinished frame'
      )


def decode_result(payload: bytes) -> TurnSample:
  """Returns the turn that a result frame's payload holds. Its arrays are read-only.

  Raises TruncatedError or CorruptError.
  """
  if len(payload) < _RESULT.size:
    raise TruncatedError(f'a result of {len(payload)} bytes; expected at least {_RESULT.size}')
  num_tokens, num_candidates, num_spans, finish, start, *shape = _RESULT.unpack_from(payload)
  words, pairs = 4 * num_tokens, 4 * num_candidates
  told = 2 * math.prod(shape)
  sizes = (24 * num_spans, words, words, words, pairs, pairs, (num_tokens + 7) // 8, told)
  _expect_size('a result', len(payload), _RESULT.size + sum(sizes))
  starts = np.cumsum([_RESULT.size, *sizes]).tolist()
  dtypes = ('<i8', '<i4', '<f4', '<u4', '<i4', '<f4', 'u1', '<i2')
  spans, tokens, logps, counts, ids, candidate_logps, bits, routes = (
    np.frombuffer(payload, dtype, size // np.dtype(dtype).itemsize, start)
    for dtype, size, start in zip(dtypes, sizes, starts, strict=False)
  )
  offsets = np.zeros(num_tokens + 1, np.int64)
  np.cumsum(counts, out=offsets[1:])
  if finish >= len(_FINISHES):
    raise CorruptError(f'finish reason {finish}; expected less than {len(_FINISHES)}')
  if offsets[-1] != num_candidates:
    raise CorruptError(f'rows of {offsets[-1]} candidates in all; expected {num_candidates}')
  versions = _spans(spans.reshape(-1, 3).tolist(), num_tokens)
  return TurnSample(
    tokens=tokens,
    logps=logps,
    candidates=Candidates(offsets, ids, candidate_logps),
    full_support=np.unpackbits(bits, count=num_tokens).astype(bool),
    finish=_FINISHES[finish],
    spans=versions,
    routes=Routes(start, routes.reshape(shape)) if shape[1] else None,
  )


def _spans(rows: list[list[int]], num_tokens: int) -> tuple[VersionSpan, ...]:
  spans = tuple(VersionSpan(start, end, version) for start, end, version in rows)
  edge = 0
  for span in spans:
    if span.start != edge or span.end <= edge:
      break
    edge = span.end
  else:
    if edge == num_tokens:
      return spans
  raise CorruptError(f'version spans {rows} do not cover [0, {num_tokens})')


def _message(kind: int, payload: bytes) -> KeepAlive | TurnSample | Failure:
  if kind == FrameKind.KEEP_ALIVE:
    _expect_size('a keep-alive', len(payload), _KEEP_ALIVE.size)
    return KeepAlive(*_KEEP_ALIVE.unpack(payload))
  if kind == FrameKind.RESULT:
    return decode_result(payload)
  if kind == FrameKind.FAILURE:
    return Failure.decode(payload)
  raise CorruptError(f'a frame of kind {kind}; expected one of {[k.value for k in FrameKind]}')


def _frame(kind: FrameKind, payload: bytes) -> bytes:
  return _FRAME.pack(_MAGIC, kind, len(payload), _checksum(kind, payload)) + payload


def _checksum(kind: int, payload: bytes) -> int:
  return zlib.crc32(payload, zlib.crc32(bytes([kind])))


def _expect_size(what: str, got: int, expected: int) -> None:
  if got < expected:
    raise TruncatedError(f'{what} of {got} bytes; expected {expected}')
  if got > expected:
    raise CorruptError(f'{what} of {got} bytes; expected {expected}')
