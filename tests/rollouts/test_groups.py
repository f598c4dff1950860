import asyncio
import collections

import pytest

from mimo import keys
from mimo.rollouts.base import RolloutError
from mimo.rollouts.groups import GroupRunner, together
from mimo.rollouts.tally import Tally
from mimo.samplers.base import SamplerError
from mimo.types import EpisodeEnd, PromptRef


def _key(member):
  return keys.key('session', 0, 5, member)


def _runner(kit, samplers, task=None, **changes):
  tally = Tally([s.contract.source.pool for s in samplers])
  settings = kit.settings(group_size=4, **changes)
  return GroupRunner(task or kit.TinyTask(), samplers, settings, tally), tally


def _drain(tally):
  return tally.drain([], [], secs=1.0, wait_secs=0.0, in_flight=0, buffered=0)


def _failing(kit, attempts_lost):
  """A script that loses the first `attempts_lost[member]` attempts of a member."""

  def script(call):
    _, _, member, attempt = map(int, call.session.split('/'))
    if attempt < attempts_lost[member]:
      raise SamplerError(f'lost {member}')
    return [kit.WIN if member % 2 == 0 else kit.LOSE, kit.STOP]

  return script


def _run(kit, runner, group=5, replica=None):
  return kit.run(runner.run(PromptRef(group, 'train', 1), key=_key, replica=replica))


def test_a_whole_group(kit):
  sampler = kit.sampler(_failing(kit, [0, 0, 0, 0]))
  runner, tally = _runner(kit, [sampler])
  group = _run(kit, runner)
  assert group.prompt == PromptRef(5, 'train', 1) and group.asked == 4
  assert [t.member for t in group.trajectories] == [0, 1, 2, 3]
  assert [t.reward for t in group.trajectories] == [1.0, 0.0, 1.0, 0.0]
  keys = {call.session: call.key.tolist() for call in sampler.calls}
  assert keys == {f'0/5/{m}/0': _key(m).tolist() for m in range(4)}
  stats = _drain(tally)
  assert (stats.retries, stats.members_lost, stats.groups_dropped) == (0, 0, 0)


def test_lost_attempts_are_retried_twice_then_the_group_goes_on_without_them(kit):
  # Members lose 0, 1, 2 and 3 attempts: the last has none left.
  sampler = kit.sampler(_failing(kit, [0, 1, 2, 3]))
  runner, tally = _runner(kit, [sampler])
  group = _run(kit, runner)
  assert [t.member for t in group.trajectories] == [0, 1, 2] and group.asked == 4
  # A retry has its member's key: it is tried again, not drawn again.
  for call in sampler.calls:
    assert call.key.tolist() == _key(int(call.session.split('/')[2])).tolist()
  stats = _drain(tally)
  assert stats.retries == 1 + 2 + 2 and stats.members_lost == 1 and stats.groups_dropped == 0
  assert stats.ends == {EpisodeEnd.SUBMITTED: 3, EpisodeEnd.SAMPLER_FAILURE: 6}
  assert stats.failures == {'a: sampler_failure': 6}
  assert 'a: sampler_failure: lost 3' in stats.errors
  assert runner.seats.in_use == (0,)
  assert sampler.open_sessions == ()


@pytest.mark.parametrize(('lost', 'left'), [([0, 0, 9, 9], 2), ([0, 9, 9, 9], None)])
def test_a_group_needs_two_members(kit, lost, left):
  runner, tally = _runner(kit, [kit.sampler(_failing(kit, lost))])
  group = _run(kit, runner)
  assert (group and len(group.trajectories)) == left
  assert _drain(tally).groups_dropped == (left is None)


def test_a_retry_avoids_the_replica_that_lost_it(kit):
  def dead(call):
    raise SamplerError('dead')

  bad, good = kit.sampler(dead, pool='bad'), kit.sampler(kit.win, pool='good', sessions=1)
  runner, tally = _runner(kit, [bad, good])
  group = _run(kit, runner)
  assert [t.source.pool for t in group.trajectories] == ['good'] * 4
  # The least-loaded takes the first attempts, the other one the retries, one at a time.
  assert len(bad.calls) == _drain(tally).retries and good.peak_sessions == 1


def test_members_follow_the_table_they_are_given(kit):
  samplers = [kit.sampler(kit.win, pool=name) for name in 'ab']
  runner, _ = _runner(kit, samplers)
  group = _run(kit, runner, replica=lambda member: member // 3)
  assert [t.source.pool for t in group.trajectories] == ['a', 'a', 'a', 'b']


def test_no_replica_holds_more_sessions_than_it_decodes(kit):
  sampler = kit.sampler(kit.after(1.0), sessions=3)
  runner, _ = _runner(kit, [sampler])

  async def main():
    prompts = [PromptRef(g, 'train', g) for g in range(5)]
    groups = await together(runner.run(p, key=_key, replica=None) for p in prompts)
    assert all(len(group.trajectories) == 4 for group in groups)
    assert asyncio.get_running_loop().time() == 7.0  # 20 sessions, 3 at a time

  kit.run(main())
  assert sampler.peak_sessions == 3


def test_a_hung_replica_gives_its_places_back(kit):
  async def hang(call):
    await asyncio.get_running_loop().create_future()

  runner, tally = _runner(kit, [kit.sampler(hang, sessions=1)], retries=0)
  assert _run(kit, runner) is None
  stats = _drain(tally)
  assert stats.failures == {'a: wall_clock': 4} and runner.seats.in_use == (0,)


def test_sampling_that_only_fails_comes_to_an_end(kit):
  def dead(call):
    raise SamplerError('connection refused')

  runner, _ = _runner(kit, [kit.sampler(dead)])
  assert [_run(kit, runner, group=g) for g in range(3)] == [None] * 3
  with pytest.raises(RolloutError, match=r'4 groups were dropped .* connection refused'):
    _run(kit, runner, group=3)


def test_a_group_in_between_shows_that_sampling_goes_on(kit):
  def script(call):
    if call.session.split('/')[1] != '3':
      raise SamplerError('lost')
    return [kit.WIN, kit.STOP]

  runner, _ = _runner(kit, [kit.sampler(script)])
  assert [_run(kit, runner, group=g) is None for g in range(7)] == [g != 3 for g in range(7)]


def test_a_bug_ends_the_group_with_its_own_error(kit, monkeypatch):
  async def main():
    sampler = kit.sampler(kit.after(50.0))
    runner, _ = _runner(kit, [sampler])
    sample = sampler.sample

    async def buggy(name, *rest):
      if name == '0/5/2/0':
        raise KeyError('a typo')
      return await sample(name, *rest)

    monkeypatch.setattr(sampler, 'sample', buggy)
    with pytest.raises(KeyError, match='a typo'):
      await runner.run(PromptRef(5, 'train', 1), key=_key, replica=None)
    assert asyncio.get_running_loop().time() == 0.0  # nobody waited for the others
    assert runner.seats.in_use == (0,) and sampler.open_sessions == ()
    assert collections.Counter(sampler.released) == {f'0/5/{m}/0': 1 for m in range(4)}

  kit.run(main())


def test_together_waits_for_the_clean_up_of_what_it_cancels(kit):
  async def main():
    cleaned = []

    async def job():
      try:
        await asyncio.get_running_loop().create_future()
      finally:
        await asyncio.sleep(5)
        cleaned.append(True)

    jobs = together(job() for _ in range(3))
    waiting = asyncio.ensure_future(jobs)
    await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
      await waiting
    assert cleaned == [True] * 3

  kit.run(main())
