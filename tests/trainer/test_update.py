"""The update against float64 oracles, and what must not change it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo import objectives, types
from mimo.models import decoder
from mimo.trainer import packing, sharding, update
from mimo.trainer.state import TrainerConfig

K = 4
LENGTHS = [9, 12, 7, 8, 12, 7, 8, 10]
ADV = np.array([1.0, -0.5, 0.0, 2.0, -1.0, 0.25, 0.5, -2.0], np.float32)
SOURCES = ('a', 'b')
CONFIG = TrainerConfig(
  learning_rate=1e-2,
  b1=0.8,
  b2=0.9,
  weight_decay=0.5,
  max_grad_norm=2.0,
  warmup_updates=2,
  head_chunk_tokens=16,
)
TEMPERATURE = 0.7
CORRECTION = objectives.arm('sc_mis').correction


def bucket(rows: int, tokens: int = 12, trained: int = 10) -> packing.Bucket:
  """One trajectory to a row: no two of LENGTHS fit into 12 tokens."""
  return packing.Bucket(rows=rows, tokens=tokens, trained=trained)


@pytest.fixture(scope='module')
def compiled(model):
  """A trainer for all tests of this file, and a list that grows with each trace of its steps."""
  traces = []

  def counted(name):
    inner = getattr(update, name)

    def run(spec, tree, total, *rest):
      traces.append((name, rest[0].tokens.shape if name == 'micro_step' else None))
      return inner(spec, tree, total, *rest)

    return run

  with pytest.MonkeyPatch.context() as patch:
    for name in ('micro_step', 'apply'):
      patch.setattr(update, name, counted(name))
    trainer = update.Trainer(
      model,
      CONFIG,
      correction=CORRECTION,
      temperature=TEMPERATURE,
      num_sources=2,
      mesh=sharding.make_mesh(),
    )
  return trainer, traces


@pytest.fixture(scope='module')
def trainer(compiled) -> update.Trainer:
  return compiled[0]


@pytest.fixture(scope='module')
def trajectories(make_trajectories):
  return make_trajectories(LENGTHS, temperature=TEMPERATURE)


@pytest.fixture(scope='module')
def oracle(model):
  """Returns [S, V] float64: the row for token t is that of the hidden state at t - 1, unpacked."""
  forward = jax.jit(functools.partial(decoder.forward, model))

  def logps(params, trajectory):
    length = len(trajectory.tokens)
    tokens = np.zeros((1, max(LENGTHS)), np.int32)
    tokens[0, :length] = trajectory.tokens
    index = np.arange(tokens.shape[1], dtype=np.int32)[None]
    policy = rounded(params)
    hidden = forward(policy, tokens, (index < length).astype(np.int32), index)
    hidden = np.asarray(hidden[0], np.float64)[np.flatnonzero(trajectory.sampled) - 1]
    logits = hidden @ np.float64(policy['embed']['embedding']).T / TEMPERATURE
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

  return logps


def rounded(params):
  return jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16).astype(np.float32), params)


def pack(trajectories, buckets, adv=ADV) -> packing.Batch:
  return packing.pack(
    trajectories,
    adv,
    buckets=buckets,
    num_candidates=K,
    sources=SOURCES,
    temperature=TEMPERATURE,
  )


def total_of(trainer, params, batch) -> update.Total:
  """The sums over a batch's micro-batches, on the host."""
  # Placed as `update` does: a jitted function is traced again for arrays that live elsewhere.
  params = trainer.init_state(params).params
  denominator = jax.device_put(np.float32(batch.trained), sharding.replicated(trainer.mesh))
  result = trainer.zero_total(params)
  for micro in batch.micro:
    micro = sharding.place(micro, trainer.mesh)
    result = trainer.micro_step(params, result, micro, denominator)
  return jax.device_get(result)


