import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.samplers.draw import DrawParams, draw

VOCAB = 24


def nucleus(logits, temperature, top_k, top_p):
  """Returns ({id: log q}) of one row in float64, by the definition."""
  x = (logits / np.float32(temperature or 1.0)).astype(np.float64)
  order = sorted(range(len(x)), key=lambda v: (-x[v], v))
  if top_k:
    cutoff = x[order[min(top_k, len(x)) - 1]]
    order = [v for v in order if x[v] >= cutoff]
  mass = np.exp(x[order])
  mass /= mass.sum()
  before = np.concatenate([[0.0], np.cumsum(mass)[:-1]])
  kept = [v for v, b in zip(order, before, strict=True) if b < top_p or top_p == 1.0]
  log_mass = np.log(np.exp(x[kept]).sum())
  return {v: x[v] - log_mass for v in kept}


def params(temperature, top_k, top_p, cap):
  return DrawParams(
    np.asarray(temperature, np.float32),
    np.asarray(top_k, np.int32),
    np.asarray(top_p, np.float32),
    np.asarray(cap, np.int32),
  )


def keys(num, seed=0):
  return jax.random.split(jax.random.key(seed, impl='threefry2x32'), num)


run = jax.jit(draw, static_argnames=('num_candidates', 'width'))


@functools.cache
def rows():
  """Random rows, a third of them of few distinct logits, under every mix of parameters."""
  rng = np.random.default_rng(0)
  num = 96
  logits = rng.normal(0, 2, (num, VOCAB)).astype(np.float32)
  logits[::3] = np.round(logits[::3])
  return logits, params(
    rng.choice([0.5, 0.7, 1.0, 1.3, 0.0], num),
    rng.choice([0, 1, 3, 8, VOCAB, 2 * VOCAB], num),
    rng.choice([0.3, 0.9, 0.97, 1.0], num),
    np.full(num, VOCAB),
  )


@pytest.mark.parametrize('width', [8, VOCAB])
def test_the_record_is_the_nucleus(width):
  logits, p = rows()
  # With a narrow record the cutoff may lie beyond it.
  out = run(logits, keys(len(logits)), p, num_candidates=min(width, VOCAB), width=width)
  for row in range(len(logits)):
    top_k, top_p = int(p.top_k[row]), float(p.top_p[row])
    expected = nucleus(logits[row], float(p.temperature[row]), top_k, top_p)
    ids = [int(i) for i in out.candidate_ids[row] if i >= 0]
    assert ids == sorted(expected, key=lambda v: (-expected[v], v))[:width]
    assert (np.asarray(out.candidate_ids[row])[len(ids) :] == -1).all()
    logps = np.asarray(out.candidate_logps[row])
    np.testing.assert_allclose(logps[: len(ids)], [expected[v] for v in ids], atol=1e-5)
    assert (logps[len(ids) :] == 0).all()
    drawn = int(out.ids[row])
    np.testing.assert_allclose(out.logps[row], expected[drawn], atol=1e-5)
    assert bool(out.full_support[row]) == (len(expected) <= width)
    if drawn in ids:  # bit for bit: the ratio of the two must be 1
      assert logps[ids.index(drawn)] == out.logps[row]


def test_top_k_keeps_every_tie():
  logits = np.array([[2, 1, 1, 1, 0, -1, 1, 0]], np.float32)
  out = run(logits, keys(1), params([1], [2], [1], [8]), num_candidates=8, width=8)
  assert [i for i in out.candidate_ids[0].tolist() if i >= 0] == [0, 1, 2, 3, 6]
  expected = np.log([np.e / (np.e + 4)] + [1 / (np.e + 4)] * 4)
  np.testing.assert_allclose(out.candidate_logps[0, :5], expected, atol=1e-6)
  assert out.full_support[0]


def test_top_p_is_taken_of_the_renormalised_rest():
  # Masses 4, 3, 2, 1 tenths. Of the two that top-k leaves, 4/7 reaches 0.5 and not 0.6.
  logits = np.log(np.tile([[0.4, 0.3, 0.2, 0.1]], (3, 1))).astype(np.float32)
  p = params([1] * 3, [2, 2, 0], [0.5, 0.6, 0.5], [4] * 3)
  out = run(logits, keys(3), p, num_candidates=4, width=4)
  assert (np.asarray(out.candidate_ids) >= 0).sum(axis=1).tolist() == [1, 2, 2]
  np.testing.assert_allclose(out.candidate_logps[2, :2], np.log([4 / 7, 3 / 7]), atol=1e-6)


