"""The simulated schedule against timelines by hand, and against itself after a resume."""

import asyncio
import dataclasses
import itertools
import json

import numpy as np
import pytest

from mimo.rollouts.backlog import AsyncLimits
from mimo.rollouts.base import RolloutError
from mimo.rollouts.simulated import SimulatedRollouts, needed_update
from mimo.rollouts.virtual import PoolSpeed, VirtualTimes
from mimo.samplers.base import SamplerContract, SamplerError, Step
from mimo.types import Candidates, FinishReason, Source, TurnSample, VersionSpan

# One decode step a second, and nothing else takes time.
SECOND = PoolSpeed(
  session_tokens_per_sec=1.0,
  replica_tokens_per_sec=float('inf'),
  prefill_tokens_per_sec=float('inf'),
  publication_secs=0.0,
)


class SteppedScript:
  """Draws one token per session and step; `script(session, turn)` says what a turn holds.

  Publications are numbered 100 more than the updates they hold.
  """

  def __init__(self, script, *, pool='a', sessions=8, vocab=32):
    self._script = script
    self._turns = {}  # session -> turns begun
    self._running = {}  # session -> [ids to draw, versions of those drawn]
    self.update = None
    self.contract = SamplerContract(
      source=Source(pool, 'H100', 'bf16', 'bf16'),
      logprob_mode='processed',
      logits_dtype='float32',
      vocab_size=vocab,
      max_tokens=64,
      prefix_cache='keep',
      max_sessions=sessions,
    )

  @property
  def busy(self):
    return bool(self._running)

  def submit(self, session, tokens, params, key):
    turn = self._turns[session] = self._turns.get(session, -1) + 1
    self._running[session] = [list(self._script(session, turn)), []]

  def release(self, session):
    self._turns.pop(session, None)
    self._running.pop(session, None)

  def step(self):
    fed = len(self._running)
    finished = []
    for session, (ids, versions) in list(self._running.items()):
      versions.append(100 + self.update)
      if len(versions) == len(ids):
        del self._running[session]
        finished.append((session, _turn(ids, versions)))
    return Step(tuple(finished), int(fed > 0), fed, 0)

  def state(self):
    return {'turns': self._turns, 'running': self._running}

  def restore(self, state):
    self._turns = dict(state['turns'])
    self._running = {
      name: [list(part) for part in parts] for name, parts in state['running'].items()
    }


def _turn(ids, versions):
  if ids == ['fail']:
    return SamplerError('the script fails')
  num = len(ids)
  cuts = [0, *(i for i in range(1, num) if versions[i] != versions[i - 1]), num]
  return TurnSample(
    tokens=np.array(ids, np.int32),
    logps=np.zeros(num, np.float32),
    candidates=Candidates.from_dense(np.array(ids)[:, None], np.zeros((num, 1))),
    full_support=np.ones(num, bool),
    finish=FinishReason.STOP if ids[-1] == 1 else FinishReason.LENGTH,
    spans=tuple(VersionSpan(a, b, versions[a]) for a, b in itertools.pairwise(cuts)),
  )


def _rollouts(kit, samplers, *, speeds=None, times=None, limits=None, state=None, task=None, **kw):
  settings = kit.settings(**{'wall_clock_secs': None, 'groups': 1, 'members': 2} | kw)

  def activate(replica, update):
    samplers[replica].update = update

  return SimulatedRollouts(
    task or kit.TinyTask(),
    samplers,
    settings,
    limits=limits or AsyncLimits(in_flight_batches=1.0, buffered_batches=1.0),
    speeds=speeds or [SECOND] * len(samplers),
    times=times or VirtualTimes(update_secs=0.0, answer_secs=0.0),
    activate=activate,
    update_of={100 + update: update for update in range(100)},
    state=state,
  )


async def _batches(rollouts, updates):
  return [await rollouts.batch(update) for update in updates]


def _stale(batch):
  return [[(r.end - r.start, r.updates) for r in ranges] for ranges in batch.staleness]


def test_times_by_hand(kit):
  """Two sessions of four tokens each share two tokens a second: a step takes a second."""

  async def main():
    sampler = SteppedScript(lambda session, turn: [10, 3, 3, 1])
    speed = PoolSpeed(
      session_tokens_per_sec=10.0,
      replica_tokens_per_sec=2.0,
      prefill_tokens_per_sec=1.0,
      publication_secs=0.0,
    )
    rollouts = _rollouts(
      kit, [sampler], speeds=[speed], times=VirtualTimes(update_secs=7.0, answer_secs=0.0)
    )
    first, second, third = await _batches(rollouts, range(3))
    await rollouts.close()
    assert (first.stats.secs, first.stats.wait_secs) == (4.0, 4.0)
    # The next group ran under the update, and was ready when the trainer asked.
    assert (second.stats.secs, second.stats.wait_secs) == (7.0, 0.0)
    assert (third.stats.secs, third.stats.wait_secs) == (7.0, 0.0)
    assert first.stats.pools['a'].sampled_tokens == 8
    # The third began when the second ended, at 8, and drew its last token at 11, where update 1 was
    # just done; it was trained on by update 2.
    assert _stale(first)[0] == [(4, 0)]
    assert _stale(second)[0] == [(4, 1)]
    assert _stale(third)[0] == [(3, 2), (1, 1)]

  kit.run(main())


