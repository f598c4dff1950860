import asyncio
import dataclasses

import numpy as np
import pytest

from mimo.rollouts import session
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.samplers.base import SamplerError
from mimo.types import EpisodeEnd, FinishReason, PromptRef, Routes, RouteShape, Turn, VersionSpan

KEY = np.array([1, 2], np.uint32)


def _spec(kit, **changes):
  spec = EpisodeSpec('s', PromptRef(4, 'train', 3), 2, 1, kit.SAMPLING, KEY, 100.0)
  return dataclasses.replace(spec, **changes)


def _play(kit, script, *, task=None, max_tokens=64, routes=None, **changes):
  """Returns (attempt, sampler, task) of one episode, released however it ended."""
  task = task or kit.TinyTask()
  sampler = kit.sampler(script, max_tokens=max_tokens, routes=routes)
  attempt = kit.run(run_episode(task, sampler, _spec(kit, **changes)))
  assert sampler.released == ['s'] and sampler.open_sessions == ()
  assert task.closed == task.opened
  return attempt, sampler, task


def _turns(*turns):
  return lambda call: turns[call.turn]


def test_streams_of_two_turns_by_hand(kit):
  script = _turns([kit.GO_ON, 20, kit.STOP], [kit.WIN, kit.STOP])
  attempt, sampler, task = _play(kit, script)
  t = attempt.trajectory
  # prompt 2 19 | turn 12 20 1 | observation 3 4 | turn 10 1
  assert t.tokens.tolist() == [2, 19, 12, 20, 1, 3, 4, 10, 1]
  assert t.sampled.tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 2
  assert t.turns == (
    Turn(2, 5, FinishReason.STOP, (VersionSpan(2, 5, 0),)),
    Turn(7, 9, FinishReason.STOP, (VersionSpan(7, 9, 0),)),
  )
  assert t.logps.dtype == np.float32 and t.tokens.dtype == np.int32
  np.testing.assert_allclose(t.logps, np.log(0.5), rtol=1e-6)
  assert t.candidates.row(4)[0].tolist() == [kit.STOP, kit.STOP + 1] and len(t.candidates) == 5
  assert t.full_support.tolist() == [True] * 5 and t.full_support.dtype == bool
  assert (t.end, t.reward, attempt.error) == (EpisodeEnd.SUBMITTED, 1.0, None)
  assert (t.prompt, t.member, t.incarnation) == (PromptRef(4, 'train', 3), 2, 1)
  assert t.source == sampler.contract.source and t.sampling == kit.SAMPLING
  assert (t.logprob_mode, t.prefix_cache) == ('processed', 'keep')
  # Ids go in and out: each turn's prompt extends the ids before it, exactly.
  assert [call.tokens.tolist() for call in sampler.calls] == [[2, 19], [2, 19, 12, 20, 1, 3, 4]]
  assert all(call.key is KEY for call in sampler.calls)
  assert task.steps == [([12, 20, 1], FinishReason.STOP), ([10, 1], FinishReason.STOP)]


SHAPE = RouteShape(layers=2, experts=7, per_token=3)


def test_routes_of_two_turns_by_hand(kit):
  """Token t goes to experts t, t + 1, t + 2 in layer 0; a turn's last one runs in the next."""
  script = _turns([kit.GO_ON, 20, kit.STOP], [kit.WIN, kit.STOP])
  t = _play(kit, script, routes=SHAPE)[0].trajectory
  assert t.routes.shape == (9, 2, 3) and t.routes.dtype == np.int16
  assert t.routes[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, -1]
  assert t.routes[:, 1, 2].tolist() == [3, 4, 5, 6, 0, 1, 2, 3, -1]
  assert _play(kit, script)[0].trajectory.routes is None


def test_routes_that_are_shifted_lose_the_episode_by_name(kit):
  shifted = Routes(1, np.zeros((3, 2, 3), np.int16))
  script = lambda call: _one_turn(kit, routes=shifted)
  attempt, _, task = _play(kit, script, routes=SHAPE)
  assert attempt.error == (
    'routes of tokens [1, 4); expected [0, 3): those not told yet that were run'
  )
  assert attempt.trajectory.end is EpisodeEnd.SAMPLER_FAILURE and not task.steps


