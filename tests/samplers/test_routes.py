"""Routes that turns tell, against the router's choice in one full forward without a cache."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import chosen_experts, init
from mimo.models.moe import route_shape
from mimo.rollouts.contract import check_routes
from mimo.samplers.decode import Weights
from mimo.samplers.engine import Engine, EngineSettings
from mimo.samplers.routes import RouteBook
from mimo.samplers.turns import TurnRequest
from mimo.types import Routes, RouteShape

VOCAB, MAX_TOKENS = 48, 48
SETTINGS = {
  'slots': 2,
  'max_tokens': MAX_TOKENS,
  'kv_cache_dtype': 'float32',
  'decode_steps': 4,
  'prefill_rows': 2,
  'prefill_tokens': 8,
  'routes': True,
}


@pytest.fixture(scope='module')
def model():
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3_moe',
      'architectures': ['Qwen3MoeForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 32,
      'intermediate_size': 48,
      'moe_intermediate_size': 16,
      'num_experts': 6,
      'num_experts_per_tok': 2,
      'norm_topk_prob': True,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 16,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1e4,
      'tie_word_embeddings': True,
      'max_position_embeddings': 64,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


@pytest.fixture(scope='module')
def weights(model):
  made = []
  for seed in range(2):
    params = init(model, jax.random.key(seed))
    params['embed']['embedding'] = params['embed']['embedding'] * 15.0
    made.append(Weights(params, None))
  return made


@pytest.fixture(scope='module')
def chosen(model):
  """(params, ids [T]) -> [T, L, k]."""
  run = jax.jit(lambda *args: chosen_experts(model, *args))

  def choose(params, ids):
    row = np.zeros((1, MAX_TOKENS), np.int32)
    row[0, : len(ids)] = ids
    segments = (np.arange(MAX_TOKENS) < len(ids)).astype(np.int32)[None]
    positions = jnp.arange(MAX_TOKENS)[None]
    return np.asarray(run(params, row, segments, positions))[0, : len(ids)]

  return choose


def _engine(model, weights, **changes):
  engine = Engine(model, EngineSettings(**(SETTINGS | changes)))
  engine.activate(weights[0], 0)
  return engine


def _submit(engine, name, tokens, params):
  key = np.array([7, len(name)], np.uint32)
  engine.submit(TurnRequest(name, np.asarray(tokens, np.int32), params, key))


def _drain(engine):
  out = {}
  for _ in itertools.count():
    if not engine.busy:
      return out
    out |= {request.session: result for request, result in engine.step()}


def _prompt(length):
  return np.random.default_rng(length).integers(0, VOCAB, length).astype(np.int32)


def test_turns_tell_the_routes_of_what_was_run(model, weights, chosen, sampling):
  """Three sessions in two slots: of one whose slot was taken, nothing is told twice."""
  engine = _engine(model, weights)
  held = {'a': _prompt(1), 'bb': _prompt(5), 'ccc': _prompt(19)}
  routed = dict.fromkeys(held, 0)
  shape = route_shape(model)
  assert shape == RouteShape(layers=2, experts=6, per_token=2)
  for _ in range(3):
    for name, tokens in held.items():
      _submit(engine, name, tokens, sampling(max_turn_tokens=5))
    for name, turn in _drain(engine).items():
      tokens = np.concatenate([held[name], turn.tokens])
      check_routes(turn.routes, shape, start=routed[name], end=len(tokens) - 1)
      expected = chosen(weights[0].params, tokens)[routed[name] : -1]
      np.testing.assert_array_equal(turn.routes.ids, expected)
      routed[name] = len(tokens) - 1
      held[name] = np.concatenate([tokens, _prompt(3)])
  assert engine.stats.evictions and engine.stats.prefills and engine.stats.forced_tokens


@pytest.mark.parametrize('prefix_cache', ['keep', 'drop'])
def test_a_token_keeps_the_routes_of_its_first_pass(model, weights, chosen, sampling, prefix_cache):
  """New weights come after one step of a turn; what was run under the old ones stays as it was."""
  engine = _engine(model, weights, prefix_cache=prefix_cache)
  prompt = _prompt(19)
  _submit(engine, 'a', prompt, sampling(max_turn_tokens=9))
  assert not engine.step()
  ran = int(engine._written[0])
  engine.activate(weights[1], 1)
  turn = _drain(engine)['a']
  assert [(span.start, span.version) for span in turn.spans] == [(0, 0), (ran - 18, 1)]
  tokens = np.concatenate([prompt, turn.tokens])
  ids = turn.routes.ids
  assert (turn.routes.start, len(ids)) == (0, len(tokens) - 1)
  np.testing.assert_array_equal(ids[:ran], chosen(weights[0].params, tokens)[:ran])
  fresh = chosen(weights[1].params, tokens)[ran:-1]
  if prefix_cache == 'drop':  # no cache of older weights is behind these
    np.testing.assert_array_equal(ids[ran:], fresh)
  assert (ids[:ran] != chosen(weights[1].params, tokens)[:ran]).any()


def test_they_are_told_only_where_asked_for(config, model, weights, sampling):
  engine = _engine(model, weights, routes=False)
  _submit(engine, 'a', _prompt(4), sampling(max_turn_tokens=3))
  assert _drain(engine)['a'].routes is None
  with pytest.raises(ValueError, match='routes is True of a qwen3 model; expected one with exp'):
    Engine(config, EngineSettings(**SETTINGS))


def test_a_book_by_hand():
  book = RouteBook(RouteShape(1, 9, 2), slots=2, max_tokens=4)
  first, again = np.array([[[1, 2]], [[3, 4]]], np.int16), np.full((3, 1, 2), 8, np.int16)
  book.add(1, 0, first)
  book.add(1, 0, again)
  told = book.told(1, 1, 4)
  assert isinstance(told, Routes) and told.start == 1
  assert told.ids.tolist() == [[[3, 4]], [[8, 8]], [[-1, -1]]]
  book.begin(1)
  assert (book.told(1, 0, 4).ids == -1).all() and told.ids[0, 0, 0] == 3
  none = RouteBook(None, slots=2, max_tokens=4)
  none.begin(0)
  none.add(0, 0, first)
  assert none.told(0, 0, 4) is None
