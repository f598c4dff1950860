import asyncio

import numpy as np
import pytest

from mimo.samplers.base import Sampler, SamplerContract, SamplerError
from mimo.samplers.scripted import ScriptedSampler
from mimo.types import FinishReason, SamplingParams, Source

STOP = 9
PARAMS = SamplingParams(
  temperature=1.0, top_p=1.0, top_k=0, candidates=4, max_turn_tokens=5, stop_ids=(STOP,)
)
KEY = np.array([0, 1], np.uint32)


def contract(max_sessions: int = 4, max_tokens: int = 20) -> SamplerContract:
  return SamplerContract(
    source=Source('p', 'H100', 'bf16', 'bf16'),
    logprob_mode='processed',
    logits_dtype='float32',
    vocab_size=10,
    max_tokens=max_tokens,
    prefix_cache='keep',
    max_sessions=max_sessions,
  )


def ids(*values: int) -> np.ndarray:
  return np.array(values, np.int32)


def test_turns_extend_and_are_recorded():
  async def scenario():
    sampler: Sampler = ScriptedSampler(contract(), lambda call: [[3, STOP, 4], [5] * 7][call.turn])
    await sampler.start()
    first = await sampler.sample('s', ids(1, 2), PARAMS, KEY)
    second = await sampler.sample('s', ids(1, 2, 3, STOP, 7), PARAMS, KEY)
    return first, second

  first, second = asyncio.run(scenario())
  assert first.tokens.tolist() == [3, STOP] and first.finish is FinishReason.STOP
  assert second.tokens.tolist() == [5] * 5 and second.finish is FinishReason.LENGTH
  assert first.logps == pytest.approx(np.log([0.5, 0.5]))
  assert first.candidates.row(1)[0].tolist() == [STOP, 0]
  assert first.full_support.all() and first.logps.dtype == np.float32
  assert [(s.start, s.end, s.version) for s in second.spans] == [(0, 5, 0)]


def test_one_candidate_is_a_head():
  async def scenario():
    sampler = ScriptedSampler(contract(), lambda call: [3])
    params = SamplingParams(
      temperature=1.0, top_p=1.0, top_k=0, candidates=1, max_turn_tokens=5, stop_ids=()
    )
    return await sampler.sample('s', ids(1), params, KEY)

  turn = asyncio.run(scenario())
  assert turn.candidates.ids.tolist() == [3] and not turn.full_support.any()


def test_tokens_must_extend_the_session():
  async def scenario():
    sampler = ScriptedSampler(contract(), lambda call: [3])
    await sampler.sample('s', ids(1), PARAMS, KEY)
    with pytest.raises(SamplerError, match='session s: tokens do not extend the 2 held'):
      await sampler.sample('s', ids(1, 4, 5), PARAMS, KEY)
    await sampler.release('s')
    await sampler.sample('s', ids(1, 4, 5), PARAMS, KEY)
    with pytest.raises(SamplerError, match='20 tokens; expected fewer than 20'):
      await sampler.sample('t', np.ones(20, np.int32), PARAMS, KEY)
    return sampler

  sampler = asyncio.run(scenario())
  assert sampler.released == ['s'] and 's' in sampler.open_sessions


def test_failures_reach_the_caller():
  async def scenario():
    def script(call):
      raise SamplerError('gone') if call.turn == 0 and call.session == 'a' else KeyError('k')

    sampler = ScriptedSampler(contract(), script)
    with pytest.raises(SamplerError, match=r'^gone$'):
      await sampler.sample('a', ids(1), PARAMS, KEY)
    with pytest.raises(SamplerError, match="session b: KeyError: 'k'"):
      await sampler.sample('b', ids(1), PARAMS, KEY)

  asyncio.run(scenario())


def test_a_version_served_midway_splits_the_turn():
  async def scenario():
    go = asyncio.Event()

    async def script(call):
      await go.wait()
      return [1, 2, 3, 4, 5]

    sampler = ScriptedSampler(contract(), script, version=4)
    turn = asyncio.ensure_future(sampler.sample('s', ids(1), PARAMS, KEY))
    await asyncio.sleep(0.01)
    sampler.serve(6)
    go.set()
    return await turn, sampler.version

  turn, version = asyncio.run(scenario())
  assert version == 6
  assert [(s.start, s.end, s.version) for s in turn.spans] == [(0, 3, 4), (3, 5, 6)]


def test_places_are_bounded_and_start_waits_for_a_version():
  async def scenario():
    async def script(call):
      await asyncio.sleep(0.001)
      return [STOP]

    sampler = ScriptedSampler(contract(max_sessions=2), script, version=None)
    with pytest.raises(SamplerError, match='before the first version'):
      await sampler.sample('s', ids(1), PARAMS, KEY)
    start = asyncio.ensure_future(sampler.start())
    await asyncio.sleep(0.001)
    assert not start.done()
    sampler.serve(3)
    await start
    await asyncio.gather(*(sampler.sample(f's{i}', ids(1), PARAMS, KEY) for i in range(6)))
    return sampler

  sampler = asyncio.run(scenario())
  assert sampler.peak_sessions == 2
  assert [call.session for call in sampler.calls] == [f's{i}' for i in range(6)]


def test_close_ends_turns_in_flight():
  async def scenario():
    async def script(call):
      await asyncio.sleep(60)
      return [1]

    sampler = ScriptedSampler(contract(max_sessions=1), script)
    turns = [asyncio.ensure_future(sampler.sample(s, ids(1), PARAMS, KEY)) for s in 'ab']
    await asyncio.sleep(0.001)
    await sampler.close()
    results = await asyncio.gather(*turns, return_exceptions=True)
    assert all(isinstance(r, SamplerError) and 'closed' in str(r) for r in results)
    with pytest.raises(SamplerError, match='closed'):
      await sampler.sample('c', ids(1), PARAMS, KEY)

  asyncio.run(scenario())
