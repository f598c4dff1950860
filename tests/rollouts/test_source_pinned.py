"""A source whose samplers are pinned: in step with training, and a function of the seed."""

import asyncio
import dataclasses
import functools
import json
import threading

import numpy as np
import pytest

from mimo import keys
from mimo.fleet import routing
from mimo.rollouts.base import RolloutError, StaleRange
from mimo.samplers.base import SamplerError
from mimo.types import Version

# Publication 10 + u holds update u.


class Fleet:
  """Two pools whose draws depend on the key, the position and the version, as a real one's do."""

  def __init__(self, kit, *, latency=lambda call: 0.0, lose=lambda call: False):
    self.pinned = []

    async def script(call):
      await asyncio.sleep(latency(call))
      if lose(call):
        raise SamplerError('lost')
      seed = [*call.key.tolist(), len(call.tokens), call.version]
      first, second = np.random.SeedSequence(seed).generate_state(2)
      return [(kit.WIN, kit.LOSE, kit.GO_ON)[first % 3], 20 + second % 8, kit.STOP]

    self.samplers = [kit.sampler(script, pool='a', sessions=4), kit.sampler(script, pool='b')]

    for name, sampler in zip('ab', self.samplers, strict=True):
      sampler.pin = functools.partial(self._pin, name, sampler.pin)

  async def _pin(self, name, pin, version):
    self.pinned.append((name, version.update))
    await pin(version)


VERSIONS = {update: Version(10 + update, 0, update) for update in range(10)}
UPDATES = {version.number: update for update, version in VERSIONS.items()}


def _rollouts(kit, fleet, *, lag=1, **changes):
  return kit.source(
    fleet.samplers,
    schedule='lockstep',
    lag_updates=lag,
    update_of=UPDATES,
    **{'version_of': VERSIONS} | changes,
  )


def _plain(value):
  """A value that compares by content, arrays as their bytes."""
  if isinstance(value, np.ndarray):
    return value.dtype.str, value.shape, value.tobytes()
  if dataclasses.is_dataclass(value):
    return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
  if isinstance(value, tuple | list):
    return [_plain(v) for v in value]
  return value


async def _batches(rollouts, updates):
  return [await rollouts.batch(update) for update in updates]


def _bytes(batches):
  return [(_plain(b.groups), b.staleness, b.stats.rewards) for b in batches]


def test_a_run_is_a_pure_function_of_its_seed(kit):
  """Whatever the latencies, and whatever is lost in passing."""
  first = kit.run(_batches(_rollouts(kit, Fleet(kit)), range(4)))
  uneven = Fleet(
    kit,
    latency=lambda call: 1.0 + int(call.key[0]) % 7,
    lose=lambda call: call.session.endswith('/0') and int(call.key[1]) % 3 == 0,
  )
  second = kit.run(_batches(_rollouts(kit, uneven), range(4)))
  assert _bytes(first) == _bytes(second)
  assert sum(b.stats.retries for b in second) > 0 == sum(b.stats.retries for b in first)
  other = kit.run(_batches(_rollouts(kit, Fleet(kit), seed=8), range(4)))
  assert _bytes(first) != _bytes(other)


@pytest.mark.parametrize('stop', [1, 3])
def test_stopped_and_resumed_is_uninterrupted(kit, stop):
  whole = _rollouts(kit, Fleet(kit))
  expected = _bytes(kit.run(_batches(whole, range(6))))
  part = _rollouts(kit, Fleet(kit))
  got = _bytes(kit.run(_batches(part, range(stop))))
  state = json.loads(json.dumps(part.state()))
  rest = _rollouts(kit, Fleet(kit), state=state)
  got += _bytes(kit.run(_batches(rest, range(stop, 6))))
  assert got == expected
  assert rest.state() == whole.state()
  assert rest.state()['totals']['groups_trained'] == 12


@pytest.mark.parametrize(('lag', 'pinned'), [(0, [0, 1, 2, 3]), (1, [0, 0, 1, 2]), (3, [0] * 4)])
def test_update_u_trains_on_version_max_0_u_minus_lag(kit, lag, pinned):
  fleet = Fleet(kit)
  batches = kit.run(_batches(_rollouts(kit, fleet, lag=lag), range(4)))
  assert fleet.pinned == [(pool, held) for held in pinned for pool in 'ab']
  for update, (batch, held) in enumerate(zip(batches, pinned, strict=True)):
    assert {v for t in batch.trajectories for v in t.versions().tolist()} == {10 + held}
    assert set(batch.stats.staleness) == {update - held}
    turn = batch.trajectories[0].turns[0]
    assert batch.staleness[0][0] == StaleRange(turn.start, turn.end, update - held)


