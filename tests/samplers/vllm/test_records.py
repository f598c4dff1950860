import dataclasses

import numpy as np
import pytest

from mimo.samplers.vllm.records import (
  FlatRecord,
  RecordError,
  requested_logprobs,
  told_routes,
  turn_sample,
)
from mimo.types import FinishReason, VersionSpan

OUT = -np.inf
HTTP_OUT = -9999.0


def _record(tokens, ids, masses, **changes) -> FlatRecord:
  """From probabilities; None is an excluded id in vLLM's flat form, -1 in its HTTP form."""
  logps = [[OUT if m is None else HTTP_OUT if m < 0 else np.log(m) for m in row] for row in masses]
  values = {
    'tokens': np.array(tokens, np.int32),
    'ids': np.array(ids, np.int32),
    'logps': np.array(logps, np.float32),
    'finish': FinishReason.STOP,
    'spans': [(4, 0, len(tokens))],
  }
  return FlatRecord(**(values | changes))


def test_a_nucleus_within_the_cap_is_a_whole_support():
  # K = 3, so vLLM was asked for 4: the drawn id comes again, and two are excluded.
  record = _record([7], [[7, 5, 7, 1, 2]], [[0.25, 0.75, 0.25, None, -1]])
  sample = turn_sample(record, candidates=3)
  ids, logps = sample.candidates.row(0)
  np.testing.assert_array_equal(ids, [5, 7])
  np.testing.assert_allclose(logps, np.log([0.75, 0.25]), rtol=1e-6)
  assert sample.full_support.tolist() == [True]
  np.testing.assert_allclose(sample.logps, [np.log(0.25)], rtol=1e-6)
  assert sample.spans == (VersionSpan(0, 1, 4),)


@pytest.mark.parametrize(
  ('masses', 'whole'),
  [
    ([0.5, 0.5, 0.3, 0.2], False),  # the third is beyond the cap of 2
    ([0.9995, 0.9995, 0.0004, 0.0001], False),  # almost all mass, and yet more exists
    ([0.6, 0.6, 0.4, None], True),  # exactly the cap
    ([0.6, 0.6, 0.39, None], False),  # masses that miss 1
  ],
)
def test_the_entry_beyond_the_cap_tells_whether_it_cut(masses, whole):
  record = _record([3], [[3, 3, 4, 5]], [masses])
  sample = turn_sample(record, candidates=2)
  assert sample.full_support.tolist() == [whole]
  assert sample.candidates.row(0)[0].tolist() == [3, 4]


def test_a_drawn_token_beyond_the_cap_is_no_candidate():
  record = _record([9], [[9, 3, 4, 5]], [[0.1, 0.5, 0.3, 0.1]])
  sample = turn_sample(record, candidates=2)
  assert sample.candidates.row(0)[0].tolist() == [3, 4]
  assert not sample.full_support[0]
  np.testing.assert_allclose(sample.logps, [np.log(0.1)], rtol=1e-6)


def test_a_vocabulary_within_the_cap_is_a_whole_support():
  assert requested_logprobs(4, vocab_size=3) == 3
  record = _record([1], [[1, 0, 1, 2]], [[0.2, 0.7, 0.2, 0.1]])
  assert turn_sample(record, candidates=4).full_support.tolist() == [True]


def test_rows_may_differ_in_length_and_versions():
  record = _record(
    [1, 2],
    [[1, 1, 2, 3], [2, 2, 1, 3]],
    [[1.0, 1.0, None, None], [0.5, 0.5, 0.5, None]],
    spans=[(4, 0, 1), (6, 1, 2)],
  )
  sample = turn_sample(record, candidates=2)
  assert sample.candidates.offsets.tolist() == [0, 1, 3]
  assert sample.spans == (VersionSpan(0, 1, 4), VersionSpan(1, 2, 6))


def test_no_tokens():
  record = _record([], np.zeros((0, 4)), np.zeros((0, 4)), spans=[])
  record = dataclasses.replace(record, logps=np.zeros((0, 4), np.float32))
  assert len(turn_sample(record, candidates=3).candidates) == 0


@pytest.mark.parametrize(
  ('record', 'message'),
  [
    (_record([8], [[7, 7]], [[1.0, 1.0]]), 'other tokens'),
    (_record([7], [[7, 6]], [[None, 1.0]]), 'probability 0'),
    (_record([7], [[7, 7]], [[np.nan, 1.0]]), 'NaN'),
    (_record([7], [[7, 7]], [[1.5, 1.5]]), 'above 0'),
    (_record([7, 7], [[7, 7]], [[1.0, 1.0]]), '2 tokens with log-probs'),
  ],
)
def test_contradictions_are_refused(record, message):
  with pytest.raises(RecordError, match=message):
    turn_sample(record, candidates=1)


@pytest.mark.parametrize(
  ('kept', 'message'),
  [
    ([[5, 7]], None),
    ([[5, 7, 8]], 'token 0: 2 candidates of a kept set of 3; expected all'),
    ([[7, 8]], r'candidates \[5\] are not kept'),
    ([[5, 7], [1]], 'a sampling mask of 2 tokens; expected 1'),
  ],
)
def test_a_sampling_mask_is_checked_against_the_candidates(kept, message):
  record = _record([7], [[7, 5, 7, 1]], [[0.25, 0.75, 0.25, None]], kept=kept)
  if message is None:
    assert turn_sample(record, candidates=2).full_support.tolist() == [True]
  else:
    with pytest.raises(RecordError, match=message):
      turn_sample(record, candidates=2)


def test_a_mask_that_the_cap_cut_is_a_head():
  record = _record([7], [[7, 5, 7, 1]], [[0.2, 0.7, 0.2, 0.1]], kept=[[1, 5, 7]])
  assert turn_sample(record, candidates=2).full_support.tolist() == [False]
  with pytest.raises(RecordError, match='expected fewer'):
    turn_sample(dataclasses.replace(record, kept=[[5, 7]]), candidates=2)


def test_routes_of_whatever_dtype():
  for dtype in (np.uint8, np.uint16):
    routes = told_routes(np.array([[[200, 3]], [[0, 255]]], dtype), start=4, end=6)
    assert routes.start == 4 and routes.ids.dtype == np.int16
    assert routes.ids.tolist() == [[[200, 3]], [[0, 255]]]
  record = _record([7], [[7, 7]], [[1.0, 1.0]], routes=routes)
  assert turn_sample(record, candidates=1).routes is routes


@pytest.mark.parametrize(
  ('ids', 'message'),
  [
    (None, r'routes are missing; expected those of tokens \[4, 6\)'),
    (np.zeros((3, 1, 2), np.uint8), r'have shape \(3, 1, 2\); expected those of tokens \[4, 6\)'),
    (np.zeros((2, 2), np.uint8), r'have shape \(2, 2\)'),
  ],
)
def test_routes_of_other_tokens(ids, message):
  with pytest.raises(RecordError, match=message):
    told_routes(ids, start=4, end=6)
