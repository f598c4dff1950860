import asyncio
import dataclasses
import pathlib

import pytest

from mimo.rollouts.clock import VirtualLoop
from mimo.samplers.engine import EngineStats
from mimo.samplers.pace import DelayedFeed, PoolSpeed
from mimo.types import Version


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
