import dataclasses

import numpy as np
import pytest

from mimo.rollouts import contract
from mimo.samplers.base import SamplerError
from mimo.types import (
  Candidates,
  FinishReason,
  Routes,
  RouteShape,
  SamplingParams,
  TurnSample,
  VersionSpan,
)

PARAMS = SamplingParams(
  temperature=1.0, top_p=1.0, top_k=0, candidates=3, max_turn_tokens=4, stop_ids=(1, 9)
)
# Three tokens: a whole support of two, a head that holds the token, a head that does not.
TOKENS = np.array([5, 6, 1], np.int32)
LOGPS = np.log(np.array([0.25, 0.5, 0.01], np.float32))
IDS = np.array([4, 5, 6, 7, 8, 2, 3, 4], np.int32)
CANDIDATES = Candidates(
  np.array([0, 2, 5, 8]), IDS, np.log(np.array([0.75, 0.25, 0.5, 0.2, 0.1, 0.3, 0.3, 0.3], 'f4'))
)
FULL = np.array([True, False, False])
TURN = TurnSample(
  tokens=TOKENS,
  logps=LOGPS,
  candidates=CANDIDATES,
  full_support=FULL,
  finish=FinishReason.STOP,
  spans=(VersionSpan(0, 1, 3), VersionSpan(1, 3, 4)),
)


def _streams(tokens=TOKENS, logps=LOGPS, candidates=CANDIDATES, full=FULL):
  contract.check_streams(tokens, logps, candidates, full, vocab_size=10, max_candidates=3)


def test_a_good_turn_passes():
  contract.check_turn(TURN, PARAMS)
  _streams()
  none = Candidates.concatenate([])
  _streams(TOKENS[:0], LOGPS[:0], none, FULL[:0])


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'tokens': TOKENS[:0]}, 'a turn of 0 tokens; expected 1 to 4'),
    ({'tokens': np.zeros(5, np.int32)}, 'a turn of 5 tokens'),
    ({'logps': LOGPS[:2]}, 'logps of 2 tokens; expected 3'),
    ({'candidates': Candidates.concatenate([])}, 'candidates of 0 tokens'),
    ({'full_support': FULL[1:]}, 'full_support of 2 tokens'),
    ({'tokens': np.array([5, 9, 1], np.int32)}, 'tokens follow a stop id'),
    ({'tokens': np.array([5, 6, 7], np.int32)}, "finish is 'stop' and the last token is 7"),
    ({'finish': FinishReason.LENGTH}, "finish is 'length' and the last token is 1"),
    ({'spans': ()}, 'version spans cover 0 tokens; expected 3'),
    ({'spans': (VersionSpan(0, 2, 3),)}, 'version spans cover 2 tokens'),
    ({'spans': (VersionSpan(0, 1, 3), VersionSpan(2, 3, 3))}, r'span \[2, 3\) follows 1'),
    ({'spans': (VersionSpan(0, 3, 3), VersionSpan(3, 3, 4))}, r'span \[3, 3\) follows 3'),
  ],
)
def test_a_turn_that_would_mix_up_the_streams_is_refused(change, message):
  with pytest.raises(SamplerError, match=message):
    contract.check_turn(dataclasses.replace(TURN, **change), PARAMS)


def test_an_aborted_turn_may_end_anywhere():
  for last in (7, 1):
    tokens = np.array([5, 6, last], np.int32)
    turn = dataclasses.replace(TURN, tokens=tokens, finish=FinishReason.ABORT)
    contract.check_turn(turn, PARAMS)


def _with(array, index, value):
  out = array.copy()
  out[index] = value
  return out