def learnable(total: update.Total, place) -> update.Total:
  """The sums of a batch that has an advantage: without one, no step is taken."""
  size = total.aux[update.ADVANTAGE_SIZE]
  return total._replace(
    aux=total.aux | {update.ADVANTAGE_SIZE: jax.device_put(np.ones(size.shape, np.float32), place)}
  )


def assert_close(left, right, rtol: float = 1e-5) -> None:
  """Each leaf within `rtol` of the larger one's norm."""
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(left), jax.tree.leaves(right), strict=True
  ):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    scale = max(np.linalg.norm(x), np.linalg.norm(y))
    error = np.linalg.norm(x - y)
    assert error <= rtol * scale, f'{jax.tree_util.keystr(path)}: {error} of {scale}'


def assert_identical(left, right) -> None:
  jax.tree.map(np.testing.assert_array_equal, left, right)


def test_gathered_logps_equal_full_logits(trainer, params, trajectories, oracle):
  batch = pack(trajectories, [bucket(2, 40, 32)])
  run = jax.jit(functools.partial(update.token_logps, trainer.spec))
  (micro,) = batch.micro
  logps, entropy = jax.device_get(run(rounded(params), micro))
  assert sum(place.token > 0 for place in batch.placements) == 6
  for trajectory, place in zip(trajectories, batch.placements, strict=True):
    full = oracle(params, trajectory)
    for s, token in enumerate(trajectory.tokens[trajectory.sampled]):
      at = (place.row, place.trained + s)
      ids, _ = trajectory.candidates.row(s)
      np.testing.assert_allclose(logps[at][0], full[s, token], atol=3e-5)
      np.testing.assert_allclose(logps[at][1 : 1 + len(ids)], full[s, ids], atol=3e-5)
      np.testing.assert_array_equal(logps[at][1 + len(ids) :], 0)
      np.testing.assert_allclose(entropy[at], -(np.exp(full[s]) * full[s]).sum(), atol=3e-5)


def test_loss_and_aux_equal_the_oracle(trainer, params, trajectories, oracle):
  """Score centering, masked importance weights and partial heads, one token at a time."""
  low, high = CORRECTION.low, CORRECTION.high
  loss, count, kl = 0.0, 0, np.zeros(2)
  for i, trajectory in enumerate(trajectories):
    full = oracle(params, trajectory)
    for s, token in enumerate(trajectory.tokens[trajectory.sampled]):
      ids, logq = trajectory.candidates.row(s)
      q, logp = np.exp(np.float64(logq)), full[s, ids]
      p = np.exp(logp)
      ratio = np.exp(full[s, token] - np.float64(trajectory.logps[s]))
      rho = max(1 - q.sum(), 1e-6) / max(1 - p.sum(), 1e-6)
      coefficient = p * ((low * q <= p) & (p <= high * q)) - (low <= 1 / rho <= high) * p
      score = ratio * (low <= ratio <= high) * full[s, token] - (coefficient * logp).sum()
      loss -= ADV[i] * score
      kl[i % 2] += ratio - 1 - np.log(ratio)
      count += 1
  batch = pack(trajectories, [bucket(4)])
  total = total_of(trainer, params, batch)
  assert len(batch.micro) == 2 and batch.trained == count
  np.testing.assert_allclose(total.loss, loss / count, rtol=1e-4)
  np.testing.assert_allclose(total.aux['kl_sum'], kl, rtol=1e-4)
  assert total.aux['tokens'].sum() == count
  # The corrections are at work: some ratios lie outside the range, some inside.
  assert 0 < (total.aux['masked_low'] + total.aux['masked_high']).sum() < count


def test_micro_batches_do_not_change_the_gradient(trainer, params, trajectories):
  whole = total_of(trainer, params, pack(trajectories, [bucket(8)]))
  for rows in (4, 1):
    batch = pack(trajectories, [bucket(rows)])
    assert len(batch.micro) == 8 // rows
    assert_close(total_of(trainer, params, batch), whole)