def test_a_turn_spans_the_versions_that_arrive_under_it(kit):
  """Six tokens a turn, a token a second; updates take 2 s, their weights arrive 1 s later."""

  async def main():
    sampler = SteppedScript(lambda session, turn: [10, 3, 3, 3, 3, 1])
    speed = dataclasses.replace(SECOND, publication_secs=1.0)
    rollouts = _rollouts(
      kit,
      [sampler],
      speeds=[speed],
      times=VirtualTimes(update_secs=2.0, answer_secs=0.0),
    )
    batches = await _batches(rollouts, range(3))
    await rollouts.close()
    # Handed out at 6, 12, 18. Update 1 is done at 8 and arrives at 9, update 2 at 15.
    assert [batch.stats.secs for batch in batches] == [6.0, 6.0, 6.0]
    assert _stale(batches[0]) == [[(6, 0)]] * 2
    assert _stale(batches[1]) == [[(3, 1), (3, 0)]] * 2
    assert _stale(batches[2]) == [[(3, 1), (3, 0)]] * 2

  kit.run(main())


def test_long_episodes_are_staler(kit):
  """Groups of even number take 2 steps and odd ones 12, in order of their ends."""

  def script(session, turn):
    return [10, *[3] * (0 if int(session.split('/')[0]) % 4 else 6), 1]

  async def main():
    rollouts = _rollouts(
      kit,
      [SteppedScript(script, sessions=16)],
      limits=AsyncLimits(in_flight_batches=4.0, buffered_batches=1.0),
      times=VirtualTimes(update_secs=1.0, answer_secs=0.0),
    )
    batches = await _batches(rollouts, range(40))
    await rollouts.close()
    means = {2: [], 8: []}
    for batch in batches[8:]:
      for trajectory, ranges in zip(batch.trajectories, batch.staleness, strict=True):
        oldest = max(part.updates for part in ranges)
        means[trajectory.num_sampled].append(oldest)
    assert np.mean(means[8]) > np.mean(means[2]) + 1

  kit.run(main())


def test_the_environment_takes_its_time_after_the_first_turn(kit):
  async def main():
    script = lambda session, turn: [12, 1] if turn == 0 else [10, 1]
    rollouts = _rollouts(
      kit,
      [SteppedScript(script)],
      times=VirtualTimes(update_secs=0.0, answer_secs=5.0),
    )
    (batch,) = await _batches(rollouts, range(1))
    await rollouts.close()
    assert batch.stats.secs == 2.0 + 5.0 + 2.0
    assert [len(t.turns) for t in batch.trajectories] == [2, 2]

  kit.run(main())


def test_back_pressure_is_the_asynchronous_driver_s(kit):
  """While an update takes for ever, 1.5 batches in flight and 2 buffered are sampled, no more."""

  async def main():
    task = kit.TinyTask(size=100)
    rollouts = _rollouts(
      kit,
      [SteppedScript(lambda session, turn: [10, 1], sessions=100)],
      task=task,
      groups=4,
      limits=AsyncLimits(in_flight_batches=1.5, buffered_batches=2.0),
      times=VirtualTimes(update_secs=1000.0, answer_secs=0.0),
    )
    first, second = await _batches(rollouts, range(2))
    await rollouts.close()
    assert first.stats.buffered == 2 and first.stats.in_flight == 6
    assert second.stats.buffered == 8 and second.stats.in_flight == 2
    assert task.opened == (4 + 8 + 6) * 2

  kit.run(main())


def _busy(session, turn):
  """Turns of many lengths, some lost at first; some episodes go on for three turns."""
  group, member, number = map(int, session.split('/'))
  if (group + member) % 5 == 0 and number == 0 and turn == 1:
    return ['fail']
  ids = [3] * ((group * 7 + member * 3 + turn) % 5)
  return [12 if turn < (group + member) % 3 else 10 + member % 2, *ids, 1]