def _candidates(**changes):
  return {'candidates': dataclasses.replace(CANDIDATES, **changes)}


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'tokens': _with(TOKENS, 1, 10)}, r'sampled ids run from 1 to 10; expected \[0, 10\)'),
    (_candidates(ids=_with(IDS, 0, -1)), 'candidate ids run from -1 to 8'),
    (_candidates(ids=_with(IDS, 3, 8)), 'a candidate id occurs twice in a row'),
    (_candidates(offsets=np.array([0, 2, 2, 8])), '0 to 6 candidates a token; expected 1 to 3'),
    (_candidates(offsets=np.array([0, 2, 4, 8])), '2 to 4 candidates a token; expected 1 to 3'),
    (_candidates(offsets=np.array([0, 2, 5, 7])), 'offsets run from 0 to 7 over 8 ids'),
    # vLLM's two ways to list what lies outside the nucleus.
    (_candidates(logps=_with(CANDIDATES.logps, 7, -9999.0)), 'candidate log-probs run from -9999'),
    (_candidates(logps=_with(CANDIDATES.logps, 7, -np.inf)), 'candidate log-probs run from -inf'),
    (_candidates(logps=_with(CANDIDATES.logps, 7, np.nan)), 'candidate log-probs run from nan'),
    ({'logps': _with(LOGPS, 2, -np.inf)}, 'sampled log-probs run from -inf'),
    ({'logps': _with(LOGPS, 2, 0.1)}, 'sampled log-probs run from .* to 0.1'),
    ({'logps': _with(LOGPS, 1, LOGPS[1] - 0.01)}, "nats off its candidate's"),
    ({'tokens': _with(TOKENS, 0, 3)}, 'a whole support lacks the sampled id'),
    ({'full': np.array([True, True, False])}, 'a whole support holds a mass of 0.8'),
    (_candidates(logps=np.log(_with(np.exp(CANDIDATES.logps), 5, 0.5))), 'a mass of 1.1'),
  ],
)
def test_streams_that_are_no_record_of_a_distribution_are_refused(change, message):
  with pytest.raises(SamplerError, match=message):
    _streams(**change)


# Tokens 3 and 4 of a model of two layers; nothing is known of the second layer of token 4.
SHAPE = RouteShape(layers=2, experts=5, per_token=2)
ROUTES = Routes(3, np.array([[[0, 4], [2, 1]], [[3, 1], [-1, -1]]], np.int16))


def _routes(*changes):
  ids = ROUTES.ids.copy()
  for where, value in changes:
    ids[where] = value
  return Routes(3, ids)


def test_good_routes_pass():
  contract.check_routes(ROUTES, SHAPE, start=3, end=5)
  contract.check_routes(Routes(3, ROUTES.ids[:0]), SHAPE, start=3, end=3)
  contract.check_routes(None, None, start=3, end=5)


@pytest.mark.parametrize(
  ('routes', 'message'),
  [
    (None, r'routes are missing; expected those of RouteShape\(layers=2, experts=5, per_token=2\)'),
    (Routes(2, ROUTES.ids), r'routes of tokens \[2, 4\); expected \[3, 5\)'),
    (Routes(4, ROUTES.ids), r'routes of tokens \[4, 6\); expected \[3, 5\)'),
    (Routes(3, ROUTES.ids[:1]), r'routes of tokens \[3, 4\); expected \[3, 5\)'),
    (Routes(3, ROUTES.ids[:, :1]), r'int16 \[2, 1, 2\]; expected int16 \[2, 2, 2\]'),
    (Routes(3, ROUTES.ids[..., :1]), r'int16 \[2, 2, 1\]; expected int16 \[2, 2, 2\]'),
    (Routes(3, ROUTES.ids.astype(np.int32)), r'routes are int32 \[2, 2, 2\]; expected int16'),
    (_routes(((0, 1, 0), 5)), r'routes run from -1 to 5; expected \[0, 5\)'),
    (_routes(((0, 1, 0), -2)), r'routes run from -2 to 4'),
    (_routes(((1, 0, 1), 3)), r'token 4 goes to experts \[3, 3\] in layer 0; expected distinct'),
    (_routes(((1, 1, 0), 3)), r'token 4 goes to experts \[3, -1\] in layer 1; expected distinct'),
  ],
)
def test_routes_of_other_tokens_or_no_model_are_refused(routes, message):
  with pytest.raises(SamplerError, match=message):
    contract.check_routes(routes, SHAPE, start=3, end=5)


def test_routes_that_are_not_stated_are_refused():
  with pytest.raises(SamplerError, match='routes are told; expected none, as the sampler states'):
    contract.check_routes(ROUTES, None, start=3, end=5)
