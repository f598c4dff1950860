import asyncio
import json

import numpy as np
import pytest

from mimo import types
from mimo.evaluation import evaluate as lib
from mimo.samplers.base import SamplerContract
from mimo.types import EpisodeEnd


class _Sampler:
  def __init__(self, places=4):
    source = types.Source('eval', 'cpu', 'bf16', 'bf16')
    self.contract = SamplerContract(source, 'processed', 'float32', 8, 64, 'keep', places)
    self.version = 7


class _Task:
  name = 'toy'
  stop_ids = (1,)
  max_turn_tokens = 5
  max_tokens = 20
  splits = {  # noqa: RUF012
    'heldout': ('a', 'b', 'c'),
    'hard': ('c', 'a'),
    'none': (),
    'strange': ('z',),
    'twins': ('a', 'a'),
  }

  def size(self, split):
    return len(self.splits[split])

  def task_id(self, split, index):
    return self.splits[split][index]


class _Runner:
  """Rewards by (task, sample); `broken` lists the ends of each sample's first attempts."""

  def __init__(self, rewards, broken=None, version=lambda index: 7):
    self.rewards, self.broken, self.version = rewards, dict(broken or {}), version
    self.calls, self.running, self.peak = [], 0, 0

  async def __call__(self, sampler, task, *, prompt, member, params, key, session):
    self.calls.append((prompt.index, member, tuple(key), session))
    self.running += 1
    self.peak = max(self.peak, self.running)
    await asyncio.sleep(0)
    self.running -= 1
    waiting = self.broken.get((prompt.index, member), [])
    end = waiting.pop(0) if waiting else EpisodeEnd.SUBMITTED
    span = types.VersionSpan(2, 4, self.version(prompt.index))
    trajectory = types.Trajectory(
      tokens=np.zeros(4, np.int32),
      sampled=np.array([0, 0, 1, 1], bool),
      logps=np.zeros(2, np.float32),
      candidates=types.Candidates.concatenate([]),
      full_support=np.zeros(2, bool),
      turns=(types.Turn(2, 4, types.FinishReason.STOP, (span,)),),
      source=sampler.contract.source,
      sampling=params,
      logprob_mode='processed',
      prefix_cache='keep',
      end=end,
      reward=self.rewards[prompt.index][member] if end.scored else 0.0,
      prompt=prompt,
      member=member,
      incarnation=0,
    )
    return trajectory, None if end.scored else f'broken {prompt.index}'


def _evaluate(runner, task=None, sampler=None, **kwargs):
  task = task or _Task()
  kwargs = {'params': lib.full_vocabulary(task), 'samples': 2, 'seed': 3} | kwargs
  return asyncio.run(lib.evaluate(runner, sampler or _Sampler(), task, **kwargs))


REWARDS = [[1, 0], [0, 0], [1, 1]]


def test_full_set_and_subset_share_one_set_of_samples():
  runner = _Runner(REWARDS)
  result = _evaluate(runner, subsets=('hard',))
  assert len(runner.calls) == 6 and result.complete
  assert result.subsets == {'hard': (2, 0)}
  summary = result.summary()
  assert summary['heldout']['pass@1'] == pytest.approx(0.5)
  assert summary['heldout']['pass@2'] == pytest.approx(2 / 3)
  # Values 1/2, 0, 1: variance 1/4, over three tasks.
  assert summary['heldout']['pass@1_error'] == pytest.approx(np.sqrt(0.25 / 3))
  assert summary['hard']['pass@1'] == pytest.approx(0.75)
  assert summary['hard']['tasks'] == 2
  assert summary['heldout']['response_tokens'] == 2
  assert 'pass@4' not in summary['heldout']
  assert result.version == 7
  back = json.loads(json.dumps(result.to_json(), allow_nan=False))
  assert back['rewards'] == {'a': [1, 0], 'b': [0, 0], 'c': [1, 1]}
  assert back['complete'] and back['sampling']['top_p'] == 1.0