def test_versions_that_change_between_and_within_turns(kit):
  sampler = None

  def script(call):
    sampler.serve(call.turn + 5)  # after the call's first half
    return [kit.GO_ON, 20, kit.STOP] if call.turn == 0 else [kit.WIN, kit.STOP]

  sampler = kit.sampler(script, version=4)
  attempt = kit.run(run_episode(kit.TinyTask(), sampler, _spec(kit)))
  assert attempt.trajectory.versions().tolist() == [4, 4, 5, 5, 6]
  assert attempt.trajectory.turns[1].spans == (VersionSpan(7, 8, 5), VersionSpan(8, 9, 6))


@pytest.mark.parametrize(
  ('first', 'end', 'reward'),
  [
    (10, EpisodeEnd.SUBMITTED, 1.0),
    (11, EpisodeEnd.SUBMITTED, 0.0),
    (13, EpisodeEnd.MALFORMED, 0.0),
  ],
)
def test_ends_of_the_environment_are_scored(kit, first, end, reward):
  attempt, _, _ = _play(kit, _turns([first, kit.STOP]))
  assert (attempt.trajectory.end, attempt.trajectory.reward, attempt.error) == (end, reward, None)


def test_the_turn_limit_is_the_environments(kit):
  """A turn cut at its own limit goes to the environment, which says what it makes of it."""
  attempt, _, task = _play(kit, _turns([kit.GO_ON] + [20] * 20))
  assert task.steps == [([kit.GO_ON] + [20] * 7, FinishReason.LENGTH)]
  assert attempt.trajectory.end is EpisodeEnd.MALFORMED


@pytest.mark.parametrize('limited', ['task', 'sampler'])
def test_a_trajectory_never_outgrows_the_token_limit(kit, limited):
  task = kit.TinyTask(max_tokens=9 if limited == 'task' else 64)
  script = _turns([kit.GO_ON, kit.STOP], [kit.GO_ON, 20, 21, 22, 23, kit.STOP])
  attempt, sampler, _ = _play(kit, script, task=task, max_tokens=9 if limited == 'sampler' else 64)
  t = attempt.trajectory
  # 2 prompt, 2 sampled, 2 observed: the second turn has room for 3.
  assert t.tokens.tolist() == [2, 19, 12, 1, 3, 4, 12, 20, 21]
  assert (t.end, t.reward, attempt.error) == (EpisodeEnd.TOKEN_LIMIT, 0.0, None)
  assert t.sampling == kit.SAMPLING and sampler.calls[1].params.max_turn_tokens == 3
  assert len(task.steps) == 1  # what the limit cut is not put to the environment


@pytest.mark.parametrize('limit', [6, 7])
def test_an_observation_that_fills_the_limit_is_left_out(kit, limit):
  task = kit.TinyTask(max_tokens=limit, observation=(3, 4, 5))
  attempt, _, _ = _play(kit, _turns([kit.GO_ON, kit.STOP]), task=task)
  t = attempt.trajectory
  assert (t.end, t.tokens.tolist()) == (EpisodeEnd.TOKEN_LIMIT, [2, 19, 12, 1])


def test_submitting_with_the_last_token_counts(kit):
  attempt, _, _ = _play(kit, _turns([kit.WIN, kit.STOP]), task=kit.TinyTask(max_tokens=4))
  assert (attempt.trajectory.end, attempt.trajectory.reward) == (EpisodeEnd.SUBMITTED, 1.0)


def test_a_prompt_that_fills_the_limit_is_a_mistake(kit):
  with pytest.raises(ValueError, match=r'pool a: the prompt of train-3 holds 2 tokens; .* than 2'):
    _play(kit, kit.win, task=kit.TinyTask(max_tokens=2))


def test_a_hung_sampler_ends_by_the_wall_clock(kit):
  async def main():
    async def hang(call):
      await asyncio.get_running_loop().create_future()

    task, sampler = kit.TinyTask(), kit.sampler(hang)
    attempt = await run_episode(task, sampler, _spec(kit, wall_clock_secs=3600.0))
    assert asyncio.get_running_loop().time() == 3600.0
    assert attempt.trajectory.end is EpisodeEnd.WALL_CLOCK
    assert attempt.error == 'no end within 3600.0 s'
    assert sampler.released == ['s'] and task.closed == 1

  kit.run(main())


