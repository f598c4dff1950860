"""vLLM's own route, from bodies written by hand after what vLLM 0.32 answers."""

import base64
import dataclasses
import io
import json

import numpy as np
import pytest

from mimo.samplers.vllm import stock
from mimo.samplers.vllm.messages import CorruptError
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import FinishReason, SamplingParams, VersionSpan


def _request(*, candidates: int = 2, min_version: int | None = None) -> GenerateRequest:
  params = SamplingParams(0.7, 0.9, 5, candidates, 8, (1, 3))
  return GenerateRequest('name', np.array([5, 6], np.int32), params, 11, min_version, 5.0)


def _entry(drawn: int, *top: tuple[int, float]) -> dict:
  return {
    'token_id': drawn,
    'logprob': dict(top).get(drawn, -9999.0),
    'top_logprobs': [{'token_id': token, 'logprob': logp, 'rank': None} for token, logp in top],
  }


def _body(*entries: dict, finish='length', versions=((7, 0, 2),), routes=None) -> bytes:
  choice = {
    'index': 0,
    'finish_reason': finish,
    'token_ids': [entry['token_id'] for entry in entries],
    'weight_versions': [{'version': str(v), 'start': s, 'end': e} for v, s, e in versions],
    'logprobs': {'content': list(entries)},
    'routed_experts': routes,
  }
  return json.dumps({'choices': [choice]}).encode()


HALF, QUARTER = float(np.log(0.5)), float(np.log(0.25))


def test_a_request_says_everything() -> None:
  body = json.loads(stock.encode(_request()))
  assert (body['token_ids'], body['request_id'], body['stream']) == ([5, 6], 'name', False)
  sampling = body['sampling_params']
  assert (sampling['temperature'], sampling['top_p'], sampling['top_k']) == (0.7, 0.9, 5)
  assert (sampling['max_tokens'], sampling['stop_token_ids']) == (8, [1, 3])
  assert (sampling['logprobs'], sampling['seed'], sampling['ignore_eos']) == (3, 11, True)


def test_candidates_are_the_most_likely_and_what_was_excluded_is_left_out() -> None:
  """A whole support of two; then one that the cap cuts, and the drawn token is outside of it."""
  sample = stock.decode(
    _body(
      _entry(9, (9, HALF), (4, HALF), (8, -9999.0)),
      # The route names the drawn token first, whatever its rank.
      _entry(6, (6, float(np.log(0.05))), (4, HALF), (8, QUARTER)),
    ),
    _request(),
  )
  assert sample.tokens.tolist() == [9, 6]
  np.testing.assert_allclose(sample.logps, np.log([0.5, 0.05]), rtol=1e-6)
  assert set(sample.candidates.row(0)[0].tolist()) == {9, 4}
  assert sample.candidates.row(1)[0].tolist() == [4, 8]
  np.testing.assert_allclose(sample.candidates.row(1)[1], np.log([0.5, 0.25]), rtol=1e-6)
  assert sample.full_support.tolist() == [True, False]
  assert sample.finish is FinishReason.LENGTH
  assert sample.spans == (VersionSpan(0, 2, 7),)


def test_rows_of_unlike_length() -> None:
  """The drawn token is among the most likely of one row, and beside them in the other."""
  sample = stock.decode(
    _body(
      _entry(9, (9, HALF), (4, QUARTER)),
      _entry(6, (6, HALF), (4, QUARTER), (8, float(np.log(0.2)))),
    ),
    _request(),
  )
  assert np.diff(sample.candidates.offsets).tolist() == [2, 2]


def test_versions_are_numbers_and_an_older_one_is_refused() -> None:
  body = _body(_entry(9, (9, 0.0)), _entry(9, (9, 0.0)), versions=((6, 0, 1), (7, 1, 2)))
  spans = (VersionSpan(0, 1, 6), VersionSpan(1, 2, 7))
  assert stock.decode(body, _request(min_version=6)).spans == spans
  with pytest.raises(CorruptError, match='version 6 drew it; expected at least 7'):
    stock.decode(body, _request(min_version=7))


@pytest.mark.parametrize(
  'body',
  [
    b'not json',
    b'{}',
    b'{"choices": []}',
    _body(_entry(9, (9, 0.0)), finish='error'),
    # No log-prob of the drawn token: vLLM then says -9999.
    _body(_entry(9, (4, HALF))),
  ],
)
def test_what_contradicts_itself_is_corrupt(body: bytes) -> None:
  with pytest.raises(CorruptError):
    stock.decode(body, _request())


def test_routes_where_they_are_asked_for() -> None:
  """A prompt of two and two drawn: three were run, and of the first an earlier turn told."""
  request = dataclasses.replace(_request(), routes_from=1)
  stated = json.loads(stock.encode(request))['sampling_params']
  assert stated['routed_experts_prompt_start'] == 1
  assert (
    'routed_experts_prompt_start' not in json.loads(stock.encode(_request()))['sampling_params']
  )
  entries = (_entry(9, (9, HALF), (4, HALF)),) * 2
  file = io.BytesIO()
  np.save(file, np.array([[[3, 200]], [[1, 0]]], np.uint8))
  told = base64.b64encode(file.getvalue()).decode()
  sample = stock.decode(_body(*entries, routes=told), request)
  assert sample.routes is not None and sample.routes.start == 1
  assert sample.routes.ids.tolist() == [[[3, 200]], [[1, 0]]]
  assert stock.decode(_body(*entries, routes=told), _request()).routes is None
  with pytest.raises(CorruptError, match=r'routes are missing; expected those of tokens \[1, 3\)'):
    stock.decode(_body(*entries), request)
