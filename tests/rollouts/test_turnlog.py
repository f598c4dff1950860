import numpy as np

from mimo.rollouts import turnlog
from mimo.rollouts.freeze import freeze, thaw
from mimo.types import Candidates, FinishReason, Routes, TurnSample, VersionSpan


def _sample(routes):
  return TurnSample(
    tokens=np.array([5, 1], np.int32),
    logps=np.array([-0.5, -0.25], np.float32),
    candidates=Candidates(np.array([0, 1, 2]), np.array([5, 1]), np.array([-0.5, -0.25], 'f4')),
    full_support=np.array([False, True]),
    finish=FinishReason.STOP,
    spans=(VersionSpan(0, 1, 3), VersionSpan(1, 2, 4)),
    routes=routes,
  )


def test_answers_come_back_as_they_were():
  ids = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
  for routes in (None, Routes(4, ids)):
    log = turnlog.TurnLog()
    log.attempt('2/0/1', 1)
    log.answer('2/0/1', _sample(routes))
    back = turnlog.TurnLog()
    back.restore(thaw(freeze(log.state())))
    (got,) = back.attempt('2/0/1', 0).answers
    assert got.tokens.tolist() == [5, 1] and got.spans == _sample(None).spans
    if routes is None:
      assert got.routes is None
    else:
      assert got.routes.start == 4 and got.routes.ids.dtype == np.int16
      np.testing.assert_array_equal(got.routes.ids, ids)