def test_keys_pools_and_order_are_those_stated(kit):
  fleet = Fleet(kit)
  batches = kit.run(_batches(_rollouts(kit, fleet), range(3)))
  table = routing.table([4, 8])
  numbers = [g.prompt.group for b in batches for g in b.groups]
  assert numbers == list(range(6))
  for batch in batches:
    for group in batch.groups:
      assert [t.member for t in group.trajectories] == [0, 1, 2]
      for t in group.trajectories:
        where = {'seed': 7, 'group': group.prompt.group}
        where['member'] = t.member
        assert t.source.pool == 'ab'[routing.fixed(table, **where)]
        drawn = [
          call.key.tolist()
          for sampler in fleet.samplers
          for call in sampler.calls
          if call.session == f'0/{group.prompt.group}/{t.member}/0'
        ]
        assert drawn == [keys.key('session', *where.values()).tolist()] * len(t.turns)


def test_a_retry_stays_on_its_replica(kit):
  fleet = Fleet(kit, lose=lambda call: call.session.endswith('/0'))
  batches = kit.run(_batches(_rollouts(kit, fleet), range(2)))
  names = [{c.session.rsplit('/', 1)[0] for c in s.calls} for s in fleet.samplers]
  assert names[0].isdisjoint(names[1])
  assert sum(b.stats.retries for b in batches) == 12


def test_the_next_prompts_take_the_place_of_dropped_groups(kit):
  fleet = Fleet(kit, lose=lambda call: call.session.startswith('0/1/'))
  rollouts = _rollouts(kit, fleet)
  batches = kit.run(_batches(rollouts, range(2)))
  assert [[g.prompt.group for g in b.groups] for b in batches] == [[0, 2], [3, 4]]
  assert [b.stats.groups_dropped for b in batches] == [1, 0]
  assert rollouts.state()['cursor']['outstanding'] == []


def test_nothing_runs_between_batches_and_no_thread_ever_does(kit):
  async def main():
    rollouts = _rollouts(kit, Fleet(kit))
    threads = threading.active_count()
    await rollouts.batch(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert threading.active_count() == threads
    await rollouts.close()

  kit.run(main())


def test_a_sampler_that_leaves_its_pin_is_found_out(kit):
  fleet = Fleet(kit)

  async def forgetful(version):
    fleet.samplers[1].serve(99)

  fleet.samplers[1].pin = forgetful
  with pytest.raises(RolloutError, match=r'pool b sampled by versions \[99\]; expected 10'):
    kit.run(_batches(_rollouts(kit, fleet), range(1)))


def test_a_version_that_is_not_known_is_named(kit):
  rollouts = _rollouts(kit, Fleet(kit), version_of={0: VERSIONS[0]})
  with pytest.raises(RolloutError, match='no publication of update 1 is known'):
    kit.run(_batches(rollouts, range(3)))


def test_an_interrupted_batch_is_sampled_again(kit):
  async def main():
    fleet = Fleet(kit, latency=lambda call: 5.0)
    rollouts = _rollouts(kit, fleet)
    sampling = asyncio.ensure_future(rollouts.batch(0))
    await asyncio.sleep(1.0)
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    assert all(sampler.open_sessions == () for sampler in fleet.samplers)
    assert rollouts.state()['cursor']['outstanding'] == [0, 1]
    return await _batches(rollouts, range(2))

  expected = kit.run(_batches(_rollouts(kit, Fleet(kit)), range(2)))
  assert _bytes(kit.run(main())) == _bytes(expected)


@pytest.mark.parametrize('turn', range(0, 60, 7))
def test_a_batch_given_up_at_any_turn_of_the_loop_is_drawn_again(kit, turn):
  """Whether it was handed out or not: what was is taken, and the next is asked for."""

  async def main():
    fleet = Fleet(kit, latency=lambda call: float(int(call.key[0]) % 3))
    rollouts = _rollouts(kit, fleet)
    batches = [await rollouts.batch(0)]
    waiting = asyncio.ensure_future(rollouts.batch(1))
    for _ in range(turn):
      await asyncio.sleep(0.1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert all(sampler.open_sessions == () for sampler in fleet.samplers)
    assert (rollouts.in_flight, rollouts.buffered) == (0, 0)
    if not waiting.cancelled():
      batches.append(waiting.result())
    return batches + await _batches(rollouts, range(len(batches), 4))

  expected = kit.run(_batches(_rollouts(kit, Fleet(kit)), range(4)))
  assert _bytes(kit.run(main())) == _bytes(expected)
