import asyncio
import contextlib
import pathlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from mimo.models.decoder import extend, head_matrix, init_cache
from mimo.models.table import named_tensors
from mimo.samplers.base import Sampler, SamplerError, check_contract
from mimo.samplers.engine import EngineSettings
from mimo.samplers.native import NativeSampler
from mimo.types import Source, Version
from mimo.weights.views import View, ViewSpec, read_view, write_view

KEY = np.array([1, 2], np.uint32)


class Feed:
  """Versions in memory: a version's path is its number, and `read` looks it up."""

  def __init__(self, config, make_params):
    self.newest = None
    self.views = {}
    self.opened = []
    self._config, self._make_params = config, make_params

  def publish(self, number, seed=0):
    self.newest = Version(number, 0, number)
    self.views[number] = View(self._config, self._make_params(seed), 'bf16', None)
    return self.newest

  def latest(self):
    return self.newest

  def open(self, version):
    self.opened.append(version.number)
    if version.number not in self.views:
      raise ValueError(f'shard of {version.number} is corrupt')
    return pathlib.Path(str(version.number))

  def read(self, path):
    return self.views[int(str(path))]


@pytest.fixture
def feed(config, make_params):
  return Feed(config, make_params)


@pytest.fixture
def make_sampler(config, feed):
  def make(executor=None, prefix_cache='keep', **changes):
    settings = EngineSettings(
      slots=3,
      max_tokens=48,
      kv_cache_dtype='bf16',
      prefix_cache=prefix_cache,
      decode_steps=4,
      prefill_rows=2,
      prefill_tokens=8,
    )
    values = {
      'source': Source('p', 'H100', 'bf16', 'bf16'),
      'config': config,
      'settings': settings,
      'executor': executor,
      'poll_secs': 0.001,
      'read_view': feed.read,
    }
    return NativeSampler(feed, **(values | changes))

  return make


def prompt(length, seed=0):
  return np.random.default_rng([length, seed]).integers(0, 48, length).astype(np.int32)


def key(number):
  return np.array([7, number], np.uint32)


@contextlib.asynccontextmanager
async def started(sampler):
  await sampler.start()
  try:
    yield sampler
  finally:
    await sampler.close()


async def episode(sampler, number, params, turns=3):
  """A session with an environment that answers two ids to each turn."""
  tokens, samples = prompt(4 + number % 3, number), []
  for _ in range(turns):
    sample = await sampler.sample(f's{number}', tokens, params, key(number))
    samples.append(sample)
    tokens = np.concatenate([tokens, sample.tokens, prompt(2, number)])
    for _ in range(number % 3):
      await asyncio.sleep(0)
  await sampler.release(f's{number}')
  return samples


def test_the_contract_is_stated(make_sampler, feed):
  sampler: Sampler = make_sampler(prefix_cache='drop')
  contract = sampler.contract
  check_contract(contract, logits_dtype='float32', vocab_size=48)
  assert contract.source == Source('p', 'H100', 'bf16', 'bf16')
  assert (contract.max_tokens, contract.max_sessions) == (48, 3)
  assert contract.prefix_cache == 'drop'
  with pytest.raises(ValueError, match=r"pool p: kv_cache_dtype is 'bf16'; expected 'fp8'"):
    make_sampler(source=Source('p', 'H100', 'bf16', 'fp8'))


def test_no_traffic_before_the_first_activation(make_sampler, feed, sampling):
  async def scenario():
    sampler = make_sampler()
    with pytest.raises(SamplerError, match='pool p: session s came before'):
      await sampler.sample('s', prompt(3), sampling(), KEY)
    with pytest.raises(SamplerError, match='no version is served yet'):
      _ = sampler.version
    start = asyncio.ensure_future(sampler.start())
    await asyncio.sleep(0.01)
    assert not start.done()
    feed.publish(4)
    await start
    assert sampler.version == 4
    await sampler.close()

  asyncio.run(scenario())


def test_start_fails_by_name_when_the_first_version_cannot_be_served(make_sampler, feed):
  async def scenario():
    feed.publish(4)
    del feed.views[4]
    sampler = make_sampler()
    with pytest.raises(SamplerError, match=r'pool p: version 4 .*: shard of 4 is corrupt'):
      await sampler.start()
    feed.publish(5)
    await sampler.start()
    assert sampler.version == 5 and sampler.stats.failures == {'load': 1}
    await sampler.close()

  asyncio.run(scenario())


