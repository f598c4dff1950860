"""Packing loses, shifts and invents nothing."""

import dataclasses

import numpy as np
import pytest

from mimo import types
from mimo.trainer import packing

K = 3
SOURCES = ('a', 'b')
BUCKETS = (packing.Bucket(tokens=12, trained=6, rows=2),)


def trajectory(
  mask: str, *, first: int = 1, pool: str = 'a', counts: tuple[int, ...] | None = None
) -> types.Trajectory:
  """One token per letter of `mask`, 's' sampled. Every stream counts up from `first`."""
  tokens = first + np.arange(len(mask), dtype=np.int32)
  sampled = np.array([letter == 's' for letter in mask])
  size = int(sampled.sum())
  counts = tuple(1 + s % K for s in range(size)) if counts is None else counts
  offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
  candidates = types.Candidates(
    offsets,
    (1000 * first + np.arange(offsets[-1])).astype(np.int32),
    -(1000.0 * first + np.arange(offsets[-1])).astype(np.float32),
  )
  return types.Trajectory(
    tokens=tokens,
    sampled=sampled,
    logps=-tokens[sampled].astype(np.float32) / 1000,
    candidates=candidates,
    full_support=tokens[sampled] % 2 == 0,
    turns=(),
    source=types.Source(pool, 'H100', 'bf16', 'bf16'),
    sampling=types.SamplingParams(1.0, 1.0, 0, K, 99, ()),
    logprob_mode='processed',
    prefix_cache='keep',
    end=types.EpisodeEnd.SUBMITTED,
    reward=1.0,
    prompt=types.PromptRef(first, 'train', 0),
    member=0,
    incarnation=0,
  )


def pack(trajectories, advantages=None, buckets=BUCKETS, num_candidates=K, temperature=1.0):
  return packing.pack(
    trajectories,
    np.zeros(len(trajectories)) if advantages is None else advantages,
    buckets=buckets,
    num_candidates=num_candidates,
    sources=SOURCES,
    temperature=temperature,
  )


