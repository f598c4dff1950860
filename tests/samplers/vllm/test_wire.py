import struct
import zlib

import numpy as np
import pytest

from mimo.samplers.vllm import wire
from mimo.samplers.vllm.messages import CorruptError, Failure, Outcome, TruncatedError
from mimo.types import Candidates, FinishReason, Routes, SamplingParams, TurnSample, VersionSpan

SAMPLING = SamplingParams(
  temperature=0.7, top_p=0.97, top_k=64, candidates=128, max_turn_tokens=32, stop_ids=(3, 5)
)


def _request() -> wire.GenerateRequest:
  return wire.GenerateRequest(
    request='s-1',
    tokens=np.array([7, 0, 511], np.int32),
    sampling=SAMPLING,
    seed=2**63 - 1,
    min_version=4,
    keep_alive_secs=2.5,
    routes_from=2,
  )


def _sample(tokens: int = 3) -> TurnSample:
  counts = [2, 0, 3][:tokens]
  total = sum(counts)
  return TurnSample(
    tokens=np.array([9, 8, 7], np.int32)[:tokens],
    logps=np.array([-0.1, -2.0, -0.3], np.float32)[:tokens],
    candidates=Candidates(
      np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
      np.arange(10, 10 + total, dtype=np.int32),
      -np.arange(total, dtype=np.float32),
    ),
    full_support=np.array([True, False, True])[:tokens],
    finish=FinishReason.STOP,
    spans=(VersionSpan(0, 1, 3), VersionSpan(1, 3, 4)) if tokens else (),
    routes=Routes(2, np.arange(-1, 19, dtype=np.int16).reshape(5, 2, 2) * 16) if tokens else None,
  )


def _assert_equal(got: TurnSample, expected: TurnSample) -> None:
  np.testing.assert_array_equal(got.tokens, expected.tokens)
  np.testing.assert_array_equal(got.logps, expected.logps)
  np.testing.assert_array_equal(got.candidates.offsets, expected.candidates.offsets)
  np.testing.assert_array_equal(got.candidates.ids, expected.candidates.ids)
  np.testing.assert_array_equal(got.candidates.logps, expected.candidates.logps)
  np.testing.assert_array_equal(got.full_support, expected.full_support)
  assert (got.finish, got.spans) == (expected.finish, expected.spans)
  if expected.routes is None:
    assert got.routes is None
  else:
    assert got.routes.start == expected.routes.start and got.routes.ids.dtype == np.int16
    np.testing.assert_array_equal(got.routes.ids, expected.routes.ids)
  assert got.tokens.dtype == np.int32 and got.logps.dtype == np.float32
  assert got.full_support.dtype == bool and got.candidates.offsets.dtype == np.int64


def test_request_round_trip():
  got = wire.GenerateRequest.decode(_request().encode())
  np.testing.assert_array_equal(got.tokens, [7, 0, 511])
  assert got.tokens.dtype == np.int32
  assert (got.request, got.sampling, got.seed) == ('s-1', SAMPLING, 2**63 - 1)
  assert (got.min_version, got.keep_alive_secs, got.routes_from) == (4, 2.5, 2)


def test_every_cut_and_every_altered_byte_of_a_request_is_found():
  body = _request().encode()
  for cut in range(len(body)):
    with pytest.raises(TruncatedError):
      wire.GenerateRequest.decode(body[:cut])
  with pytest.raises(CorruptError):
    wire.GenerateRequest.decode(body + b'x')
  for at in range(len(body)):
    altered = bytearray(body)
    altered[at] ^= 0x10
    with pytest.raises((CorruptError, TruncatedError)):
      wire.GenerateRequest.decode(bytes(altered))