def test_a_hung_environment_ends_by_the_wall_clock_and_keeps_what_was_sampled(kit):
  script = _turns([kit.GO_ON, kit.STOP], [kit.HANG, 20, kit.STOP])
  attempt, _, _ = _play(kit, script)
  assert attempt.trajectory.end is EpisodeEnd.WALL_CLOCK
  assert attempt.trajectory.num_sampled == 5 and attempt.trajectory.reward == 0.0


def test_slow_is_not_hung(kit):
  attempt, _, _ = _play(kit, kit.after(99.0))
  assert attempt.trajectory.end is EpisodeEnd.SUBMITTED


def test_no_wall_clock_waits_as_long_as_it_takes(kit):
  attempt, _, _ = _play(kit, kit.after(1e6), wall_clock_secs=None)
  assert attempt.trajectory.end is EpisodeEnd.SUBMITTED


def test_failures_are_named_and_never_scored(kit):
  def fail(call):
    raise SamplerError('the replica is gone')

  attempt, _, _ = _play(kit, fail)
  assert attempt.trajectory.end is EpisodeEnd.SAMPLER_FAILURE
  assert attempt.error == 'the replica is gone'
  attempt, _, _ = _play(kit, _turns([kit.BREAK, kit.STOP]))
  assert attempt.trajectory.end is EpisodeEnd.ENVIRONMENT_FAILURE
  assert attempt.error == 'the stack machine broke'
  assert attempt.trajectory.num_sampled == 2


async def _one_turn(kit, **changes):
  """A good turn as the scripted sampler makes it, changed."""
  turn = await kit.sampler(kit.win).sample('x', np.array([2], np.int32), kit.SAMPLING, KEY)
  return dataclasses.replace(turn, **changes)


def test_an_aborted_turn_is_a_failure_with_its_tokens_counted(kit):
  script = lambda call: _one_turn(kit, finish=FinishReason.ABORT)
  attempt, _, task = _play(kit, script)
  assert attempt.trajectory.end is EpisodeEnd.SAMPLER_FAILURE
  assert attempt.error == 'the sampler aborted a turn after 2 tokens'
  assert attempt.trajectory.num_sampled == 2 and task.steps == []


def test_a_sampler_that_breaks_the_contract_fails_by_name(kit):
  """Also where the environment has already given a reward."""
  attempt, _, _ = _play(kit, lambda call: _one_turn(kit, spans=()))
  assert attempt.error == 'version spans cover 0 tokens; expected 2'
  wrong = np.full(2, -0.1, np.float32)
  attempt, _, task = _play(kit, lambda call: _one_turn(kit, logps=wrong))
  assert len(task.steps) == 1 and "nats off its candidate's" in attempt.error
  assert attempt.trajectory.end is EpisodeEnd.SAMPLER_FAILURE
  assert attempt.trajectory.reward == 0.0


@pytest.mark.parametrize(
  ('end', 'reward', 'message'),
  [
    (EpisodeEnd.SUBMITTED, float('nan'), 'ended as submitted is nan; expected a number in'),
    (EpisodeEnd.SUBMITTED, 1.5, 'is 1.5; expected a number in'),
    (EpisodeEnd.TURN_LIMIT, 1.0, 'ended as turn_limit is 1.0; expected 0'),
  ],
)
def test_an_impossible_reward_is_the_environments_failure(kit, monkeypatch, end, reward, message):
  task = _ending(kit, monkeypatch, end, reward)
  attempt, _, _ = _play(kit, kit.win, task=task)
  assert attempt.trajectory.end is EpisodeEnd.ENVIRONMENT_FAILURE
  assert message in attempt.error and attempt.trajectory.reward == 0.0


def test_an_environment_may_lose_an_episode_itself(kit, monkeypatch):
  task = _ending(kit, monkeypatch, EpisodeEnd.WALL_CLOCK, 0.0)
  attempt, _, _ = _play(kit, kit.win, task=task)
  assert attempt.trajectory.end is EpisodeEnd.WALL_CLOCK
  assert attempt.error == 'the environment ended the episode as wall_clock'