def test_one_row_by_hand():
  batch = pack([trajectory('pspss', first=5), trajectory('ps', first=50, pool='b')], [2.0, -1.0])
  (micro,) = batch.micro
  np.testing.assert_array_equal(micro.tokens[0], [5, 6, 7, 8, 9, 50, 51, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(micro.segment_ids[0], [1, 1, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(micro.positions[0], [0, 1, 2, 3, 4, 0, 1, 0, 0, 0, 0, 0])
  np.testing.assert_array_equal(micro.predict[0], [0, 2, 3, 5, 0, 0])
  np.testing.assert_array_equal(micro.targets[0], [6, 8, 9, 51, 0, 0])
  np.testing.assert_array_equal(micro.mask[0], [1, 1, 1, 1, 0, 0])
  np.testing.assert_array_equal(
    micro.logp_sampler[0], np.float32([-0.006, -0.008, -0.009, -0.051, 0, 0])
  )
  np.testing.assert_array_equal(
    micro.candidate_ids[0],
    [[5000, -1, -1], [5001, 5002, -1], [5003, 5004, 5005], [50000, -1, -1]] + 2 * [[-1, -1, -1]],
  )
  np.testing.assert_array_equal(micro.candidate_logps[0, 2], [-5003, -5004, -5005])
  np.testing.assert_array_equal(micro.full_support[0], [1, 1, 0, 0, 0, 0])
  np.testing.assert_array_equal(micro.adv[0], [2, 2, 2, -1, 0, 0])
  np.testing.assert_array_equal(micro.source[0], [0, 0, 0, 1, 0, 0])
  assert not micro.mask[1].any() and not micro.segment_ids[1].any()
  assert (batch.trained, batch.tokens, batch.capacity) == (4, 7, 24)
  assert batch.padding_share == pytest.approx(17 / 24)
  assert batch.placements == (packing.Placement(0, 0, 0, 0), packing.Placement(0, 0, 5, 3))


def _follow(batch: packing.Batch, index: int, given: types.Trajectory) -> None:
  """Every value of `given` stands where its placement says, with the token before its target."""
  place = batch.placements[index]
  assert place is not None
  micro = batch.micro[place.micro]
  row = slice(place.token, place.token + len(given.tokens))
  np.testing.assert_array_equal(micro.tokens[place.row, row], given.tokens)
  np.testing.assert_array_equal(micro.positions[place.row, row], np.arange(len(given.tokens)))
  assert len(np.unique(micro.segment_ids[place.row, row])) == 1
  for s, t in enumerate(np.flatnonzero(given.sampled)):
    at = (place.row, place.trained + s)
    assert micro.mask[at]
    assert micro.targets[at] == given.tokens[t]
    assert micro.predict[at] == place.token + t - 1
    assert micro.tokens[place.row, micro.predict[at]] == given.tokens[t - 1]
    assert micro.segment_ids[place.row, micro.predict[at]] == micro.segment_ids[place.row, row][0]
    assert micro.logp_sampler[at] == given.logps[s]
    assert micro.full_support[at] == given.full_support[s]
    ids, logps = given.candidates.row(s)
    np.testing.assert_array_equal(micro.candidate_ids[at][: len(ids)], ids)
    np.testing.assert_array_equal(micro.candidate_ids[at][len(ids) :], -1)
    np.testing.assert_array_equal(micro.candidate_logps[at][: len(ids)], logps)


def test_every_value_survives():
  rng = np.random.default_rng(0)
  given = []
  first = 1
  for index in range(40):
    length = int(rng.integers(2, 13))
    mask = 'p' + ''.join(rng.choice(['p', 's'], length - 1))
    mask = mask if mask.count('s') <= 6 else 'p' * (length - 1) + 's'
    given.append(trajectory(mask, first=first, pool=SOURCES[index % 2]))
    first += length
  adv = rng.normal(size=len(given)).astype(np.float32)
  batch = pack(given, adv)
  assert sum(place is None for place in batch.placements) == sum(
    not item.num_sampled for item in given
  )
  for index, item in enumerate(given):
    if item.num_sampled:
      _follow(batch, index, item)
      place = batch.placements[index]
      micro = batch.micro[place.micro]
      span = slice(place.trained, place.trained + item.num_sampled)
      np.testing.assert_array_equal(micro.adv[place.row, span], adv[index])
      np.testing.assert_array_equal(micro.source[place.row, span], index % 2)
  assert batch.trained == sum(item.num_sampled for item in given)
  for micro in batch.micro:
    assert micro.tokens.shape == (2, 12) and micro.candidate_ids.shape == (2, 6, K)
    # Segments are numbered from 1 without a gap; padding only follows.
    for row in micro.segment_ids:
      used = row[row > 0]
      np.testing.assert_array_equal(np.unique(used), np.arange(1, len(np.unique(used)) + 1))
      assert not row[len(used) :].any()
    assert micro.mask.sum(axis=1).max() <= 6


def test_both_budgets_bind():
  # Four of 3 tokens fill a row of 12; with 2 trained each, three fill its 6 trained places.
  tokens = pack([trajectory('pps', first=10 * i) for i in range(1, 6)])
  assert [place.row for place in tokens.placements] == [0, 0, 0, 0, 1]
  trained = pack([trajectory('pss', first=10 * i) for i in range(1, 6)])
  assert [place.row for place in trained.placements] == [0, 0, 0, 1, 1]


def test_first_fit_decreasing_fills_holes():
  # By hand: 7 and 5 share a row; 6, 4 and 2 the next.
  lengths = [2, 4, 5, 6, 7]
  batch = pack([trajectory('p' * (n - 1) + 's', first=20 * n) for n in lengths])
  assert [place.row for place in batch.placements] == [1, 1, 0, 1, 0]
  assert [place.token for place in batch.placements] == [10, 6, 7, 0, 0]


def test_small_bucket_for_short_and_few_rows_for_the_rest():
  buckets = (
    packing.Bucket(tokens=4, trained=2, rows=4),
    packing.Bucket(tokens=4, trained=2, rows=1),
    packing.Bucket(tokens=12, trained=6, rows=1),
  )
  short = [trajectory('ppps', first=10 * i) for i in range(1, 6)]
  batch = pack([*short, trajectory('p' * 11 + 's', first=200)], buckets=buckets)
  assert [micro.tokens.shape for micro in batch.micro] == [(1, 12), (4, 4), (1, 4)]
  assert batch.padding_share == 0.0
  # A short one goes into a long row's hole before it opens a row of its own.
  batch = pack([short[0], trajectory('p' * 7 + 's', first=200)], buckets=buckets)
  assert [micro.tokens.shape for micro in batch.micro] == [(1, 12)]


def test_order_is_a_function_of_the_arguments():
  given = [trajectory('pps', first=10 * i) for i in range(1, 12)]
  for one, two in zip(pack(given).micro, pack(given).micro, strict=True):
    for left, right in zip(one, two, strict=True):
      np.testing.assert_array_equal(left, right)


def test_zero_advantage_counts_and_nothing_sampled_takes_no_room():
  batch = pack([trajectory('pss', first=1), trajectory('pp', first=9)], [0.0, 1.0])
  assert batch.trained == 2
  assert batch.placements[1] is None
  assert batch.tokens == 3
  empty = pack([trajectory('pp', first=9)])
  assert (empty.micro, empty.trained, empty.padding_share) == ((), 0, 0.0)


def _replace(**changes):
  return dataclasses.replace(trajectory('pss', first=7), **changes)


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    (trajectory('p' * 12 + 's', first=7), 'group 7, member 0: 13 tokens, 1 .* at most 12 and 6'),
    (trajectory('p' + 's' * 7, first=7), '8 tokens, 7 of them trained; expected at most 12 and 6'),
    (trajectory('ps', first=7, counts=(4,)), 'has 4 candidates; expected at most 3'),
    (trajectory('ps', pool='c'), "pool is 'c'; expected one of a, b"),
    (trajectory('sp'), 'first token is sampled; expected a prompt'),
    (_replace(logps=np.zeros(3, np.float32)), '3 logps; expected 2'),
    (_replace(full_support=np.zeros(1, bool)), '1 full_support; expected 2'),
    (_replace(sampled=np.zeros(2, bool)), r'sampled has shape \(2,\); expected \(3,\)'),
    (_replace(logprob_mode='raw'), "log-prob mode is 'raw'; expected 'processed'"),
    (_replace(end=types.EpisodeEnd.WALL_CLOCK), 'ended as wall_clock; expected a scored'),
  ],
)
def test_refused(given, message):
  with pytest.raises(ValueError, match=message):
    pack([given])


def test_refused_arguments():
  good = [trajectory('ps')]
  with pytest.raises(ValueError, match='no buckets'):
    pack(good, buckets=())
  with pytest.raises(ValueError, match=r'shape \(2,\); expected \(1,\)'):
    pack(good, [0.0, 1.0])
  with pytest.raises(ValueError, match='advantage 0 is not finite'):
    pack(good, [np.nan])
  with pytest.raises(ValueError, match=r'sampled at temperature 1.0; expected 0.5'):
    pack(good, temperature=0.5)
  with pytest.raises(ValueError, match='bucket rows is 0; expected at least 1'):
    packing.Bucket(tokens=1, trained=1, rows=0)


SHAPE = types.RouteShape(layers=2, experts=900, per_token=3)


def routed(mask, *, first):
  """Each id is of one token, layer and place; of the last token nothing is known."""
  made = trajectory(mask, first=first)
  ids = np.arange(len(mask) * 6, dtype=np.int16).reshape(len(mask), 2, 3) + 100 * first
  ids[-1] = -1
  return dataclasses.replace(made, routes=ids)


def test_routes_stay_with_the_token_that_took_them():
  """The routes at a trained token's `predict` are those of the token before it."""
  members = [routed('..s.ss', first=1), trajectory('.ss', first=2), routed('.sss.', first=3)]
  batch = packing.pack(
    members,
    np.zeros(3),
    buckets=BUCKETS,
    num_candidates=K,
    sources=SOURCES,
    temperature=1.0,
    routes=SHAPE,
  )
  (micro,) = batch.micro
  assert micro.routes.shape == (2, 12, 2, 3) and micro.routes.dtype == np.int16
  left = micro.routes.copy()
  for member, at in zip(members, batch.placements, strict=True):
    row = slice(at.token, at.token + len(member.tokens))
    ids = np.full((len(member.tokens), 2, 3), -1) if member.routes is None else member.routes
    np.testing.assert_array_equal(micro.routes[at.row, row], ids)
    for m, t in enumerate(np.flatnonzero(member.sampled)):
      index = micro.predict[at.row, at.trained + m]
      np.testing.assert_array_equal(micro.routes[at.row, index], ids[t - 1])
    left[at.row, row] = -1
  assert (left == -1).all()
  assert micro.routes[0, 0].tolist() == [[100, 101, 102], [103, 104, 105]]


def test_routes_are_left_out_unless_asked_for():
  (micro,) = pack([routed('..s', first=1)]).micro
  assert micro.routes is None


@pytest.mark.parametrize(
  ('shape', 'message'),
  [
    (types.RouteShape(3, 900, 3), r'have shape \(3, 2, 3\); expected \(3, 3, 3\)'),
    (types.RouteShape(2, 900, 2), r'have shape \(3, 2, 3\); expected \(3, 2, 2\)'),
    (types.RouteShape(2, 111, 3), 'name expert 111; expected less than 111'),
  ],
)
def test_routes_of_another_model(shape, message):
  with pytest.raises(ValueError, match='group 1, member 0: routes ' + message):
    packing.pack(
      [routed('..s', first=1)],
      [0.0],
      buckets=BUCKETS,
      num_candidates=K,
      sources=SOURCES,
      temperature=1.0,
      routes=shape,
    )