def _fleet(kit, state=None, **kw):
  samplers = [SteppedScript(_busy, pool=name, sessions=4) for name in ('a', 'b')]
  speeds = [
    dataclasses.replace(SECOND, publication_secs=2.5),
    dataclasses.replace(SECOND, session_tokens_per_sec=0.7, publication_secs=4.0),
  ]
  return _rollouts(
    kit,
    samplers,
    speeds=speeds,
    groups=2,
    members=3,
    task=kit.TinyTask(size=7),
    limits=AsyncLimits(in_flight_batches=2.0, buffered_batches=2.0),
    times=VirtualTimes(update_secs=2.0, answer_secs=1.3),
    state=state,
    **kw,
  )


def _seen(batch):
  """All that a batch says."""
  return (
    [
      (g.prompt.group, g.prompt.index, [t.tokens.tolist() for t in g.trajectories])
      for g in batch.groups
    ],
    _stale(batch),
    [[turn.spans for turn in t.turns] for t in batch.trajectories],
    [t.source.pool for t in batch.trajectories],
    dataclasses.asdict(batch.stats),
  )


@pytest.fixture(scope='module')
def whole(kit):
  async def main():
    rollouts = _fleet(kit)
    batches = await _batches(rollouts, range(12))
    state = rollouts.state()
    await rollouts.close()
    return [_seen(batch) for batch in batches], state

  return kit.run(main())


def test_a_run_repeats_itself(kit, whole):
  async def main():
    rollouts = _fleet(kit)
    batches = [_seen(batch) for batch in await _batches(rollouts, range(12))]
    assert (batches, rollouts.state()) == whole
    await rollouts.close()

  kit.run(main())
  stats = [seen[-1] for seen in whole[0]]
  assert any(s['retries'] for s in stats) and any(len(s['staleness']) > 2 for s in stats)


@pytest.mark.parametrize('at', [0, 1, 2, 3, 5, 7, 9])
def test_a_resumed_run_is_the_whole_one(kit, whole, at):
  """Twice over: a state that is handed on before it is used is that state."""

  async def main():
    first = _fleet(kit)
    batches = await _batches(first, range(at))
    state = json.loads(json.dumps(first.state()))
    await first.close()
    handed_on = json.loads(json.dumps(_fleet(kit, state, incarnation=1).state()))
    second = _fleet(kit, handed_on, incarnation=2)
    oldest = needed_update(handed_on)
    batches += await _batches(second, range(at, 12))
    assert [_seen(batch) for batch in batches] == whole[0]
    assert second.state()['tally'] == whole[1]['tally']
    assert oldest == -1 if at == 0 else at - 4 <= oldest <= at
    await second.close()

  kit.run(main())


@pytest.mark.parametrize('rounds', [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_a_batch_that_is_cancelled_leaves_a_state_to_go_on_from(kit, whole, rounds):
  async def main():
    first = _fleet(kit)
    batches = await _batches(first, range(5))
    waiting = asyncio.ensure_future(first.batch(5))
    for _ in range(rounds):
      await asyncio.sleep(0)
    if waiting.done():
      batches.append(waiting.result())
    waiting.cancel()
    await asyncio.wait([waiting])
    state = json.loads(json.dumps(first.state()))
    await first.close()
    second = _fleet(kit, state, incarnation=1)
    batches += await _batches(second, range(len(batches), 12))
    assert [_seen(batch) for batch in batches] == whole[0]
    await second.close()

  kit.run(main())


def test_a_failing_environment_ends_the_run(kit):
  class Broken(kit.TinyTask):
    def start(self, split, index):
      raise ZeroDivisionError('a bug')

  async def main():
    rollouts = _rollouts(kit, [SteppedScript(lambda s, t: [10, 1])], task=Broken())
    with pytest.raises(ZeroDivisionError):
      await rollouts.batch(0)
    await rollouts.close()
    with pytest.raises(RolloutError, match='closed'):
      await rollouts.batch(0)

  kit.run(main())


def test_what_cannot_be_meant_is_refused(kit):
  sampler = SteppedScript(lambda s, t: [10, 1])
  with pytest.raises(ValueError, match='expected None'):
    _rollouts(kit, [sampler], wall_clock_secs=3.0)
  with pytest.raises(ValueError, match='expected one each'):
    _rollouts(kit, [sampler], speeds=[SECOND, SECOND])
  with pytest.raises(ValueError, match='replica_tokens_per_sec'):
    dataclasses.replace(SECOND, replica_tokens_per_sec=0.0)
  with pytest.raises(ValueError, match='publication_secs'):
    dataclasses.replace(SECOND, publication_secs=float('inf'))
  with pytest.raises(ValueError, match='update_secs'):
    VirtualTimes(update_secs=-1.0, answer_secs=0.0)