@pytest.mark.parametrize('threads', [False, True])
def test_many_sessions_are_served_alike_inline_and_in_a_thread(
  make_sampler, feed, sampling, threads
):
  """What is drawn does not depend on arrival, on waiting for slots, or on who shares the thread."""
  feed.publish(0)

  async def alone():
    async with started(make_sampler()) as sampler:
      return [await episode(sampler, n, sampling()) for n in range(7)]

  async def together():
    with ThreadPoolExecutor(1) as executor:
      shared = executor if threads else None
      async with started(make_sampler(shared)) as one, started(make_sampler(shared)) as two:
        order = [4, 0, 6, 2, 5, 1, 3]
        jobs = {n: episode(one if n % 2 else two, n, sampling()) for n in order}
        samples = dict(zip(jobs, await asyncio.gather(*jobs.values()), strict=True))
        return [samples[n] for n in range(7)]

  for first, second in zip(asyncio.run(alone()), asyncio.run(together()), strict=True):
    for a, b in zip(first, second, strict=True):
      assert a.tokens.tolist() == b.tokens.tolist()
      np.testing.assert_allclose(a.logps, b.logps, atol=5e-3)  # bf16 keys may round apart


def test_a_new_version_is_picked_up_under_running_turns(make_sampler, feed, sampling):
  feed.publish(3)

  async def scenario():
    async with started(make_sampler()) as sampler:
      turn = asyncio.ensure_future(
        sampler.sample('s', prompt(3), sampling(max_turn_tokens=30), KEY)
      )
      while sampler.stats.engine.sampled_tokens == 0:
        await asyncio.sleep(0)
      feed.publish(8, seed=1)
      return await turn, sampler.version, sampler.stats

  sample, version, stats = asyncio.run(scenario())
  assert [span.version for span in sample.spans] == [3, 8] and version == 8
  assert sample.spans[0].end == sample.spans[1].start > 0 and sample.spans[1].end == 30
  assert stats.activations == 2 and stats.failures == {}


def test_a_view_that_fails_leaves_the_old_one_serving(make_sampler, feed, sampling, caplog):
  feed.publish(3)

  async def scenario():
    async with started(make_sampler()) as sampler:
      feed.publish(4)
      del feed.views[4]
      samples = await asyncio.gather(*(episode(sampler, n, sampling()) for n in range(9)))
      opened = feed.opened.count(4)
      assert sampler.version == 3
      assert 2 <= opened < 8  # tried again, but ever less often
      feed.newest = None  # an empty answer is no reason to stop
      await episode(sampler, 10, sampling())
      feed.publish(5)
      last = await episode(sampler, 11, sampling())
      return samples, last, sampler.stats.failures['load'] == opened

  samples, last, counted = asyncio.run(scenario())
  assert {span.version for turns in samples for turn in turns for span in turn.spans} == {3}
  assert {span.version for turn in last for span in turn.spans} == {5}
  assert counted and 'pool p: version 4 cannot be served: shard of 4 is corrupt' in caplog.text


def test_a_pinned_version_is_held(make_sampler, feed, sampling):
  first = feed.publish(3)

  async def scenario():
    async with started(make_sampler()) as sampler:
      await sampler.pin(first)
      second = feed.publish(4)
      one = await episode(sampler, 0, sampling())
      await sampler.pin(second)
      assert sampler.version == 4
      await sampler.pin(first)  # back again, as lockstep and evaluation need
      two = await episode(sampler, 1, sampling())
      with pytest.raises(SamplerError, match='version 9 cannot be served'):
        await sampler.pin(Version(9, 0, 9))
      assert sampler.version == 3
      await sampler.pin(None)
      three = await episode(sampler, 2, sampling())
      return one, two, three

  versions = [
    {span.version for turn in turns for span in turn.spans} for turns in asyncio.run(scenario())
  ]
  assert versions == [{3}, {3}, {4}]


