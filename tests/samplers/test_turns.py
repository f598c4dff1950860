import numpy as np
import pytest

from mimo.samplers.base import SamplerError
from mimo.samplers.draw import Draw
from mimo.samplers.turns import Part, TurnRequest, assemble
from mimo.types import FinishReason, VersionSpan


@pytest.fixture
def request_(sampling):
  return TurnRequest('s', np.zeros(3, np.int32), sampling(), np.zeros(2, np.uint32))


def part(ids, logps, candidate_ids, candidate_logps, version):
  return Part(
    Draw(
      np.array(ids, np.int32),
      np.array(logps, np.float32),
      np.array(candidate_ids, np.int32),
      np.array(candidate_logps, np.float32),
      np.array([len(c) > 1 for c in candidate_ids]),
    ),
    version,
  )


def test_parts_are_joined_in_order(request_):
  parts = [
    part([5], [-1.0], [[5, 6]], [[-1.0, -2.0]], 2),
    part([7, 8], [-3.0, -4.0], [[7, -1], [9, 8]], [[-3.0, 0.0], [-0.1, -4.0]], 2),
    part([1], [-5.0], [[1, -1]], [[-5.0, 0.0]], 4),
  ]
  turn = assemble(request_, parts, stopped=True)
  assert turn.tokens.tolist() == [5, 7, 8, 1] and turn.tokens.dtype == np.int32
  assert turn.logps.tolist() == [-1.0, -3.0, -4.0, -5.0] and turn.logps.dtype == np.float32
  assert [turn.candidates.row(s)[0].tolist() for s in range(4)] == [[5, 6], [7], [9, 8], [1]]
  assert turn.candidates.row(2)[1].tolist() == pytest.approx([-0.1, -4.0])
  assert turn.spans == (VersionSpan(0, 3, 2), VersionSpan(3, 4, 4))
  assert turn.finish is FinishReason.STOP
  assert assemble(request_, parts, stopped=False).finish is FinishReason.LENGTH


@pytest.mark.parametrize('bad', [np.nan, -np.inf])
def test_a_log_prob_that_is_not_finite_is_an_error(request_, bad):
  parts = [
    part([5], [-1.0], [[5]], [[-1.0]], 2),
    part([6, 7], [-1.0, bad], [[6], [7]], [[-1.0], [-1.0]], 3),
  ]
  error = assemble(request_, parts, stopped=False)
  assert isinstance(error, SamplerError)
  assert str(error) == f'session s: the log-prob of token 2 of the turn is {bad}, under version 3'
