import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo.models.decoder import extend, head_matrix, init_cache
from mimo.samplers.base import SamplerError
from mimo.samplers.decode import Weights
from mimo.samplers.engine import Engine, EngineSettings
from mimo.samplers.turns import TurnRequest
from mimo.types import FinishReason

MAX_TOKENS = 48


@pytest.fixture(scope='module')
def weights(make_params):
  return [Weights(make_params(seed), None) for seed in range(2)]


@pytest.fixture
def make_engine(config, weights):
  def make(**changes):
    values = {
      'slots': 3,
      'max_tokens': MAX_TOKENS,
      'kv_cache_dtype': 'float32',
      'decode_steps': 4,
      'prefill_rows': 2,
      'prefill_tokens': 8,
    }
    engine = Engine(config, EngineSettings(**(values | changes)))
    engine.activate(weights[0], 0)
    return engine

  return make


def key(number):
  return np.array([7, number], np.uint32)


def prompt(length, seed=0):
  return np.random.default_rng([length, seed]).integers(0, 48, length).astype(np.int32)


def drain(engine):
  """Steps until nothing is left to do, and returns {session: outcome}."""
  out = {}
  for _ in itertools.count():
    if not engine.busy:
      return out
    out |= {request.session: result for request, result in engine.step()}


def turn(engine, name, tokens, params, number=0):
  engine.submit(TurnRequest(name, np.asarray(tokens, np.int32), params, key(number)))
  out = drain(engine)[name]
  if isinstance(out, SamplerError):
    raise out
  return out


def log_softmax(logits):
  return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def test_log_probs_are_those_of_the_full_forward(make_engine, weights, sampling, reference_logits):
  """Over several turns, at two temperatures, prompts short and longer than chunks together."""
  engine = make_engine()
  for name, length, temperature in (('a', 1, 0.7), ('b', 5, 1.0), ('c', 21, 1.6)):
    tokens, params = prompt(length), sampling(temperature=temperature)
    for observed in range(1, 4):
      sample = turn(engine, name, tokens, params)
      start, tokens = len(tokens), np.concatenate([tokens, sample.tokens])
      logits = reference_logits(weights[0].params, tokens)[start - 1 : -1]
      expected = log_softmax(logits / temperature)
      drawn = np.arange(len(sample.tokens))
      np.testing.assert_allclose(sample.logps, expected[drawn, sample.tokens], atol=1e-5)
      ids, logps = sample.candidates.dense(8)
      np.testing.assert_allclose(logps, np.take_along_axis(expected, ids, 1), atol=1e-5)
      np.testing.assert_allclose(logps, -np.sort(-expected, axis=1)[:, :8], atol=1e-5)
      assert not sample.full_support.any() and (np.exp(logps).sum(axis=1) < 1 - 1e-3).any()
      tokens = np.concatenate([tokens, prompt(observed, seed=1)])
  assert engine.stats.prefills > 0 and engine.stats.forced_tokens > 0


def test_position_t_draws_with_the_key_folded_with_t(
  make_engine, weights, sampling, reference_logits
):
  tokens = prompt(5)
  sample = turn(make_engine(), 's', tokens, sampling(temperature=0.8), number=3)
  logits = reference_logits(weights[0].params, np.concatenate([tokens, sample.tokens])) / 0.8
  session_key = jax.random.wrap_key_data(jnp.asarray(key(3)), impl='threefry2x32')
  for i, drawn in enumerate(sample.tokens):
    noise = jax.random.gumbel(jax.random.fold_in(session_key, 5 + i), (48,))
    assert drawn == np.argmax(logits[4 + i] + np.asarray(noise, np.float64))


def test_a_nucleus_is_recorded_whole_or_flagged(make_engine, weights, sampling, reference_logits):
  tokens = prompt(6)
  params = sampling(top_p=0.9, top_k=10, candidates=6)
  sample = turn(make_engine(), 's', tokens, params)
  logits = reference_logits(weights[0].params, np.concatenate([tokens, sample.tokens]))[5:-1]
  sizes = []
  for s, row in enumerate(logits):
    order = np.argsort(-row)[:10]
    mass = np.exp(row[order]) / np.exp(row[order]).sum()
    kept = order[np.concatenate([[True], np.cumsum(mass)[:-1] < 0.9])]
    sizes.append(len(kept))
    expected = dict(zip(kept, log_softmax(row[kept]), strict=True))
    ids, logps = sample.candidates.row(s)
    assert ids.tolist() == kept[:6].tolist()
    np.testing.assert_allclose(logps, [expected[v] for v in ids], atol=1e-5)
    np.testing.assert_allclose(sample.logps[s], expected[sample.tokens[s]], atol=1e-5)
  assert sample.full_support.tolist() == [size <= 6 for size in sizes]
  assert min(sizes) <= 6 < max(sizes)