def test_a_request_that_no_sampler_could_draw_is_corrupt():
  body = _request().encode()
  rest = body[16:].replace(b'"top_p": 0.97', b'"top_p": 9.97')
  head = struct.pack('<4sIII', b'mimo', len(rest) - 12, 3, zlib.crc32(rest))
  with pytest.raises(CorruptError, match=r'top_p is 9.97'):
    wire.GenerateRequest.decode(head + rest)


@pytest.mark.parametrize('tokens', [0, 3])
def test_result_round_trip_byte_by_byte(tokens):
  frame = wire.encode_keep_alive(5) + wire.encode_result(_sample(tokens))
  reader = wire.FrameReader()
  messages = [m for i in range(len(frame)) for m in reader.feed(frame[i : i + 1])]
  reader.finish()
  assert messages[0] == wire.KeepAlive(5)
  _assert_equal(messages[1], _sample(tokens))
  assert len(messages) == 2


def test_failure_after_keep_alives():
  failure = Failure(Outcome.ABORTED, 'the engine gave up', 7)
  reader = wire.FrameReader()
  frames = wire.encode_keep_alive(0) + wire.encode_failure(failure)
  assert reader.feed(frames) == [wire.KeepAlive(0), failure]
  reader.finish()
  with pytest.raises(CorruptError, match='after the end'):
    reader.feed(b'x')


def test_layout_of_a_result():
  # By hand: one token 9 at log-prob -0.5, one candidate 2 at -1.5, whole support, version 6.
  sample = TurnSample(
    tokens=np.array([9], np.int32),
    logps=np.array([-0.5], np.float32),
    candidates=Candidates(
      np.array([0, 1], np.int64), np.array([2], np.int32), np.array([-1.5], np.float32)
    ),
    full_support=np.array([True]),
    finish=FinishReason.LENGTH,
    spans=(VersionSpan(0, 1, 6),),
    routes=Routes(4, np.array([[[3, 258]]], np.int16)),  # of token 4, in the one layer
  )
  payload = struct.pack('<IIIB3xIIHH', 1, 1, 1, 1, 4, 1, 1, 2) + struct.pack('<qqq', 0, 1, 6)
  payload += struct.pack('<ifI', 9, -0.5, 1) + struct.pack('<if', 2, -1.5) + b'\x80'
  payload += b'\x03\x00\x02\x01'
  head = struct.pack('<4sB3xII', b'mimo', 2, len(payload), zlib.crc32(b'\x02' + payload))
  assert wire.encode_result(sample) == head + payload


def test_every_cut_and_every_altered_byte_of_an_answer_is_found():
  frame = wire.encode_result(_sample())
  for cut in range(len(frame)):
    reader = wire.FrameReader()
    assert reader.feed(frame[:cut]) == []
    with pytest.raises(TruncatedError):
      reader.finish()
  for at in range(len(frame)):
    if 5 <= at < 8:
      continue  # padding
    altered = bytearray(frame)
    altered[at] ^= 0x04
    reader = wire.FrameReader()
    with pytest.raises((CorruptError, TruncatedError)):
      reader.feed(bytes(altered))
      reader.finish()


def test_a_payload_that_contradicts_itself_is_corrupt():
  payload = bytearray(wire.encode_result(_sample())[16:])
  for cut in range(len(payload)):
    with pytest.raises(TruncatedError):
      wire.decode_result(bytes(payload[:cut]))
  with pytest.raises(CorruptError):
    wire.decode_result(bytes(payload) + b'x')
  spans = bytearray(payload)
  spans[28 + 24] = 2  # the second span starts at 2, after a first that ends at 1
  with pytest.raises(CorruptError, match='do not cover'):
    wire.decode_result(bytes(spans))
  finish = bytearray(payload)
  finish[12] = 9
  with pytest.raises(CorruptError, match='finish reason 9'):
    wire.decode_result(bytes(finish))
  counts = bytearray(payload)
  counts[28 + 48 + 24] = 3
  with pytest.raises(CorruptError, match='rows of 6 candidates in all; expected 5'):
    wire.decode_result(bytes(counts))
