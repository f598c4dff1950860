import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.decoder import init_cache
from mimo.samplers.decode import Program, Rows, Weights, computed, decode, prefill
from mimo.samplers.draw import DrawParams

WINDOW = 48


@pytest.fixture(scope='module')
def weights(make_params):
  return Weights(make_params(0), None)


@pytest.fixture
def program(config):
  return Program(computed(config), None, num_candidates=8, width=8, window=WINDOW)


def greedy_rows(known, room, steps=4):
  """Rows that take the most likely token: `known` lists ids per row, none for one that idles."""
  ids = np.zeros((len(known), steps), np.int32)
  for row, values in enumerate(known):
    ids[row, : len(values)] = values[:steps]
  num = len(known)
  return Rows(
    known_ids=ids,
    num_known=np.array([len(values) for values in known], np.int32),
    start=np.zeros(num, np.int32),
    room=np.array(room, np.int32),
    keys=np.zeros((num, 2), np.uint32),
    stop_ids=np.full((num, 4), -1, np.int32),
    draw=DrawParams(
      np.zeros(num, np.float32),
      np.zeros(num, np.int32),
      np.ones(num, np.float32),
      np.full(num, 8, np.int32),
    ),
  )


def greedy(reference_logits, params, ids, num):
  """Returns `ids` and the `num` most likely tokens after them, from full forwards."""
  ids = list(ids)
  for _ in range(num):
    ids.append(int(reference_logits(params, np.array(ids))[-1].argmax()))
  return ids


def test_rows_feed_what_is_known_and_then_what_they_drew(
  config, weights, program, reference_logits
):
  cache = init_cache(config, 3, WINDOW, jnp.float32)
  known = [[3, 1, 4], [], [9, 2, 6, 5, 3]]
  _, out = decode(program, weights, cache, greedy_rows(known, [9, 9, 9]), np.int32(1))
  assert out.num_fed.tolist() == [4, 0, 4] and out.num_drawn.tolist() == [2, 0, 0]
  assert int(out.num_steps) == 4 and not np.asarray(out.stopped).any()
  expected = greedy(reference_logits, weights.params, known[0], 2)
  assert out.draws.ids[2:4, 0].tolist() == expected[3:]


def test_rows_stop_at_their_room_or_a_stop_id_and_a_decode_when_few_are_left(
  config, weights, program
):
  rows = greedy_rows([[3], [7], [9]], [1, 9, 9])
  rows.draw.temperature[:] = 3.0
  cache = init_cache(config, 3, WINDOW, jnp.float32)
  _, free = decode(program, weights, cache, rows, np.int32(1))
  first, second = free.draws.ids[:2, 1].tolist()
  assert first != second
  rows.stop_ids[1, 2] = second
  cache = init_cache(config, 3, WINDOW, jnp.float32)
  cache, out = decode(program, weights, cache, rows, np.int32(1))
  assert out.num_drawn.tolist() == [1, 2, 4] and out.stopped.tolist() == [False, True, False]
  assert out.num_fed.tolist() == [1, 2, 4] and int(out.num_steps) == 4
  assert out.draws.ids[:4, 2].tolist() == free.draws.ids[:4, 2].tolist()
  # Positions that a row never came to are untouched.
  assert np.abs(np.asarray(cache.kv.values)[:, 1, :, 2:]).max() == 0
  cache = init_cache(config, 3, WINDOW, jnp.float32)
  _, out = decode(program, weights, cache, rows, np.int32(2))
  assert int(out.num_steps) == 2 and out.num_drawn.tolist() == [1, 2, 2]


def test_prefill_writes_what_decoding_would(config, weights, program):
  ids = [3, 1, 4, 1]
  one = init_cache(config, 3, WINDOW, jnp.float32)
  one, _ = decode(program, weights, one, greedy_rows([[], ids, []], [1, 1, 1]), np.int32(1))
  tokens = np.zeros((2, 8), np.int32)
  tokens[0, :4] = ids
  slots, start, count = (np.array(v, np.int32) for v in ([1, 3], [0, 0], [4, 0]))  # 3: padding
  two = init_cache(config, 3, WINDOW, jnp.float32)
  two, routes = prefill(program, weights, two, slots, tokens, start, count)
  assert routes is None
  for a, b in zip(one.kv, two.kv, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  assert np.abs(np.asarray(two.kv.values)[:, 1, :, :4]).min() > 0


def test_models_that_compute_alike_share_a_compilation(config, weights, program):
  other = type(config).from_hf(config.to_hf() | {'transformers_version': '9'})
  assert other != config and computed(other) == computed(config)
  decode.clear_cache()
  for model in (config, other):
    shared = Program(computed(model), None, num_candidates=8, width=8, window=WINDOW)
    cache = init_cache(model, 3, WINDOW, jnp.float32)
    decode(shared, weights, cache, greedy_rows([[1], [2], []], [1, 1, 1]), np.int32(1))
  assert decode._cache_size() == 1