def test_what_is_drawn_does_not_depend_on_batching(make_engine, sampling):
  params = [
    sampling(temperature=t, max_turn_tokens=m, stop_ids=(3, 4)) for t in (0.9, 1.3) for m in (4, 9)
  ]

  def run(order, **settings):
    engine, out = make_engine(**settings), {}
    tokens = {n: prompt(4 + 3 * n) for n in order}
    for _ in range(2):
      for n in order:
        engine.submit(TurnRequest(str(n), tokens[n], params[n % 4], key(n)))
      for name, sample in drain(engine).items():
        n = int(name)
        out.setdefault(n, []).append(sample)
        tokens[n] = np.concatenate([tokens[n], sample.tokens, prompt(2, n)])
    return out

  one = run(range(7))
  for two in (
    run([6, 2, 0, 4, 1, 3, 5], slots=2),
    run(range(7), slots=7, decode_steps=8, prefill_tokens=4),
  ):
    for n, samples in one.items():
      for a, b in zip(samples, two[n], strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.finish == b.finish
        np.testing.assert_allclose(a.logps, b.logps, atol=1e-5)


def test_the_same_calls_give_the_same_bits(make_engine, sampling):
  first, second = (turn(make_engine(), 's', prompt(20), sampling()) for _ in range(2))
  assert first.tokens.tobytes() == second.tokens.tobytes()
  assert first.logps.tobytes() == second.logps.tobytes()


def test_a_turn_ends_at_a_stop_id_or_a_limit(make_engine, sampling):
  engine = make_engine()
  free = turn(engine, 'free', prompt(5), sampling())
  assert free.finish is FinishReason.LENGTH and len(free.tokens) == 6
  third = int(free.tokens[2])
  assert third not in free.tokens[:2]
  stops = tuple(range(100, 105))  # more than one row of stop ids holds
  stopped = turn(engine, 'stopped', prompt(5), sampling(stop_ids=(*stops, third)))
  assert stopped.finish is FinishReason.STOP
  assert stopped.tokens.tolist() == free.tokens[:3].tolist()
  near_end = turn(engine, 'end', prompt(MAX_TOKENS - 2), sampling())
  assert near_end.finish is FinishReason.LENGTH and len(near_end.tokens) == 2


_extend = jax.jit(extend, static_argnums=0)


def cached_logits(config, params_by_range, ids):
  """Logits [T, V] of ids whose cache each params wrote for its (start, end) range."""
  cache, out = init_cache(config, 1, MAX_TOKENS, jnp.float32), []
  for params, start, end in params_by_range:
    tokens = np.zeros((1, MAX_TOKENS), np.int32)
    tokens[0, : end - start] = ids[start:end]
    hidden, cache = _extend(
      config, params, cache, tokens, np.array([start]), np.array([end - start])
    )
    out.append(hidden[0, : end - start] @ head_matrix(config, params))
  return np.concatenate(out).astype(np.float64)


@pytest.mark.parametrize('prefix_cache', ['keep', 'drop'])
def test_a_version_swapped_in_mid_turn(
  config, make_engine, weights, sampling, reference_logits, prefix_cache
):
  engine = make_engine(prefix_cache=prefix_cache)
  engine.submit(TurnRequest('s', prompt(3), sampling(max_turn_tokens=12), key(0)))
  assert engine.step() == []  # 4 steps: 2 known tokens, then 2 draws, the second not yet fed
  engine.activate(weights[1], 5)
  sample = drain(engine)['s']
  (first, second) = sample.spans
  assert (first.start, first.version, second.version) == (0, 0, 5)
  assert first.end == second.start and second.end == len(sample.tokens) == 12
  ids = np.concatenate([prompt(3), sample.tokens])
  old, new, swap = weights[0].params, weights[1].params, 3 + first.end - 1
  whole = reference_logits(new, ids)
  if prefix_cache == 'keep':
    whole = cached_logits(config, [(old, 0, swap), (new, swap, len(ids))], ids)
  expected = log_softmax(whole)[swap:-1]
  drawn = sample.tokens[first.end :]
  np.testing.assert_allclose(
    sample.logps[first.end :], expected[np.arange(len(drawn)), drawn], atol=1e-5
  )
  before = log_softmax(reference_logits(old, ids))[2:swap]
  np.testing.assert_allclose(
    sample.logps[: first.end],
    before[np.arange(first.end), sample.tokens[: first.end]],
    atol=1e-5,
  )


@pytest.mark.parametrize(
  ('name', 'dtype'), [('bf16', ml_dtypes.bfloat16), ('fp8', ml_dtypes.float8_e4m3fn)]
)
def test_cached_keys_and_values_are_rounded(make_engine, sampling, name, dtype):
  exact, rounded = make_engine(), make_engine(kv_cache_dtype=name)
  samples = [turn(engine, 's', prompt(3), sampling()) for engine in (exact, rounded)]
  for cache in rounded._cache.kv:
    held = np.asarray(cache)
    assert held.dtype == np.float32 and np.array_equal(held, held.astype(dtype).astype(np.float32))
    assert np.abs(held).max() > 0
  difference = np.abs(samples[0].logps[0] - samples[1].logps[0])
  assert difference > 0 or samples[0].tokens[0] != samples[1].tokens[0]


def test_turns_wait_for_slots_in_order(make_engine, sampling):
  engine, params = make_engine(slots=2), sampling(max_turn_tokens=3)
  for n in range(6):
    engine.submit(TurnRequest(str(n), prompt(4, n), params, key(n)))
  order = []
  while engine.busy:
    order += [request.session for request, _ in engine.step()]
  assert order == [str(n) for n in range(6)]
  assert engine.stats.evictions == 4  # sessions between turns gave way


def test_an_evicted_session_goes_on_exactly(make_engine, weights, sampling, reference_logits):
  engine = make_engine(slots=2)
  first = turn(engine, 'a', prompt(9), sampling())
  for name in 'bc':
    turn(engine, name, prompt(4), sampling())
  tokens = np.concatenate([prompt(9), first.tokens, prompt(2)])
  sample = turn(engine, 'a', tokens, sampling())
  ids = np.concatenate([tokens, sample.tokens])
  expected = log_softmax(reference_logits(weights[0].params, ids))[len(tokens) - 1 : -1]
  np.testing.assert_allclose(
    sample.logps, expected[np.arange(len(sample.tokens)), sample.tokens], atol=1e-5
  )
  assert engine.stats.evictions == 2


def test_an_idle_session_holds_no_slot_against_others(make_engine, sampling):
  engine = make_engine(slots=2)
  turn(engine, 'slow', prompt(4), sampling())  # its environment never answers
  for n in range(5):
    engine.submit(TurnRequest(str(n), prompt(4), sampling(), key(n)))
  assert len(drain(engine)) == 5


def test_requests_that_cannot_be_met_are_refused_by_name(make_engine, sampling):
  engine = make_engine()
  sample = turn(engine, 's', prompt(4), sampling())
  held = np.concatenate([prompt(4), sample.tokens])
  changed = held.copy()
  changed[-1] = (changed[-1] + 1) % 48
  for tokens, message in (
    (changed, r'session s: tokens do not extend the 10 that it holds'),
    (held[:-1], r'session s: tokens do not extend the 10 that it holds'),
    (prompt(MAX_TOKENS), r'session s: 48 tokens; expected fewer than 48'),
    (prompt(0), r'session s: no tokens; expected at least one'),
    (np.array([1, 48]), r'session s: ids in \[1, 48\]; expected \[0, 48\)'),
  ):
    with pytest.raises(SamplerError, match=message):
      turn(engine, 's', tokens, sampling())
  assert len(turn(engine, 's', held, sampling()).tokens) == 6  # an empty observation is fine
  for _ in range(2):
    engine.submit(TurnRequest('twice', prompt(4), sampling(), key(0)))
  ((_, refused),) = engine.step()
  assert 'a turn of it is being sampled already' in str(refused)
  assert len(drain(engine)['twice'].tokens) == 6


def test_released_and_abandoned_turns_free_their_slots(make_engine, sampling):
  engine = make_engine(slots=2)
  requests = [TurnRequest(str(n), prompt(4), sampling(), key(n)) for n in range(6)]
  for request in requests:
    engine.submit(request)
  engine.step()
  engine.release('0')  # it runs
  engine.abandon(requests[1])
  engine.release('2')  # it waits
  engine.abandon(requests[3])
  engine.release('nobody')
  out = drain(engine)
  assert all(isinstance(out[n], SamplerError) and 'released' in str(out[n]) for n in '02')
  assert '1' not in out and '3' not in out
  assert len(out['4'].tokens) == len(out['5'].tokens) == 6
  assert len(turn(engine, '3', prompt(4), sampling()).tokens) == 6


def test_log_probs_that_are_not_finite_are_an_error(make_engine, weights, sampling):
  engine = make_engine()
  broken = jax.tree.map(lambda x: x, weights[0].params)
  broken['final_norm'] = jax.tree.map(lambda x: x * np.nan, broken['final_norm'])
  engine.activate(Weights(broken, None), 9)
  with pytest.raises(SamplerError, match='log-prob of token 0 of the turn is nan, under version 9'):
    turn(engine, 's', prompt(4), sampling())


def test_after_a_reset_sessions_go_on(make_engine, sampling):
  engine = make_engine()
  sample = turn(engine, 's', prompt(4), sampling())
  engine.submit(TurnRequest('t', prompt(4), sampling(), key(0)))
  engine.step()
  engine.reset()
  assert not engine.busy
  tokens = np.concatenate([prompt(4), sample.tokens])
  assert len(turn(engine, 's', tokens, sampling()).tokens) == 6


def test_settings_are_checked():
  good = {'slots': 1, 'max_tokens': 8, 'kv_cache_dtype': 'bf16'}
  for change, message in (
    ({'slots': 0}, 'slots is 0; expected at least 1'),
    ({'kv_cache_dtype': 'int8'}, "kv_cache_dtype is 'int8'; expected one of"),
    ({'prefix_cache': 'x'}, "prefix_cache is 'x'; expected one of"),
  ):
    with pytest.raises(ValueError, match=message):
      EngineSettings(**(good | change))