def test_packed_equals_one_to_a_row(trainer, params, trajectories):
  packed = pack(trajectories, [bucket(2, 40, 32)])
  assert len(packed.micro) == 1
  apart = pack(trajectories, [bucket(8)])
  assert_close(total_of(trainer, params, packed), total_of(trainer, params, apart))


def test_masked_row_equals_its_absence(trainer, params, trajectories):
  without = pack(trajectories[:7], [bucket(8)], ADV[:7])
  batch = pack(trajectories, [bucket(8)])
  (micro,), row = batch.micro, batch.placements[7].row
  changed = {}
  for name in ('mask', 'logp_sampler', 'candidate_logps', 'adv'):
    changed[name] = getattr(micro, name).copy()
    changed[name][row] = False if name == 'mask' else np.nan
  masked = packing.Batch((micro._replace(**changed),), (), without.trained, 0, 1)
  assert_close(total_of(trainer, params, masked), total_of(trainer, params, without))


def test_the_policy_is_the_rounded_weights(trainer, params, trajectories):
  batch = pack(trajectories, [bucket(4)])
  policy = rounded(params)
  assert (policy['embed']['embedding'] != params['embed']['embedding']).any()
  assert_identical(total_of(trainer, params, batch), total_of(trainer, policy, batch))


def test_one_trace_per_bucket_and_determinism(compiled, params, make_trajectories):
  trainer, traces = compiled
  buckets = (bucket(4), bucket(1))
  state = trainer.init_state(params)
  for seed in range(3):
    # Nine rows: two micro-batches of four and one of one.
    given = make_trajectories([*LENGTHS, 12], seed=seed, temperature=TEMPERATURE)
    batch = pack(given, buckets, [*ADV, 1.0])
    assert len(batch.micro) == 3
    state, metrics = trainer.update(state, batch)
  # No bucket is ever traced twice, in whichever order this file's tests run.
  assert len(traces) == len(set(traces))
  assert {('micro_step', (4, 12)), ('micro_step', (1, 12)), ('apply', None)} <= set(traces)
  assert (int(state.update), int(state.skipped)) == (3, 0)
  assert (metrics['packed_tokens'], metrics['padding_share']) == (85, pytest.approx(1 - 85 / 108))
  # A state saved and restored goes on bit for bit, and nothing crosses to the device unasked.
  restored = jax.device_put(jax.device_get(state), trainer.state_shardings)
  with jax.transfer_guard('disallow'):
    one, _ = trainer.update(state, batch)
    two, _ = trainer.update(restored, batch)
  assert_identical(jax.device_get(one), jax.device_get(two))
  described = [
    jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree)
    for tree in (two, trainer.abstract_state())
  ]
  assert described[0] == described[1]


def test_rewarded_tokens_become_likelier(trainer, params, trajectories, oracle):
  rewarded = trajectories[1]
  chosen = rewarded.tokens[rewarded.sampled]
  rows = np.arange(len(chosen))
  before = oracle(params, rewarded)[rows, chosen]
  # On policy, with the sampled token as its whole head: no ratio leaves the range.
  heads = types.Candidates.from_dense(chosen[:, None], before[:, None])
  rewarded = dataclasses.replace(rewarded, logps=np.float32(before), candidates=heads)
  batch = pack([rewarded], [bucket(4)], [1.0])
  kept = jax.tree.map(np.copy, params)
  state = trainer.init_state(params)
  for _ in range(2):
    state, metrics = trainer.update(state, batch)
  assert metrics['aux']['tokens'].tolist() == [0.0, float(batch.trained)]
  assert (oracle(state.params, rewarded)[rows, chosen] - before).mean() > 0.05
  # What the state was made from is the caller's still.
  assert_identical(params, kept)


