"""Properties of the asynchronous source: its bounds, its memory, and what survives kills."""

import asyncio
import collections
import json
import tracemalloc

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mimo.rollouts.base import RolloutError
from mimo.samplers.base import SamplerError


def _group_of(call):
  return int(call.session.split('/')[1])


def _numbers(batch):
  return [group.prompt.group for group in batch.groups]


@pytest.mark.parametrize('fraction', [0.1, 1.3, 2.7])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=15, deadline=None)
def test_the_bounds_are_never_exceeded(kit, fraction, data):
  """Counted apart: groups that any session was opened for, less those handed out or dropped."""
  groups = data.draw(st.integers(1, 4))
  buffered = data.draw(st.sampled_from([1.0, 1.5, 2.0]))
  latencies = data.draw(st.lists(st.sampled_from([0.0, 1.0, 7.0]), min_size=1, max_size=7))
  pauses = data.draw(st.lists(st.sampled_from([0.0, 2.0, 30.0]), min_size=4, max_size=6))
  lost = data.draw(st.sets(st.integers(0, 12), max_size=2))
  max_in_flight = max(1, int(fraction * groups + 1e-9))
  max_buffered = int(buffered * groups)
  opened, gone, ended = set(), set(), set()
  seen = []

  def check():
    out = opened - gone - lost
    seen.append(len(out))
    assert len(out) <= max_in_flight + max_buffered

  async def script(call):
    opened.add(_group_of(call))
    check()
    await asyncio.sleep(latencies[(_group_of(call) + len(call.session)) % len(latencies)])
    if _group_of(call) in lost:
      raise SamplerError('lost')
    ended.add(_group_of(call))
    return [kit.WIN, kit.STOP]

  async def main():
    samplers = [kit.sampler(script, sessions=s, pool=f'{s}') for s in (2, 5)]
    limits = {'in_flight_batches': fraction, 'buffered_batches': buffered}
    rollouts = kit.source(samplers, **limits, prompts_per_update=groups, group_size=2, retries=0)
    for update, pause in enumerate(pauses):
      batch = await rollouts.batch(update)
      gone.update(_numbers(batch))
      check()
      assert rollouts.in_flight <= max_in_flight and rollouts.buffered <= max_buffered
      await asyncio.sleep(pause)
    await asyncio.sleep(1000.0)
    # Left alone, it fills up to its bounds and stops there.
    assert rollouts.in_flight == max_in_flight and rollouts.buffered == max_buffered
    assert len(opened - gone - lost) == max_in_flight + max_buffered
    await rollouts.close()

  kit.run(main())


@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=25, deadline=None)
def test_over_any_number_of_kills_each_prompt_is_trained_once_or_dropped(kit, data):
  trained, lost = [], data.draw(st.sets(st.integers(0, 20), max_size=3))
  state, totals = None, 0

  async def live(state, incarnation):
    """One start: some batches, a checkpoint after each or now and then, then a kill."""

    async def script(call):
      await asyncio.sleep(1.0 + _group_of(call) % 3)
      if _group_of(call) in lost:
        raise SamplerError('lost')
      return [kit.WIN, kit.STOP]

    rollouts = kit.source([kit.sampler(script)], state=state, incarnation=incarnation)
    saved, since = state, []
    for update in range(data.draw(st.integers(0, 4))):
      since += _numbers(await rollouts.batch(update))
      await asyncio.sleep(data.draw(st.sampled_from([0.0, 9.0])))
      if data.draw(st.booleans()):
        saved = json.loads(json.dumps(rollouts.state()))
        trained.extend(since)
        since = []
    await rollouts.close()
    return saved

  for incarnation in range(data.draw(st.integers(1, 4))):
    state = kit.run(live(state, incarnation))
  if state is not None:
    cursor, totals = state['cursor'], state['totals']
    assert len(set(trained)) == len(trained) == totals['groups_trained']
    dropped = set(range(cursor['next'])) - set(trained) - set(cursor['outstanding'])
    assert dropped <= lost and len(dropped) == totals.get('groups_dropped', 0)


@pytest.mark.parametrize(
  ('bound', 'update_of', 'reason'),
  [
    (None, {9: 9}, 'drawn under publication 4, which is abandoned or unknown'),
    (3, {4: 0, 9: 9}, 'staler than 3 updates'),
  ],
)
def test_a_pool_whose_samples_are_never_trained_on_ends_the_run(kit, bound, update_of, reason):
  """Its view failed to publish, after a resume or for long."""

  async def main():
    sampler = kit.sampler(kit.after(1.0), pool='b', version=4)
    limits = {'max_staleness_updates': bound}
    rollouts = kit.source([sampler], **limits, update_of=update_of)
    # 2 groups in flight, 4 buffered and 4 more, of 3 members each.
    message = f'10 groups were dropped one after another.*pool b: {reason}: 30 times'
    for _ in range(2):  # and it stays so
      with pytest.raises(RolloutError, match=message):
        await rollouts.batch(9)
    assert len(sampler.calls) <= 3 * (10 + 2)
    await rollouts.close()

  kit.run(main())


@pytest.mark.parametrize('good', [{0, 8, 16, 24}, {0}])
def test_only_another_group_that_fits_starts_the_count_anew(kit, good):
  """Group 0 alone makes no batch, and is no progress however often it is looked at."""

  async def script(call):
    await asyncio.sleep(1.0)
    sampler.serve(9 if _group_of(call) in good else 4)
    return [kit.WIN, kit.STOP]

  async def main():
    # One group at a time and 4 buffered: 1 + 4 + 4 may be dropped in a row.
    rollouts = kit.source([sampler], update_of={9: 9}, in_flight_batches=0.5)
    if len(good) > 1:
      assert _numbers(await rollouts.batch(9)) == [0, 8]
      assert _numbers(await rollouts.batch(9)) == [16, 24]
    else:
      with pytest.raises(RolloutError, match='9 groups were dropped one after another'):
        await rollouts.batch(9)
    await rollouts.close()

  sampler = kit.sampler(script, sessions=1, version=9)
  kit.run(main())


def test_memory_is_that_of_what_may_be_in_flight_and_buffered(kit):
  """200 rollouts of 100,000 tokens while nobody keeps a batch: what is held is bounded."""
  observation = np.full(49_990, 3, np.int32)

  async def main():
    task = kit.TinyTask(max_tokens=10**6, observation=observation)
    script = lambda call: [kit.GO_ON if call.turn < 2 else kit.WIN, kit.STOP]
    sampler = kit.sampler(script, max_tokens=10**6, sessions=4)
    sampler.calls = collections.deque(maxlen=0)  # or the fake keeps every prompt it is given
    rollouts = kit.source([sampler], task=task, prompts_per_update=4, group_size=5)
    peaks = []
    for update in range(10):
      batch = await rollouts.batch(update)
      assert min(len(t.tokens) for t in batch.trajectories) > 99_980
      size = sum(t.tokens.nbytes + t.sampled.nbytes for t in batch.trajectories)
      del batch
      await asyncio.sleep(10.0)  # the buffer fills
      peaks.append(tracemalloc.get_traced_memory()[0])
    await rollouts.close()
    return size, peaks

  tracemalloc.start()
  try:
    size, peaks = kit.run(main())
    _, highest = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  # 5 groups in flight and 8 buffered of 4 in a batch; a record grows by doubling.
  assert max(peaks) < (5 + 8) / 4 * size * 1.1
  assert highest < (4 + 5 + 8) / 4 * size * 1.2
  assert peaks[-1] < peaks[0] * 1.05
