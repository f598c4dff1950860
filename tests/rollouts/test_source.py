import asyncio

import pytest

from mimo.rollouts.base import RolloutError, StaleRange
from mimo.samplers.base import SamplerError
from mimo.types import VersionSpan


def _group_of(call):
  return int(call.session.split('/')[1])


def _numbers(batch):
  return [group.prompt.group for group in batch.groups]


def test_batches_hold_the_groups_that_end_first_in_the_order_of_their_numbers(kit):
  async def main():
    # Group 0 takes 9 s, group 1 takes 3 s, every other 1 s.
    secs = {0: 9.0, 1: 3.0}
    sampler = kit.sampler(lambda call: kit.after(secs.get(_group_of(call), 1.0))(call), sessions=9)
    rollouts = kit.source([sampler], in_flight_batches=1.5)
    batch = await rollouts.batch(0)  # group 2 ends at 1 s, 3 at 2 s
    assert _numbers(batch) == [2, 3] and batch.update == 0
    assert _numbers(await rollouts.batch(1)) == [1, 4]  # which both end at 3 s
    assert [len(group.trajectories) for group in batch.groups] == [3, 3]
    assert len(batch.trajectories) == len(batch.staleness) == 6
    await rollouts.close()

  kit.run(main())


def test_sampling_goes_on_while_the_trainer_updates(kit):
  async def main():
    sampler = kit.sampler(kit.after(1.0), sessions=6)
    rollouts = kit.source([sampler])
    first = await rollouts.batch(0)
    assert first.stats.wait_secs == first.stats.secs == 1.0
    await asyncio.sleep(10.0)  # an update
    second = await rollouts.batch(1)
    assert second.stats.wait_secs == 0.0 and second.stats.secs == 10.0
    assert second.stats.sampled_tokens_per_sec == 2.0 * second.stats.pools['a'].episodes / 10.0
    await rollouts.close()

  kit.run(main())


def test_equal_rewards_stay_in_the_batch(kit):
  async def main():
    rollouts = kit.source([kit.sampler(kit.win)])
    batch = await rollouts.batch(0)
    await rollouts.close()
    assert batch.stats.rewards == (1.0,) * 6

  kit.run(main())


def test_staleness_by_hand(kit):
  """One group at a time, 10 s each; versions 5, 7, 9 hold updates 0, 1, 2."""

  async def main():
    update_of = {5: 0}
    sampler = kit.sampler(kit.after(10.0), version=5)
    rollouts = kit.source(
      [sampler],
      update_of=update_of,
      in_flight_batches=1.0,
      buffered_batches=1.0,
      prompts_per_update=1,
      group_size=2,
    )
    first = await rollouts.batch(0)  # at 10 s: group 0, all of version 5
    assert first.staleness == ((StaleRange(2, 4, 0),),) * 2 and first.stats.staleness == {0: 4}
    await asyncio.sleep(15.0)  # group 1 ends at 20 s, group 2 starts
    update_of[7] = 1
    sampler.serve(7)  # at 25 s, in the middle of group 2
    second = await rollouts.batch(1)
    assert second.stats.staleness == {1: 4}
    await asyncio.sleep(10.0)
    update_of[9] = 2
    sampler.serve(9)  # at 35 s; group 2 ended at 30 s
    third = await rollouts.batch(2)
    assert [t.turns[0].spans for t in third.trajectories] == [
      (VersionSpan(2, 3, 5), VersionSpan(3, 4, 7))
    ] * 2
    assert third.staleness == ((StaleRange(2, 3, 2), StaleRange(3, 4, 1)),) * 2
    assert third.stats.staleness == {1: 2, 2: 2}
    await rollouts.close()

  kit.run(main())


def test_a_trajectory_is_as_stale_as_its_stalest_token(kit):
  async def main():
    def script(call):
      sampler.serve(9)  # the second half of the first turn, and all that follows, is of update 3
      return [kit.WIN, 20, kit.STOP]

    sampler = kit.sampler(script, version=5)
    limits = {'max_staleness_updates': 2}
    rollouts = kit.source([sampler], update_of={5: 0, 9: 3}, **limits, prompts_per_update=1)
    batch = await rollouts.batch(3)
    assert batch.stats.trajectories_stale > 0 and batch.stats.staleness.keys() == {0}
    await rollouts.close()

  kit.run(main())