def test_not_finite_is_skipped_and_counted(trainer, params, trajectories):
  good = pack(trajectories[:4], [bucket(4)], ADV[:4])
  (micro,) = good.micro
  adv = micro.adv.copy()
  adv[0, 0] = np.inf
  bad = dataclasses.replace(good, micro=(micro._replace(adv=adv),))
  state, _ = trainer.update(trainer.init_state(params), good)
  before = jax.device_get(state)
  state, metrics = trainer.update(state, bad)
  after = jax.device_get(state)
  assert_identical((before.params, before.opt_state), (after.params, after.opt_state))
  assert (int(after.update), int(after.skipped)) == (2, 1)
  assert (float(metrics['skipped']), float(metrics['skipped_total'])) == (1.0, 1.0)
  assert (float(metrics['empty']), float(metrics['update_norm'])) == (0.0, 0.0)
  # The next one is taken, as if the bad one had never been.
  state, metrics = trainer.update(state, good)
  straight, _ = trainer.update(trainer.init_state(params), good)
  straight, _ = trainer.update(straight, good)
  assert_identical(jax.device_get(state.params), jax.device_get(straight.params))
  assert (float(metrics['skipped']), float(metrics['skipped_total'])) == (0.0, 1.0)


def test_a_gradient_that_is_not_finite_is_skipped(trainer, params):
  state = trainer.init_state(params)
  total = trainer.zero_total(state.params)
  scale = total.grads['final_norm']['scale']
  total.grads['final_norm']['scale'] = jax.device_put(scale.at[0].set(np.nan), scale.sharding)
  before = jax.device_get(state)
  everywhere = sharding.replicated(trainer.mesh)
  one = jax.device_put(np.float32(1), everywhere)
  after, metrics = trainer.apply(state, learnable(total, everywhere), one)
  assert_identical(after.params, before.params)
  assert (int(after.skipped), float(metrics['skipped'])) == (1, 1.0)


def test_nothing_to_train_on_is_a_named_no_op(trainer, params, trajectories):
  (micro,) = pack(trajectories[:4], [bucket(4)], ADV[:4]).micro
  masked = micro._replace(mask=np.zeros_like(micro.mask))
  for batch in (packing.Batch((masked,), (), 0, 1, 1), packing.Batch((), (), 0, 0, 0)):
    state = trainer.init_state(params)
    before = jax.device_get(state)
    state, metrics = trainer.update(state, batch)
    after = jax.device_get(state)
    assert_identical((before.params, before.opt_state), (after.params, after.opt_state))
    assert (int(after.update), int(after.skipped)) == (1, 0)
    assert (float(metrics['empty']), float(metrics['skipped'])) == (1.0, 0.0)
    assert float(metrics['loss']) == 0.0


def test_advantages_of_zero_move_nothing(trainer, params, trajectories):
  """Decay and the moments of earlier updates would move weights where there is no gradient."""
  state, _ = trainer.update(
    trainer.init_state(params), pack(trajectories[:4], [bucket(4)], ADV[:4])
  )
  before = jax.device_get(state)
  state, metrics = trainer.update(state, pack(trajectories[:4], [bucket(4)], np.zeros(4)))
  after = jax.device_get(state)
  assert_identical((before.params, before.opt_state), (after.params, after.opt_state))
  assert (int(after.update), int(after.skipped)) == (2, 0)
  assert [float(metrics[name]) for name in ('flat', 'empty', 'skipped')] == [1.0, 0.0, 0.0]
  assert (float(metrics['grad_norm']), float(metrics['update_norm'])) == (0.0, 0.0)
  # One advantage is enough, where only a token that is not trained on has another.
  _, metrics = trainer.update(
    state, pack(trajectories[:4], [bucket(4)], np.array([0, 1e-30, 0, 0]))
  )
  assert float(metrics['flat']) == 0.0


