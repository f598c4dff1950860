"""The engine with delta nets and experts: their state can't be taken back, only begun anew."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import extend, forward, head_matrix, init, init_cache
from mimo.samplers.decode import Weights
from mimo.samplers.engine import Engine, EngineSettings
from mimo.samplers.turns import TurnRequest

LENGTH = 48


@pytest.fixture(scope='module')
def hybrid():
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3_5_moe_text',
      'vocab_size': 48,
      'hidden_size': 32,
      'num_hidden_layers': 2,
      'layer_types': ['linear_attention', 'full_attention'],
      'num_attention_heads': 2,
      'num_key_value_heads': 1,
      'head_dim': 16,
      'max_position_embeddings': 64,
      'num_experts': 4,
      'num_experts_per_tok': 2,
      'moe_intermediate_size': 16,
      'shared_expert_intermediate_size': 16,
      'linear_num_key_heads': 1,
      'linear_num_value_heads': 2,
      'linear_key_head_dim': 8,
      'linear_value_head_dim': 8,
      'linear_conv_kernel_dim': 4,
      'rope_parameters': {'rope_theta': 1e4, 'rope_type': 'default'},
    }
  )


@pytest.fixture(scope='module')
def weights(hybrid):
  """Two versions, whose delta nets remember for tens of tokens."""

  def make(seed):
    params = init(hybrid, jax.random.key(seed))
    params['embed']['embedding'] = params['embed']['embedding'] * 15.0
    params['head']['kernel'] = params['head']['kernel'] * 15.0
    delta = params['layers']['0']['delta']
    delta['A_log'] = jnp.full_like(delta['A_log'], -3.0)
    return Weights(params, None)

  return [make(seed) for seed in range(2)]


@pytest.fixture(scope='module')
def expected(hybrid):
  """(params, ids) -> log-probs of each id but the first, from one full forward."""

  @jax.jit
  def run(params, tokens, segments):
    positions = jnp.arange(LENGTH)[None]
    hidden = forward(hybrid, params, tokens, segments, positions)
    return jax.nn.log_softmax(hidden[0] @ head_matrix(hybrid, params))

  def logps(params, ids):
    tokens, segments = np.zeros((2, 1, LENGTH), np.int32)
    tokens[0, : len(ids)], segments[0, : len(ids)] = ids, 1
    return np.asarray(run(params, tokens, segments))[np.arange(len(ids) - 1), ids[1:]]

  return logps


@pytest.fixture
def make_engine(hybrid, weights):
  def make(**changes):
    values = {
      'slots': 2,
      'max_tokens': LENGTH,
      'kv_cache_dtype': 'float32',
      'decode_steps': 4,
      'prefill_rows': 2,
      'prefill_tokens': 8,
    }
    engine = Engine(hybrid, EngineSettings(**(values | changes)))
    engine.activate(weights[0], 0)
    return engine

  return make


def prompt(length, seed=0):
  return np.random.default_rng([length, seed]).integers(0, 48, length).astype(np.int32)


def request(name, tokens, params):
  return TurnRequest(name, np.asarray(tokens, np.int32), params, np.array([7, 1], np.uint32))


def drain(engine):
  out = {}
  for _ in itertools.count():
    if not engine.busy:
      return out
    out |= {request.session: result for request, result in engine.step()}


def turn(engine, name, tokens, params):
  engine.submit(request(name, tokens, params))
  return drain(engine)[name]


def check(sample, tokens, params, expected):
  ids = np.concatenate([tokens, sample.tokens])
  np.testing.assert_allclose(sample.logps, expected(params, ids)[len(tokens) - 1 :], atol=2e-5)
  return ids


def test_turns_evictions_and_abandoned_turns(make_engine, weights, sampling, expected):
  """Three sessions on two slots, a turn given up halfway: every log-prob is the full forward's."""
  engine, params = make_engine(), weights[0].params
  held = {name: prompt(5 + 6 * i, i) for i, name in enumerate('abc')}
  for round_ in range(3):
    for name in 'abc':
      tokens = np.concatenate([held[name], prompt(2 + round_, 9)])
      given_up = request(name, np.concatenate([tokens, prompt(3, 5)]), sampling())
      engine.submit(given_up)
      engine.step()
      engine.abandon(given_up)
      held[name] = check(turn(engine, name, tokens, sampling()), tokens, params, expected)
      if round_ == 1:  # at once again: the slot and its state are still there
        tokens = np.concatenate([held[name], prompt(1, 3)])
        held[name] = check(
          turn(engine, name, tokens, sampling(max_turn_tokens=2)), tokens, params, expected
        )
  assert engine.stats.evictions > 0 and engine.stats.prefills > 0


@pytest.mark.parametrize('prefix_cache', ['keep', 'drop'])
def test_a_version_swapped_in_mid_turn(
  hybrid, make_engine, weights, sampling, expected, prefix_cache
):
  engine = make_engine(prefix_cache=prefix_cache)
  tokens = prompt(11)
  engine.submit(request('s', tokens, sampling(max_turn_tokens=12)))
  assert engine.step() == []
  fed = int(engine._written[0])
  engine.activate(weights[1], 5)
  sample = drain(engine)['s']
  first = sample.spans[0].end
  assert 0 < first < 12 and fed == len(tokens) + first - 1
  ids = np.concatenate([tokens, sample.tokens])
  np.testing.assert_allclose(
    sample.logps[:first],
    expected(weights[0].params, ids)[len(tokens) - 1 :][:first],
    atol=2e-5,
  )
  if prefix_cache == 'drop':
    after = expected(weights[1].params, ids)
  else:  # the state that the old weights left goes on under the new ones
    run = jax.jit(extend, static_argnums=0)
    cache = init_cache(hybrid, 1, LENGTH, jnp.float32)
    after = np.zeros(len(ids) - 1)
    for at, token in enumerate(ids[:-1]):
      params = weights[at >= fed].params
      hidden, cache = run(hybrid, params, cache, token[None, None], np.array([at]), np.array([1]))
      after[at] = jax.nn.log_softmax(hidden[0, 0] @ head_matrix(hybrid, params))[ids[at + 1]]
  np.testing.assert_allclose(sample.logps[first:], after[len(tokens) - 1 :][first:], atol=2e-5)


def test_going_back_is_refused(make_engine, sampling):
  """What no flow of the engine does: feeding from before where the state stands."""
  engine = make_engine()
  turn(engine, 's', prompt(9), sampling())
  engine._written[0] -= 2
  engine.submit(request('s', np.concatenate([engine._sessions['s'].tokens, prompt(3)]), sampling()))
  with pytest.raises(AssertionError):
    engine.step()