def test_a_full_buffer_of_stale_groups_is_sampled_anew(kit):
  """Nothing runs any more when all of it is dropped: the drop itself must start new groups."""

  async def main():
    update_of = {5: 0, 9: 3}
    sampler = kit.sampler(kit.after(1.0), version=5)
    limits = {'max_staleness_updates': 1}
    rollouts = kit.source([sampler], update_of=update_of, **limits)
    await rollouts.batch(0)
    await asyncio.sleep(100.0)
    assert (rollouts.in_flight, rollouts.buffered) == (2, 4)
    sampler.serve(9)
    batch = await rollouts.batch(3)
    assert batch.stats.groups_dropped == 6 and batch.stats.staleness == {0: 12}
    await rollouts.close()

  kit.run(main())


def test_groups_that_are_fit_keep_their_place_while_others_are_replaced(kit):
  async def main():
    async def script(call):
      await asyncio.sleep(1.0 + _group_of(call))
      if _group_of(call) == 2:
        other = kit.sampler(kit.win, version=99)
        return await other.sample('x', call.tokens, call.params, call.key)
      return [kit.WIN, kit.STOP]

    rollouts = kit.source([kit.sampler(script, sessions=30)], prompts_per_update=4)
    batch = await rollouts.batch(0)
    assert _numbers(batch) == [0, 1, 3, 4] and batch.stats.trajectories_abandoned == 3
    await rollouts.close()

  kit.run(main())


def test_bounds_are_in_whole_groups(kit):
  async def main():
    limits = {'in_flight_batches': 2.3, 'buffered_batches': 1.0}
    rollouts = kit.source([kit.sampler(kit.after(1.0))], **limits, prompts_per_update=10)
    waiting = asyncio.ensure_future(rollouts.batch(0))
    await asyncio.sleep(0.5)
    assert rollouts.in_flight == 23
    await rollouts.close()
    await asyncio.gather(waiting, return_exceptions=True)

  kit.run(main())


def _mixed_versions(kit, versions):
  """A sampler whose member m draws under version `versions[m]`, in groups below 2; else under 9."""

  async def script(call):
    _, group, member, _ = map(int, call.session.split('/'))
    turn = await kit.sampler(kit.win, version=versions[member] if group < 2 else 9).sample(
      'x', call.tokens, call.params, call.key
    )
    return turn

  return kit.sampler(script)


def test_a_bound_drops_what_is_staler_as_it_would_be_trained_on(kit):
  async def main():
    sampler = _mixed_versions(kit, [5, 6, 6])
    rollouts = kit.source(
      [sampler],
      update_of={5: 0, 6: 1, 9: 3},
      max_staleness_updates=2,
    )
    batch = await rollouts.batch(3)  # staleness 3, 2, 2
    assert [[t.member for t in g.trajectories] for g in batch.groups] == [[1, 2]] * 2
    assert all(group.asked == 3 for group in batch.groups)
    assert batch.stats.trajectories_stale == 2 and batch.stats.groups_dropped == 0
    await rollouts.close()
    rollouts = kit.source(
      [sampler],
      update_of={5: 0, 6: 1, 9: 3},
      max_staleness_updates=1,
    )
    batch = await rollouts.batch(3)
    assert _numbers(batch) == [2, 3] and batch.stats.staleness == {0: 12}
    assert batch.stats.trajectories_stale == 6 and batch.stats.groups_dropped == 2
    state = rollouts.state()
    assert {0, 1, 2, 3}.isdisjoint(state['cursor']['outstanding'])
    await rollouts.close()

  kit.run(main())


def test_abandoned_publications_are_dropped_and_counted(kit):
  async def main():
    sampler = _mixed_versions(kit, [5, 6, 6])
    rollouts = kit.source([sampler], update_of={6: 1, 9: 3})
    batch = await rollouts.batch(3)
    assert [[t.member for t in g.trajectories] for g in batch.groups] == [[1, 2]] * 2
    assert batch.stats.trajectories_abandoned == 2
    await rollouts.close()
    rollouts = kit.source([sampler], update_of={5: 0, 9: 3})
    batch = await rollouts.batch(3)
    assert _numbers(batch) == [2, 3]
    assert batch.stats.trajectories_abandoned == 4 and batch.stats.groups_dropped == 2
    await rollouts.close()

  kit.run(main())