def test_a_nucleus_cut_by_the_cap_is_a_head():
  logits = np.zeros((4, 12), np.float32)
  logits[3, 0] = 12.0  # what the cap cuts off here has a mass below the tolerance
  p = params([1] * 4, [0, 5, 5, 0], [1.0] * 4, [6, 12, 4, 4])
  out = run(logits, keys(4), p, num_candidates=12, width=12)
  assert (np.asarray(out.candidate_ids) >= 0).sum(axis=1).tolist() == [6, 12, 4, 4]
  assert out.full_support.tolist() == [False, True, False, False]
  heads = np.where(out.candidate_ids >= 0, np.exp(out.candidate_logps), 0).sum(axis=1)
  np.testing.assert_allclose(heads[:3], [0.5, 1.0, 1 / 3], atol=1e-6)


def test_greedy_takes_the_largest_at_temperature_one():
  logits = np.random.default_rng(1).normal(size=(5, VOCAB)).astype(np.float32)
  p = params([0] * 5, [0] * 5, [1] * 5, [3] * 5)
  out = run(logits, keys(5), p, num_candidates=3, width=3)
  assert out.ids.tolist() == logits.argmax(axis=1).tolist()
  x = logits.astype(np.float64)
  expected = x.max(axis=1) - np.log(np.exp(x).sum(axis=1))
  np.testing.assert_allclose(out.logps, expected, atol=1e-5)


def test_frequencies_are_those_stated():
  # Pearson's statistic stays below the 0.999 quantile of its chi-square distribution.
  num, quantile = 20_000, {7: 24.32, 3: 16.27}
  base = np.array([1.0, 0.5, 0.0, -0.5, 2.0, 0.3, -1.0, 0.9], np.float32)
  for top_k, top_p, size in ((0, 1.0, 8), (5, 0.9, 4)):
    expected = nucleus(base, 0.8, top_k, top_p)
    assert len(expected) == size
    p = params([0.8] * num, [top_k] * num, [top_p] * num, [8] * num)
    out = run(np.tile(base, (num, 1)), keys(num, seed=3), p, num_candidates=8, width=8)
    counts = np.bincount(np.asarray(out.ids), minlength=8)
    assert counts[[v for v in range(8) if v not in expected]].sum() == 0
    mean = np.array([num * np.exp(logp) for logp in expected.values()])
    statistic = ((counts[list(expected)] - mean) ** 2 / mean).sum()
    assert statistic < quantile[size - 1]


def test_a_row_does_not_depend_on_its_neighbours():
  # Alone, the first row's cutoff is found among the 4 largest; beside a flat row all are sorted.
  rng = np.random.default_rng(2)
  row = rng.normal(0, 4, (1, VOCAB)).astype(np.float32)
  p = params([1] * 2, [0] * 2, [0.9] * 2, [4] * 2)
  draws = [
    run(np.concatenate([row, other]), keys(2), p, num_candidates=4, width=4)
    for other in (row, np.zeros_like(row))
  ]
  for one, two in zip(*draws, strict=True):
    assert np.array_equal(one[0], two[0])


def test_a_large_vocabulary_is_searched_narrowly_or_whole():
  vocab = 5000
  rng = np.random.default_rng(4)
  logits = np.stack([rng.normal(0, 6, vocab), rng.normal(0, 0.1, vocab)]).astype(np.float32)
  p = params([1] * 2, [0] * 2, [0.9] * 2, [16] * 2)
  out = run(logits, keys(2), p, num_candidates=16, width=16)
  for row in range(2):
    expected = nucleus(logits[row], 1.0, 0, 0.9)
    top = sorted(expected, key=lambda v: -expected[v])[:16]
    assert out.candidate_ids[row].tolist()[: len(top)] == top
    np.testing.assert_allclose(
      out.candidate_logps[row][: len(top)], [expected[v] for v in top], atol=1e-4
    )
    assert not out.full_support[row] or len(expected) <= 16
  assert len(nucleus(logits[1], 1.0, 0, 0.9)) > 4000
  assert jnp.isfinite(out.logps).all()