def _numpy_adamw(params, grads, *, decay, steps):
  """Float64: the textbook form, with this file's settings."""
  m = v = np.zeros_like(params)
  for t in range(1, steps + 1):
    m = 0.8 * m + 0.2 * grads
    v = 0.9 * v + 0.1 * grads**2
    direction = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
    params = params - 1e-2 * min(1.0, t / 2) * (direction + decay * params)
  return params


def test_apply_is_adamw(trainer, params):
  rng = np.random.default_rng(0)
  grads = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
  norm = np.sqrt(sum((np.float64(x) ** 2).sum() for x in jax.tree.leaves(grads)))
  assert norm > 2
  state, rates = trainer.init_state(params), []
  total = trainer.zero_total(state.params)
  everywhere = sharding.replicated(trainer.mesh)
  total = total._replace(grads=jax.device_put(grads, trainer.state_shardings.params))
  total = learnable(total, everywhere)
  one = jax.device_put(np.float32(1), everywhere)
  for _ in range(3):
    state, metrics = trainer.apply(state, total, one)
    rates.append(float(metrics['learning_rate']))
    np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-5)
  np.testing.assert_allclose(rates, [5e-3, 1e-2, 1e-2], rtol=1e-6)
  for (path, old), grad, new in zip(
    jax.tree_util.tree_leaves_with_path(params),
    *map(jax.tree.leaves, (grads, state.params)),
    strict=True,
  ):
    # Scales of norms, whose leaves are stacked to [layers, size], do not decay.
    decay = 0.5 if path[-1].key in ('kernel', 'embedding') else 0.0
    expected = _numpy_adamw(np.float64(old), np.float64(grad) * 2 / norm, decay=decay, steps=3)
    np.testing.assert_allclose(new, expected, rtol=1e-4, atol=1e-6)


def test_bf16_compute_is_near_and_sums_in_float32(trainer, params, trajectories, oracle):
  config = dataclasses.replace(CONFIG, compute_dtype='bfloat16', remat=True)
  spec = trainer.spec._replace(config=config)
  batch = pack(trajectories[:1], [bucket(1)], [1.0])
  (micro,) = batch.micro
  shapes = jax.eval_shape(
    functools.partial(update.micro_step, spec),
    params,
    trainer.zero_total(params),
    micro,
    np.float32(1),
  )
  assert {x.dtype for x in jax.tree.leaves(shapes)} == {np.dtype('float32')}
  logps, _ = jax.jit(functools.partial(update.token_logps, spec))(params, micro)
  chosen = trajectories[0].tokens[trajectories[0].sampled]
  expected = oracle(params, trajectories[0])[np.arange(len(chosen)), chosen]
  np.testing.assert_allclose(logps[0, : len(chosen), 0], expected, atol=0.3)


def test_what_is_kept_on_the_host_changes_no_number(model, params, trajectories, compiled):
  config = dataclasses.replace(CONFIG, remat=True, offload=('residuals', 'moments'))
  offloaded = update.Trainer(
    model,
    config,
    correction=CORRECTION,
    temperature=TEMPERATURE,
    num_sources=2,
    mesh=sharding.make_mesh(),
  )
  batch = pack(trajectories[:4], [bucket(4)], ADV[:4])
  states = []
  for trainer in (compiled[0], offloaded):
    state, _ = trainer.update(trainer.init_state(params), batch)
    states.append(state)
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(states[1].opt_state) if x.ndim}
  assert kinds == {'pinned_host'}
  assert {x.sharding.memory_kind for x in jax.tree.leaves(states[1].params)} == {'device'}
  assert_close(jax.device_get(states[1]), jax.device_get(states[0]))


def test_shapes_that_do_not_fit_are_refused(trainer, params, trajectories):
  (micro,) = pack(trajectories[:4], [bucket(4)], ADV[:4]).micro
  short = micro._replace(adv=micro.adv[:, 1:])
  with pytest.raises(AssertionError, match='shape'):
    trainer.micro_step(params, trainer.zero_total(params), short, np.float32(1))
