import asyncio
import dataclasses
import pathlib

import numpy as np
import pytest

from mimo.rollouts.clock import VirtualLoop
from mimo.samplers.engine import EngineSettings, EngineStats
from mimo.samplers.native import NativeSampler
from mimo.samplers.pace import DelayedFeed, PoolSpeed
from mimo.types import Source, Version
from mimo.weights.views import View


@pytest.mark.parametrize(
  ('steps', 'fed', 'secs'),
  [
    (4, 4, 2.0),  # one session: as slow as a session is
    (4, 80, 8.0),  # twenty: as slow as the replica is
    (0, 0, 0.0),
  ],
)
def test_a_step_takes_as_long_as_its_pool_needs(steps, fed, secs):
  speed = PoolSpeed(session_tokens_per_sec=2.0, replica_tokens_per_sec=10.0)
  before = EngineStats(decode_steps=100, idle_row_steps=1000, sampled_tokens=50)
  after = dataclasses.replace(
    before, decode_steps=100 + steps, idle_row_steps=1000 + 30 * steps - fed
  )
  assert speed.secs(before, after, 30) == pytest.approx(secs)


@pytest.mark.parametrize('field', ['session_tokens_per_sec', 'replica_tokens_per_sec'])
def test_a_pool_that_draws_nothing_is_refused(field):
  speeds = {'session_tokens_per_sec': 1.0, 'replica_tokens_per_sec': 1.0}
  with pytest.raises(ValueError, match=f'{field} is 0.0; expected a number > 0'):
    PoolSpeed(**speeds | {field: 0.0})


def test_versions_arrive_after_their_time_and_several_are_under_way():
  class Store:
    def latest(self):
      raise AssertionError('not asked for')

    def open(self, version):
      return pathlib.Path(str(version.number))

  async def main():
    feed, versions = DelayedFeed(Store(), 375.0), [Version(10 + u, 0, u) for u in range(4)]
    assert feed.latest() is None
    feed.arrive(versions[0])
    seen = []
    for version in versions[1:]:  # every 30 s
      await asyncio.sleep(30.0)
      feed.announce(version)
    for at in (404.9, 405.1, 434.9, 435.1, 465.1):
      await asyncio.sleep(at - asyncio.get_running_loop().time())
      seen.append(feed.latest().update)
    assert seen == [0, 1, 1, 2, 3]
    assert feed.open(versions[2]) == pathlib.Path('12')

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    runner.run(main())


@pytest.fixture
def paced(config, make_params):
  """A native sampler on a delayed feed: 2 tokens a second of a session, 3 of all, 4 a step."""
  views = {number: View(config, make_params(number), 'bf16', None) for number in (1, 2)}

  class Store:
    def open(self, version):
      return pathlib.Path(str(version.number))

  feed = DelayedFeed(Store(), 3.0)
  sampler = NativeSampler(
    feed,
    source=Source('p', 'H100', 'bf16', 'bf16'),
    config=config,
    settings=EngineSettings(slots=4, max_tokens=48, kv_cache_dtype='bf16', decode_steps=4),
    pace=PoolSpeed(session_tokens_per_sec=2.0, replica_tokens_per_sec=3.0),
    read_view=lambda path: views[int(str(path))],
  )
  return sampler, feed


def _turn(sampler, name, params):
  """A turn after one known token: each decode step draws a token."""
  key = np.array([1, len(name)], np.uint32)
  return sampler.sample(name, np.array([5], np.int32), params, key)


def test_a_native_sampler_takes_the_time_of_its_pool(paced, sampling):
  sampler, feed = paced

  async def main():
    clock = asyncio.get_running_loop().time
    params = sampling(max_turn_tokens=12)
    feed.arrive(Version(1, 0, 0))
    await sampler.start()
    feed.announce(Version(2, 0, 1))
    alone = await _turn(sampler, 's', params)
    # Three steps of 4 tokens and 2 s each; the version that came at 3 s drew the third.
    assert clock() == 6.0
    assert [(s.start, s.end, s.version) for s in alone.spans] == [(0, 8, 1), (8, 12, 2)]
    await asyncio.gather(*(_turn(sampler, 's' * n, params) for n in (2, 3, 4)))
    assert clock() == 6.0 + 3 * 4 * 3 / 3.0  # three at a time are as slow as the replica
    began = asyncio.ensure_future(_turn(sampler, 's' * 5, params))
    await asyncio.sleep(0.5)
    await _turn(sampler, 's' * 6, params)  # waits for the step that runs: until 20 s
    assert began.done() and clock() == pytest.approx(18.0 + 2.0 + 2 * 8 / 3.0 + 2.0)
    await sampler.close()

  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    runner.run(main())
