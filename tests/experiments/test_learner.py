"""One batch through the learner: what it reports is what the batch holds."""

import jax
import numpy as np
import pytest

from mimo import objectives
from mimo.experiments import factories, hosts
from mimo.experiments.learner import Learner
from mimo.experiments.schema import parse
from mimo.trainer.drift import Drift
from mimo.trainer.sharding import make_mesh
from mimo.trainer.update import Trainer
from mimo.types import (
  Candidates,
  EpisodeEnd,
  FinishReason,
  Group,
  PromptRef,
  SamplingParams,
  Source,
  Trajectory,
  Turn,
  VersionSpan,
)

_SAMPLING = SamplingParams(1.0, 1.0, 0, 4, 8, (2,))


def _trajectory(pool: str, reward: float, member: int) -> Trajectory:
  tokens = np.array([5, 6, 7, 8, 2], np.int32)
  ids = np.array([[7, 1, 2, 3], [8, 1, 2, 3], [2, 1, 5, 3]], np.int32)
  return Trajectory(
    tokens=tokens,
    sampled=np.array([0, 0, 1, 1, 1], bool),
    logps=np.full(3, np.log(1 / 128), np.float32),
    candidates=Candidates.from_dense(ids, np.full((3, 4), np.log(1 / 128), np.float32)),
    full_support=np.zeros(3, bool),
    turns=(Turn(2, 5, FinishReason.STOP, (VersionSpan(2, 5, 1),)),),
    source=Source(pool, 'H100', 'bf16', 'bf16'),
    sampling=_SAMPLING,
    logprob_mode='processed',
    prefix_cache='keep',
    end=EpisodeEnd.SUBMITTED,
    reward=reward,
    prompt=PromptRef(0, 'train', 0),
    member=member,
    incarnation=0,
  )


@pytest.fixture
def learner(tiny_config, tiny_policy) -> Learner:
  policy = factories.make_policy(tiny_policy, 'repair')
  arm, options = objectives.arm(tiny_config.arm), parse(tiny_config).trainer
  trainer = Trainer(
    policy.model,
    options,
    correction=arm.correction,
    temperature=1.0,
    num_sources=2,
    mesh=make_mesh(),
  )
  return Learner(
    trainer,
    trainer.init_state(policy.params),
    advantage=arm.advantage,
    buckets=options.buckets,
    num_candidates=4,
    sources=['one', 'two'],
    peers=hosts.Peers(),
    drift=Drift(trainer),
  )


def _weights(learner: Learner) -> list[np.ndarray]:
  return [np.asarray(leaf) for leaf in jax.tree.leaves(learner.state.params)]


def test_counts_by_source_and_moves_only_where_rewards_differ(learner) -> None:
  pair = (_trajectory('one', 1.0, 0), _trajectory('two', 0.0, 1))
  same = (_trajectory('one', 1.0, 0), _trajectory('one', 1.0, 1))
  prompt = PromptRef(0, 'train', 0)
  scalars = learner.update([Group(prompt, pair, 2), Group(prompt, same, 2)]).scalars()
  assert scalars['train/tokens'] == 12
  assert scalars['source/one/tokens'] == 9
  assert scalars['source/two/tokens'] == 3
  # A random policy over 128 tokens is near the uniform one that these log-probs state.
  assert 0 <= scalars['source/one/kl'] < 0.2
  assert scalars['train/entropy'] == pytest.approx(np.log(128), abs=0.2)
  assert scalars['train/grad_norm'] > 0
  assert 'train/drift' not in scalars
  assert scalars['train/flat'] == 0
  before = _weights(learner)
  equal = learner.update([Group(prompt, same, 2)], measure_drift=True).scalars()
  assert equal['train/covariance_norm'] == equal['train/mean_score_norm'] == 0
  assert (equal['train/grad_norm'], equal['train/flat']) == (0, 1)
  for ours, theirs in zip(_weights(learner), before, strict=True):
    np.testing.assert_array_equal(ours, theirs)
  assert 'source/two/tokens' not in equal


def test_a_snapshot_is_the_policy_before_the_next_update(learner) -> None:
  taken = learner.snapshot()
  before = learner.state.params['embed']['embedding'].astype('bfloat16')
  pair = (_trajectory('one', 1.0, 0), _trajectory('two', 0.0, 1))
  learner.update([Group(PromptRef(0, 'train', 0), pair, 2)])
  tensors = dict(taken)
  np.testing.assert_array_equal(tensors['model.embed_tokens.weight'], np.asarray(before))