def _ending(kit, monkeypatch, end, reward):
  from mimo.tasks.base import StepResult

  task = kit.TinyTask()
  start = task.start

  def ending(split, index):
    episode = start(split, index)

    async def step(tokens, finish):
      return StepResult(np.zeros(0, np.int32), end, reward)

    monkeypatch.setattr(episode, 'step', step)
    return episode

  monkeypatch.setattr(task, 'start', ending)
  return task


def test_bugs_and_cancels_pass_through_and_still_release(kit, monkeypatch):
  async def main():
    async def hang(call):
      await asyncio.get_running_loop().create_future()

    task, sampler = kit.TinyTask(), kit.sampler(hang)
    playing = asyncio.ensure_future(run_episode(task, sampler, _spec(kit)))
    await asyncio.sleep(1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
      await playing
    assert sampler.released == ['s'] and task.closed == 1

    sampler, task = kit.sampler(kit.win), kit.TinyTask()

    async def bug(*_):
      raise TimeoutError('of something else')

    monkeypatch.setattr(sampler, 'sample', bug)
    with pytest.raises(TimeoutError, match='of something else'):
      await run_episode(task, sampler, _spec(kit))
    assert sampler.released == ['s'] and task.closed == 1

  kit.run(main())


def test_a_release_that_hangs_or_fails_costs_nothing_but_a_note(kit, monkeypatch):
  async def main():
    sampler = kit.sampler(kit.win)

    async def hang(name):
      await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(sampler, 'release', hang)
    attempt = await run_episode(kit.TinyTask(), sampler, _spec(kit))
    assert asyncio.get_running_loop().time() == session.CLEANUP_SECS
    assert attempt.trajectory.reward == 1.0 and attempt.error is None
    assert attempt.cleanup_errors == ('a release took more than 30.0 s',)

    async def fail(name):
      raise SamplerError('gone')

    monkeypatch.setattr(sampler, 'release', fail)
    attempt = await run_episode(kit.TinyTask(), sampler, _spec(kit, session='t'))
    assert attempt.cleanup_errors == ('a release failed: gone',)

  kit.run(main())


def test_the_record_handed_to_a_sampler_is_read_only_and_keeps(kit):
  """Views of a growing record never change, not even where it has to move."""
  task = kit.TinyTask(max_tokens=10**6, observation=range(2, 902))
  script = lambda call: [kit.GO_ON if call.turn < 5 else kit.WIN, kit.STOP]
  attempt, sampler, _ = _play(kit, script, task=task, max_tokens=10**6)
  tokens = attempt.trajectory.tokens
  assert len(tokens) == 2 + 6 * 2 + 5 * 900
  for call in sampler.calls:
    np.testing.assert_array_equal(call.tokens, tokens[: len(call.tokens)])
  with pytest.raises(ValueError, match='read-only'):
    sampler.calls[0].tokens[0] = 5


def test_a_thousand_turns_hold_no_more_than_their_arrays(kit):
  """Memory is that of the streams, whatever the number of turns."""
  import tracemalloc

  turns = 1000
  task = kit.TinyTask(max_tokens=10**6, observation=range(2, 92))
  draw = [kit.GO_ON, *[20] * 6, kit.STOP]

  async def main():
    sampler = kit.sampler(
      lambda call: draw if call.turn < turns - 1 else [kit.WIN, kit.STOP], max_tokens=10**6
    )
    tracemalloc.start()
    try:
      attempt = await run_episode(task, sampler, _spec(kit))
      sampler.calls.clear()
      sampler.released.clear()
      task.steps.clear()
      held, _ = tracemalloc.get_traced_memory()
    finally:
      tracemalloc.stop()
    return attempt.trajectory, held

  t, held = kit.run(main())
  assert len(t.turns) == turns and len(t.tokens) == 98 * turns - 94
  arrays = [t.tokens, t.sampled, t.logps, t.full_support]
  arrays += [t.candidates.offsets, t.candidates.ids, t.candidates.logps]
  streams = sum(array.nbytes for array in arrays)
  assert held < streams + 500 * turns  # a turn's own record
