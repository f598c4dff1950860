"""A simulated run that is killed and draws again what led to its checkpoint is the whole one.

Samplers, weights and checkpoints are stand-ins here; tests/experiments/test_simulated_run.py has a
whole run.
"""

import asyncio
import dataclasses
import hashlib
import json

import pytest

from mimo.rollouts import clock
from mimo.samplers.base import SamplerError
from mimo.samplers.pace import DelayedFeed
from mimo.types import Version

_UPDATES = 8
_SAVE_EVERY = 3
_UPDATE_SECS = 3.0
_SETTLE_SECS = 1e-6


class Killed(BaseException):
  """The process is gone: nothing that follows may write."""


class Disk:
  """What outlives a process."""

  def __init__(self):
    self.saved = (0, 0)  # updates applied, and the weights that they made
    self.store = {}  # update -> weights published for it
    self.records = []  # one per update

  def begin(self):
    start, _ = self.saved
    self.records = self.records[:start]
    return start


def _digest(*parts):
  return int(hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8], 16)


class Follower:
  """A sampler that serves what its feed has; it draws by key, place and weights."""

  def __init__(self, kit, disk, pool, *, publication_secs, sessions):
    self.feed = DelayedFeed(None, publication_secs)
    self.sampler = kit.sampler(self._script, pool=pool, sessions=sessions)
    self._kit, self._disk = kit, disk
    self._arrive, self.feed.arrive = self.feed.arrive, self.arrive

  def arrive(self, version):
    self._arrive(version)
    self.sampler.serve(version.number)

  async def _script(self, call):
    kit, update = self._kit, self.feed.latest().update
    drawn = _digest(call.key.tolist(), len(call.tokens), self._disk.store[update])
    await asyncio.sleep(0.5 * (1 + drawn % 5))
    if drawn % 17 == 0 and call.session.endswith('/0'):
      raise SamplerError('lost')
    return [(kit.WIN, kit.LOSE, kit.GO_ON, kit.GO_ON)[drawn % 4], 16 + drawn % 9, kit.STOP]


def _seen(batch):
  """All that a batch says but which start drew it."""
  groups = [
    (g.prompt.group, [(t.tokens.tolist(), t.source.pool, t.reward) for t in g.trajectories])
    for g in batch.groups
  ]
  stats = dataclasses.asdict(batch.stats)
  return json.loads(json.dumps([groups, batch.staleness, stats], default=str))


async def live(kit, disk, *, evaluations=()):
  """One start of a run: to its end, or until it is killed."""
  start, incarnation = disk.begin(), disk.store.get('starts', 0)
  disk.store['starts'] = incarnation + 1
  disk.store[start] = disk.saved[1]  # published anew, under another number
  version_of = {
    update: Version(100 * incarnation + update if update >= start else update, 0, update)
    for update in range(start + 1)
  }
  update_of = {version.number: version.update for version in version_of.values()}
  fleet = [
    Follower(kit, disk, 'a', publication_secs=2.5, sessions=4),
    Follower(kit, disk, 'b', publication_secs=4.0, sessions=3),
  ]
  for follower in fleet:
    follower.arrive(version_of[0])
  options = {'schedule': 'simulated', 'in_flight_batches': 2.0, 'incarnation': incarnation}
  source = kit.source(
    [follower.sampler for follower in fleet], update_of=update_of, version_of=version_of, **options
  )

  def announce(update):
    for follower in fleet:
      follower.feed.announce(version_of[update])

  try:
    for update in range(start):
      await source.batch(update)
      await asyncio.sleep(_UPDATE_SECS + _SETTLE_SECS)
      announce(update + 1)
    weights = disk.saved[1]
    for update in range(start, _UPDATES):
      if update in evaluations:
        await _evaluation()
      batch = await source.batch(update)
      seen = _seen(batch)
      weights = _digest(weights, seen)
      await asyncio.sleep(_UPDATE_SECS + _SETTLE_SECS)
      version = Version(100 * incarnation + update + 1, 0, update + 1)
      version_of[update + 1], update_of[version.number] = version, update + 1
      disk.store[update + 1] = weights
      announce(update + 1)
      disk.records.append([seen, weights, asyncio.get_running_loop().time()])
      if (update + 1) % _SAVE_EVERY == 0:
        disk.saved = (update + 1, weights)
  finally:
    await source.close()


async def _evaluation():
  """Takes many turns of the loop, sets and cancels timers, and no time."""

  async def episode():
    for _ in range(20):
      async with asyncio.timeout(30.0):
        await asyncio.sleep(0)

  await asyncio.gather(*(episode() for _ in range(30)))


class _KillingLoop(clock.VirtualLoop):
  """Ends everything at one of its turns, counted from 1."""

  def __init__(self, at):
    self.turns = 0
    super().__init__()
    poll = self._jumping.select

    def select(timeout=None):
      self.turns += 1
      if self.turns == at:
        raise Killed
      return poll(timeout)

    self._jumping.select = select


def _run(kit, disk, at=None, **kw):
  """Returns the turns that the loop took."""
  with asyncio.Runner(loop_factory=lambda: _KillingLoop(at)) as runner:
    loop = runner.get_loop()
    runner.run(live(kit, disk, **kw))
    return loop.turns


@pytest.fixture(scope='module')
def whole(kit):
  disk = Disk()
  return disk, _run(kit, disk)


def test_the_run_is_worth_killing(whole):
  """It holds sessions that span versions, staleness of several updates, and retries."""
  disk, turns = whole
  stats = [seen[2] for seen, _, _ in disk.records]
  assert len(disk.records) == _UPDATES and turns > 300
  assert any(s['retries'] for s in stats) and any(len(s['staleness']) > 2 for s in stats)
  assert all(s['in_flight'] for s in stats)
  assert len({weights for _, weights, _ in disk.records}) == _UPDATES


def test_killed_at_every_seventh_turn_it_ends_the_same(kit, whole):
  """Killed there, and again as late in the second start; the third goes to the end."""
  disk, turns = whole
  for at in range(7, turns, 7):
    broken = Disk()
    for _ in range(2):
      with pytest.raises(Killed):
        _run(kit, broken, at)
    _run(kit, broken)
    assert broken.records == disk.records, f'killed at turn {at}'
    assert {u: broken.store[u] for u in range(_UPDATES)} == {
      u: disk.store[u] for u in range(_UPDATES)
    }


def test_an_evaluation_leaves_no_trace(kit, whole):
  other = Disk()
  assert _run(kit, other, evaluations=range(_UPDATES)) > whole[1]
  assert other.records == whole[0].records
