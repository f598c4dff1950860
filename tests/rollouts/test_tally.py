import dataclasses

from mimo.rollouts.base import PoolStats, StaleRange
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.rollouts.tally import Tally
from mimo.samplers.base import SamplerError
from mimo.types import EpisodeEnd, FinishReason, Group, PromptRef


def _attempt(kit, script, pool='a'):
  spec = EpisodeSpec('s', PromptRef(0, 'train', 0), 0, 0, kit.SAMPLING, None, None)
  return kit.run(run_episode(kit.TinyTask(), kit.sampler(script, pool=pool), spec))


def _drain(tally, groups=(), staleness=()):
  return tally.drain(groups, staleness, secs=2.0, wait_secs=0.5, in_flight=3, buffered=4)


def _lost_in_its_second_turn(kit):
  def script(call):
    if call.turn == 1:
      raise SamplerError('gone')
    return [kit.GO_ON, 20, kit.STOP]

  return script


def test_counts_by_hand(kit):
  tally = Tally(['b', 'a', 'a'])
  won = _attempt(kit, kit.win)
  tally.attempt(won, retry=False)
  tally.attempt(_attempt(kit, lambda call: [kit.LOSE, 20, kit.STOP]), retry=True)
  tally.attempt(_attempt(kit, _lost_in_its_second_turn(kit), pool='b'), retry=False)
  tally.attempt(dataclasses.replace(won, cleanup_errors=('hung',)), retry=False)
  tally.count('members_lost')
  tally.count('trajectories_stale', 3)
  group = Group(PromptRef(0, 'train', 0), (won.trajectory, won.trajectory), 2)
  ranges = [(StaleRange(2, 4, 1), StaleRange(6, 7, 0)), (StaleRange(2, 3, 1),)]
  stats = _drain(tally, [group], ranges)
  # Two prompt tokens; turns of 2, 3 and 2 in pool a; 3 and an observation of 2 in b.
  assert stats.pools == {
    'a': PoolStats(episodes=3, lost=0, turns=3, sampled_tokens=7, tokens=13),
    'b': PoolStats(episodes=1, lost=1, turns=1, sampled_tokens=3, tokens=7),
  }
  assert stats.ends == {EpisodeEnd.SUBMITTED: 3, EpisodeEnd.SAMPLER_FAILURE: 1}
  assert stats.finishes == {FinishReason.STOP: 4}
  assert stats.failures == {'b: sampler_failure': 1}
  assert stats.errors == ('b: sampler_failure: gone', 'a: hung')
  assert (stats.retries, stats.members_lost, stats.trajectories_stale) == (1, 1, 3)
  assert (stats.groups_dropped, stats.trajectories_abandoned, stats.cleanups_failed) == (0, 0, 1)
  assert stats.response_tokens == (2, 3, 2) and stats.lost_tokens == (3,)
  assert stats.rewards == (1.0, 1.0) and stats.staleness == {0: 1, 1: 3}
  assert (stats.secs, stats.wait_secs, stats.in_flight, stats.buffered) == (2.0, 0.5, 3, 4)
  assert stats.sampled_tokens_per_sec == 5.0 and stats.turns() == {'a': 3, 'b': 1}


def test_a_drained_tally_starts_anew_and_totals_go_on(kit):
  tally = Tally(['a'], {'episodes': 10, 'retries': 1})
  tally.attempt(_attempt(kit, kit.win), retry=True)
  first, second = _drain(tally), _drain(tally)
  assert first.retries == 1 and first.pools['a'].episodes == 1
  assert second.retries == 0 and second.pools['a'].episodes == 0 and second.ends == {}
  assert tally.totals() == {'episodes': 11, 'groups_trained': 0, 'retries': 2}


def test_what_lost_attempts_say_is_bounded(kit):
  def fail(call):
    raise SamplerError('x' * 10_000)

  tally, lost = Tally(['a']), _attempt(kit, fail)
  for _ in range(100):
    tally.attempt(lost, retry=False)
  stats = _drain(tally)
  assert stats.failures == {'a: sampler_failure': 100}
  assert len(stats.errors) == 8 and all(len(error) <= 300 for error in stats.errors)
