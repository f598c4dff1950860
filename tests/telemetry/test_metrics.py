import math

import numpy as np
import pytest

from mimo import types
from mimo.telemetry import metrics


def _trajectory(*, pool='a', lengths=(2,), versions=((5,),), reward=1.0, end='submitted'):
  """One turn per entry of `lengths`, its tokens split evenly among its versions."""
  tokens, turns, at = 0, [], 3
  for length, numbers in zip(lengths, versions, strict=True):
    cuts = np.linspace(at, at + length, len(numbers) + 1).astype(int)
    spans = tuple(
      types.VersionSpan(int(s), int(e), n)
      for s, e, n in zip(cuts[:-1], cuts[1:], numbers, strict=True)
    )
    turns.append(types.Turn(at, at + length, types.FinishReason.STOP, spans))
    at, tokens = at + length + 1, tokens + length
  return types.Trajectory(
    tokens=np.zeros(at, np.int32),
    sampled=np.zeros(at, bool),
    logps=np.zeros(tokens, np.float32),
    candidates=types.Candidates.concatenate([]),
    full_support=np.zeros(tokens, bool),
    turns=tuple(turns),
    source=types.Source(pool, 'h100', 'bf16', 'bf16'),
    sampling=types.SamplingParams(1.0, 1.0, 0, 4, 8, (1,)),
    logprob_mode='processed',
    prefix_cache='keep',
    end=types.EpisodeEnd(end),
    reward=reward,
    prompt=types.PromptRef(0, 'train', 0),
    member=0,
    incarnation=0,
  )


def test_flatten():
  tree = {'kl': np.float32(0.5), 'counts': {'low': 3, 'high': np.array(4)}}
  assert metrics.flatten('train', tree) == {
    'train/kl': 0.5,
    'train/counts/low': 3.0,
    'train/counts/high': 4.0,
  }
  assert metrics.flatten('', {'x': 1}) == {'x': 1.0}
  with pytest.raises(ValueError, match=r"train/name is 'text'; expected a number"):
    metrics.flatten('train', {'name': 'text'})
  with pytest.raises(ValueError, match='train/v is'):
    metrics.flatten('train', {'v': np.zeros(2)})


def test_batch_metrics_by_hand():
  a = _trajectory(pool='a', lengths=(2, 2), versions=((1,), (2,)), reward=1.0)
  b = _trajectory(pool='b', lengths=(4,), versions=((2,),), reward=0.0, end='turn_limit')
  c = _trajectory(pool='b', lengths=(1,), versions=((1,),), reward=0.0, end='malformed')
  groups = [
    types.Group(types.PromptRef(0, 'train', 0), (a, b), 2),
    types.Group(types.PromptRef(1, 'train', 1), (c,), 2),
  ]
  stale = [((3, 5, 2), (6, 8, 1)), ((3, 7, 1),), ((3, 4, 2),)]
  scalars, histograms = metrics.batch_metrics(groups, stale)
  want = {
    'rollout/episodes': 3,
    'rollout/turns': 4,
    'rollout/tokens_sampled': 9,
    'rollout/tokens_total': (3 + 2 + 1 + 2 + 1) + (3 + 4 + 1) + (3 + 1 + 1),
    'rollout/reward': 1 / 3,
    'rollout/pass@1': 1 / 3,
    'rollout/response_tokens': 3,
    # Tokens: a has two stale by 2 and two by 1, b four by 1, c one by 2.
    'rollout/staleness_mean_updates': (2 * 2 + 2 + 4 + 2) / 9,
    'rollout/staleness_max_updates': 2,
    'rollout/versions_per_episode': 4 / 3,
    'rollout/turns_spanning_versions': 0,
    'rollout/end/submitted': 1 / 3,
    'rollout/end/malformed': 1 / 3,
    'rollout/finish/stop': 1,
    'rollout/finish/abort': 0,
    'rollout/groups': 2,
    'rollout/groups_equal': 1,
    'rollout/members_missing': 1,
    'source/a/reward': 1,
    'source/b/reward': 0,
    'source/b/tokens_sampled': 5,
    'source/b/staleness_mean_updates': 6 / 5,
    'source/b/end/turn_limit': 1 / 2,
  }
  assert {name: scalars[name] for name in want} == pytest.approx(want)
  assert histograms['rollout/staleness_updates'].counts[:4] == (0, 6, 3, 0)
  # Lengths 4, 4 and 1: bins [1, 2) and [4, 8).
  assert histograms['rollout/response_tokens'].counts[:5] == (0, 1, 0, 2, 0)


def test_empty_batch_has_no_numbers_and_does_not_fail():
  scalars, histograms = metrics.batch_metrics([], [])
  assert scalars['rollout/episodes'] == 0 and math.isnan(scalars['rollout/reward'])
  assert sum(histograms['rollout/staleness_updates'].counts) == 0


def test_rollout_metrics():
  stats = {
    'secs': 2.0,
    'pools': {'a': {'turns': 3, 'lost': 1}},
    'ends': {types.EpisodeEnd.WALL_CLOCK: 1},
    'failures': {'a: wall_clock': 1},
    'errors': ('text',),
    'response_tokens': (1, 5),
    'lost_tokens': (),
    'rewards': (1.0,),
    'staleness': {0: 3},
  }
  scalars, histograms = metrics.rollout_metrics(stats)
  assert scalars == {
    'sampling/secs': 2.0,
    'source/a/sampling/turns': 3.0,
    'source/a/sampling/lost': 1.0,
    'sampling/ends/wall_clock': 1.0,
    'sampling/failures/a: wall_clock': 1.0,
  }
  assert histograms['sampling/response_tokens'].counts[:5] == (0, 1, 0, 1, 0)
  assert sum(histograms['sampling/lost_tokens'].counts) == 0