def test_failures_are_rerun_with_their_key_and_never_replace_scored_samples():
  failure, timeout = EpisodeEnd.ENVIRONMENT_FAILURE, EpisodeEnd.WALL_CLOCK
  runner = _Runner(REWARDS, broken={(0, 0): [failure, timeout], (2, 1): [failure]})
  result = _evaluate(runner)
  np.testing.assert_array_equal(result.rewards, REWARDS)
  assert result.complete
  assert result.failures == {'environment_failure': 2, 'wall_clock': 1}
  assert result.ends == {'submitted': 6}
  attempts = [call for call in runner.calls if call[:2] == (0, 0)]
  assert len(attempts) == 3 and len({key for _, _, key, _ in attempts}) == 1
  assert len({session for *_, session in runner.calls}) == len(runner.calls) == 9


def test_what_still_fails_leaves_the_result_incomplete():
  runner = _Runner(REWARDS, broken={(2, 1): [EpisodeEnd.SAMPLER_FAILURE] * 9})
  result = _evaluate(runner, reruns=1, subsets=('hard',))
  assert len(runner.calls) == 7
  assert not result.complete and result.missing == 1
  assert result.failures == {'sampler_failure': 2}
  assert result.errors == ('sampler_failure: broken 2',) * 2
  with pytest.raises(ValueError, match='1 of 6 samples are missing, the first at task 2, sample 1'):
    result.estimates('heldout')
  summary = result.summary()
  assert 'pass@1' not in summary['heldout'] and summary['heldout']['missing'] == 1
  # The denominator stays three tasks: (1/2 + 0 + 1/2) / 3 to (1/2 + 0 + 1) / 3.
  assert summary['heldout']['pass@1_low'] == pytest.approx(1 / 3)
  assert summary['heldout']['pass@1_high'] == pytest.approx(1 / 2)
  assert result.to_json()['rewards']['c'] == [1, None]


def test_scored_ends_without_reward_count():
  runner = _Runner([[0, 0], [0, 0], [0, 0]], broken={(1, 0): [EpisodeEnd.MALFORMED]})
  result = _evaluate(runner)
  assert result.complete and len(runner.calls) == 6
  assert result.ends == {'submitted': 5, 'malformed': 1}


def test_keys_differ_by_sample_and_not_by_order():
  keys = {tuple(lib.sample_key(3, i, j)) for i in range(3) for j in range(2)}
  assert len(keys) == 6
  runner = _Runner(REWARDS)
  _evaluate(runner, sampler=_Sampler(places=1))
  assert {key for _, _, key, _ in runner.calls} == keys
  assert lib.sample_key(3, 0, 0).dtype == np.uint32 and lib.sample_key(3, 0, 0).shape == (2,)


def test_at_most_max_sessions_run_at_a_time():
  runner = _Runner(REWARDS)
  _evaluate(runner, sampler=_Sampler(places=2))
  assert runner.peak == 2


def test_full_vocabulary_params():
  params = lib.full_vocabulary(_Task())
  assert (params.temperature, params.top_p, params.top_k) == (1.0, 1.0, 0)
  assert (params.max_turn_tokens, params.stop_ids) == (5, (1,))


def test_refusals():
  runner = _Runner(REWARDS)
  with pytest.raises(ValueError, match="split 'none' holds no tasks"):
    _evaluate(runner, split='none')
  with pytest.raises(ValueError, match="'strange' holds 1 tasks such as 'z' that 'heldout' does"):
    _evaluate(runner, subsets=('strange',))
  with pytest.raises(ValueError, match="2 tasks of split 'twins' have 1 names; expected each"):
    _evaluate(runner, split='twins')
  with pytest.raises(ValueError, match='samples is 0'):
    _evaluate(runner, samples=0)
  with pytest.raises(ValueError, match=r'drawn by publications \[7, 8, 9\]; expected one'):
    _evaluate(_Runner(REWARDS, version=lambda index: 7 + index))


def test_a_bug_in_the_runner_ends_the_evaluation():
  async def broken(*args, **kwargs):
    raise KeyError('bug')

  with pytest.raises(ExceptionGroup) as caught:
    _evaluate(broken)
  assert caught.group_contains(KeyError)