def test_an_engine_that_fails_ends_its_turns_and_goes_on(make_sampler, feed, sampling, monkeypatch):
  feed.publish(0)

  async def scenario():
    async with started(make_sampler()) as sampler:
      engine_step, calls = sampler._engine.step, []

      def step():
        calls.append(None)
        if len(calls) == 2:
          raise RuntimeError('out of memory')
        return engine_step()

      monkeypatch.setattr(sampler._engine, 'step', step)
      results = await asyncio.wait_for(
        asyncio.gather(
          *(sampler.sample(str(n), prompt(9), sampling(), KEY) for n in range(5)),
          return_exceptions=True,
        ),
        60,
      )
      assert all(
        'pool p: the engine failed: RuntimeError: out of memory' in str(r) for r in results
      )
      assert all(isinstance(r, SamplerError) for r in results)
      assert len((await sampler.sample('0', prompt(9), sampling(), KEY)).tokens) == 6
      assert sampler.stats.failures == {'engine': 1}

  asyncio.run(scenario())


def test_close_and_cancel_end_turns(make_sampler, feed, sampling):
  feed.publish(0)

  async def scenario():
    sampler = make_sampler()
    await sampler.start()
    turns = [
      asyncio.ensure_future(sampler.sample(str(n), prompt(4), sampling(max_turn_tokens=40), KEY))
      for n in range(5)
    ]
    while sampler.stats.engine.sampled_tokens == 0:
      await asyncio.sleep(0)
    turns[0].cancel()
    with pytest.raises(asyncio.CancelledError):
      await turns[0]
    again = await sampler.sample('0', prompt(4), sampling(), KEY)  # its place is free again
    assert len(again.tokens) == 6
    running = asyncio.ensure_future(sampler.sample('z', prompt(4), sampling(), KEY))
    await asyncio.sleep(0)
    await sampler.close()
    results = await asyncio.gather(*turns[1:], running, return_exceptions=True)
    assert isinstance(results[-1], SamplerError) and 'closed' in str(results[-1])
    with pytest.raises(SamplerError, match='pool p: the sampler is closed'):
      await sampler.sample('a', prompt(4), sampling(), KEY)
    with pytest.raises(SamplerError, match='pool p: the sampler is closed'):
      await sampler.start()

  asyncio.run(scenario())


@pytest.mark.parametrize('emulate', [False, True])
def test_a_view_directory_is_served_as_its_format_states(
  config, make_params, sampling, tmp_path, emulate
):
  """Log-probs are those of the decoded view, with activations rounded where that is asked for."""
  tensors = named_tensors(config, make_params(0))
  bf16 = ((name, np.asarray(tensor, dtype='bfloat16')) for name, tensor in tensors)
  write_view(tmp_path / 'view', config, bf16, ViewSpec('fp8_channel'), tokenizer_files={})

  class OneView:
    def latest(self):
      return Version(1, 0, 0)

    def open(self, version):
      return tmp_path / 'view'

  async def scenario():
    settings = EngineSettings(slots=2, max_tokens=48, kv_cache_dtype='fp8', decode_steps=4)
    sampler = NativeSampler(
      OneView(),
      source=Source('p', 'H100', 'fp8_channel', 'fp8'),
      config=config,
      settings=settings,
      emulate_activations=emulate,
    )
    async with started(sampler):
      return await sampler.sample('s', prompt(5), sampling(), KEY)

  sample = asyncio.run(scenario())
  view = read_view(tmp_path / 'view', exact=emulate)
  ids = np.concatenate([prompt(5), sample.tokens])

  def logps(quant):
    hidden, _ = jax.jit(extend, static_argnums=0, static_argnames='kv_quant')(
      config,
      view.params,
      init_cache(config, 1, 48, np.float32),
      ids[None],
      np.array([0]),
      np.array([len(ids)]),
      activation_quant=quant,
      kv_quant='fp8',
    )
    logits = np.asarray(hidden[0] @ head_matrix(config, view.params), np.float64)[4:-1]
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return logits[np.arange(len(sample.tokens)), sample.tokens]

  with_quant, without = logps(view.activation_quant), logps(None)
  assert np.abs(with_quant - without).max() > 1e-3
  np.testing.assert_allclose(sample.logps, with_quant if emulate else without, atol=2e-5)