def test_losses_are_replaced_and_counted(kit):
  async def main():
    def script(call):
      if _group_of(call) == 1:
        raise SamplerError('lost')
      return [kit.WIN, kit.STOP]

    rollouts = kit.source([kit.sampler(script)])
    batches = [await rollouts.batch(u) for u in range(2)]
    assert sorted(_numbers(batches[0]) + _numbers(batches[1])) == [0, 2, 3, 4]
    assert sum(b.stats.groups_dropped for b in batches) == 1
    assert sum(b.stats.members_lost for b in batches) == 3
    assert sum(len(b.stats.lost_tokens) for b in batches) == 9
    assert 1 not in rollouts.state()['cursor']['outstanding']
    await rollouts.close()

  kit.run(main())


def test_a_bug_in_the_background_surfaces_in_batch(kit, monkeypatch):
  async def main():
    sampler = kit.sampler(kit.after(5.0))

    async def bug(*_):
      await asyncio.sleep(1.0)
      raise KeyError('a typo')

    monkeypatch.setattr(sampler, 'sample', bug)
    rollouts = kit.source([sampler])
    for _ in range(2):  # and again, for whoever asks later
      with pytest.raises(KeyError, match='a typo'):
        await rollouts.batch(0)
    assert asyncio.get_running_loop().time() == 1.0
    await rollouts.close()
    assert sampler.open_sessions == ()

  kit.run(main())


def test_a_group_cancelled_from_elsewhere_surfaces_too(kit, monkeypatch):
  async def main():
    sampler = kit.sampler(kit.after(5.0))

    async def cancelled(*_):
      raise asyncio.CancelledError

    monkeypatch.setattr(sampler, 'sample', cancelled)
    rollouts = kit.source([sampler])
    with pytest.raises(RolloutError, match='group 0 was cancelled'):
      await rollouts.batch(0)
    await rollouts.close()

  kit.run(main())


def test_a_fleet_that_is_down_ends_the_run_by_name(kit):
  async def main():
    def dead(call):
      raise SamplerError('connection refused')

    rollouts = kit.source([kit.sampler(dead)])
    with pytest.raises(RolloutError, match='connection refused'):
      await rollouts.batch(0)
    await rollouts.close()

  kit.run(main())


def test_close_ends_a_waiting_batch_and_releases_everything(kit):
  async def main():
    task = kit.TinyTask()
    sampler = kit.sampler(kit.after(50.0))
    rollouts = kit.source([sampler], task=task)
    waiting = asyncio.ensure_future(rollouts.batch(0))
    await asyncio.sleep(1.0)
    assert sampler.open_sessions
    await rollouts.close()
    with pytest.raises(RolloutError, match='closed'):
      await waiting
    assert sampler.open_sessions == () and task.opened == task.closed > 0
    assert asyncio.get_running_loop().time() == 1.0
    assert asyncio.all_tasks() == {asyncio.current_task()}
    await rollouts.close()
    with pytest.raises(RolloutError, match='closed'):
      await rollouts.batch(0)
    # What was out is not lost: a source made from the state samples it.
    assert rollouts.state()['cursor']['outstanding'] == [0, 1]

  kit.run(main())


def test_a_close_that_is_cancelled_can_be_called_again(kit, monkeypatch):
  async def main():
    sampler = kit.sampler(kit.after(50.0))
    release = sampler.release

    async def slow(name):
      await asyncio.sleep(5.0)
      await release(name)

    monkeypatch.setattr(sampler, 'release', slow)
    rollouts = kit.source([sampler])
    waiting = asyncio.ensure_future(rollouts.batch(0))
    await asyncio.sleep(1.0)
    closing = asyncio.ensure_future(rollouts.close())
    await asyncio.sleep(1.0)
    assert waiting.done() and not closing.done()
    closing.cancel()
    await asyncio.gather(closing, waiting, return_exceptions=True)
    await rollouts.close()
    # No release was broken into: each took its 5 s, from when the first close began.
    assert asyncio.get_running_loop().time() == 6.0 and sampler.open_sessions == ()
    assert asyncio.all_tasks() == {asyncio.current_task()}

  kit.run(main())


def test_a_cancelled_batch_loses_no_group(kit):
  async def main():
    rollouts = kit.source([kit.sampler(kit.after(10.0), sessions=3)])
    waiting = asyncio.ensure_future(rollouts.batch(0))
    await asyncio.sleep(15.0)  # one of two groups is there
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert _numbers(await rollouts.batch(0)) == [0, 1]
    await rollouts.close()

  kit.run(main())
