"""Records that cross rooms: ragged candidates, versions by token, what is refused."""

import dataclasses

import numpy as np
import pytest

from mimo import types


def _candidates() -> types.Candidates:
  return types.Candidates(
    np.array([0, 2, 2, 5], np.int64),
    np.array([7, 3, 1, 2, 9], np.int32),
    np.log(np.array([0.6, 0.4, 0.5, 0.3, 0.1], np.float32)),
  )


def test_dense_pads_and_from_dense_drops_the_padding() -> None:
  ids, logps = _candidates().dense(4)
  np.testing.assert_array_equal(ids, [[7, 3, -1, -1], [-1, -1, -1, -1], [1, 2, 9, -1]])
  np.testing.assert_allclose(np.exp(logps[2]), [0.5, 0.3, 0.1, 1.0], rtol=1e-6)
  back = types.Candidates.from_dense(ids, logps)
  for field in dataclasses.fields(types.Candidates):
    np.testing.assert_array_equal(getattr(back, field.name), getattr(_candidates(), field.name))


def test_rows_and_concatenation_keep_their_order() -> None:
  both = types.Candidates.concatenate([_candidates(), _candidates()])
  assert len(both) == 6
  np.testing.assert_array_equal(both.row(5)[0], [1, 2, 9])
  np.testing.assert_array_equal(both.row(3)[0], [7, 3])
  assert len(types.Candidates.concatenate([])) == 0


def test_too_many_candidates_are_refused() -> None:
  with pytest.raises(ValueError, match='holds 3 candidates; expected at most 2'):
    _candidates().dense(2)


def test_versions_by_sampled_token() -> None:
  span = types.VersionSpan
  turns = (
    types.Turn(2, 5, types.FinishReason.STOP, (span(2, 3, 4), span(3, 5, 6))),
    types.Turn(7, 8, types.FinishReason.LENGTH, (span(7, 8, 6),)),
  )
  trajectory = types.Trajectory(
    tokens=np.zeros(8, np.int32),
    sampled=np.array([0, 0, 1, 1, 1, 0, 0, 1], bool),
    logps=np.zeros(4, np.float32),
    candidates=types.Candidates.from_dense(np.zeros((4, 1), np.int32), np.zeros((4, 1))),
    full_support=np.zeros(4, bool),
    turns=turns,
    source=types.Source('pool', 'H100', 'bf16', 'bf16'),
    sampling=types.SamplingParams(1.0, 1.0, 0, 1, 4, (0,)),
    logprob_mode='processed',
    prefix_cache='keep',
    end=types.EpisodeEnd.SUBMITTED,
    reward=1.0,
    prompt=types.PromptRef(0, 'train', 0),
    member=0,
    incarnation=0,
  )
  assert trajectory.num_sampled == 4
  np.testing.assert_array_equal(trajectory.versions(), [4, 6, 6, 6])


def test_four_ends_are_scored() -> None:
  scored = {end for end in types.EpisodeEnd if end.scored}
  assert scored == {'submitted', 'turn_limit', 'token_limit', 'malformed'}


@pytest.mark.parametrize(
  ('change', 'word'),
  [
    ({'temperature': -1.0}, 'temperature'),
    ({'temperature': float('nan')}, 'temperature'),
    ({'top_p': 0.0}, 'top_p'),
    ({'top_p': 1.5}, 'top_p'),
    ({'top_k': -1}, 'top_k'),
    ({'candidates': 0}, 'candidates'),
    ({'max_turn_tokens': 0}, 'max_turn_tokens'),
  ],
)
def test_sampling_parameters_refuse(change, word) -> None:
  good = types.SamplingParams(1.0, 0.97, 8, 16, 8, (2,))
  with pytest.raises(ValueError, match=word):
    dataclasses.replace(good, **change)


@pytest.mark.parametrize(
  ('incarnation', 'update', 'starts', 'live'),
  [
    (0, 5, [0], True),
    (0, 3, [0, 3], True),  # the very weights that the second start went on from
    (0, 4, [0, 3], False),
    (1, 3, [0, 3], True),
    (1, 9, [0, 3], True),
    (0, 2, [0, 1, 3], False),  # a later start that went further makes nothing live again
    (0, 2, [0, 3, 1], False),
    (1, 3, [0, 1, 3], True),
    (1, 4, [0, 1, 3], False),
    (1, 0, [0], False),  # of a start that this history does not have
  ],
)
def test_a_version_is_live_up_to_where_every_later_start_went_back(
  incarnation, update, starts, live
):
  assert types.Version(7, incarnation, update).is_live(starts) is live
