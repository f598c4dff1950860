"""One update: gradients summed over micro-batches, then AdamW, jitted over a mesh.

  g = sum over micro-batches of grad_w [ loss of its tokens / N ],   w = bf16(master)
  master <- master - AdamW(g)

N is the count of trained tokens in the whole batch, so how the batch was cut into micro-batches
changes nothing but the order of float32 sums. The gradient is taken with respect to the rounded
weights, which are the policy, and applied to the masters.

The functions are pure; `Trainer` holds what they are compiled for. Nothing here waits for the
device: metrics are device scalars, which a loop fetches once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mimo.models.config import ModelConfig
from mimo.models.decoder import forward, forward_replayed, head_matrix
from mimo.models.parallel import Parallel, constrain
from mimo.models.table import nest, table
from mimo.objectives import Correction, merge_aux, policy_loss
from mimo.objectives.diagnostics import accumulate
from mimo.trainer import sharding
from mimo.trainer.head import trained_logps
from mimo.trainer.packing import Batch, Bucket, MicroBatch, empty_micro_batch
from mimo.trainer.rounding import policy_params
from mimo.trainer.state import (
  TrainerConfig,
  TrainState,
  hold_frozen,
  learning_rate,
  new_state,
  optimizer,
  replayed_routes,
)

# The head's matmul and the logits, whatever the layers compute in. A sampler must state the same.
LOGITS_DTYPE = 'float32'

# The sum of |adv| over trained tokens, in aux: where it is 0 there is nothing to learn.
ADVANTAGE_SIZE = 'advantage_size_sum'


class Spec(NamedTuple):
  """What an update is compiled for. Hashable.

  Attributes:
    model: the decoder.
    config: settings of the update.
    correction: the loss's switches.
    temperature: divides the logits, as the samplers' does.
    num_sources: how many pools aux is split over.
    mesh: where it runs.
  """

  model: ModelConfig
  config: TrainerConfig
  correction: Correction
  temperature: float
  num_sources: int
  mesh: Mesh


class Total(NamedTuple):
  """Sums over the micro-batches of a batch: gradients as the parameters, loss [], aux."""

  grads: Any
  loss: jax.Array
  aux: Any


def token_logps(spec: Spec, params: Any, micro: MicroBatch) -> tuple[jax.Array, jax.Array]:
  """Log-probs of the trained tokens and their candidates, and the entropy.

  Args:
    spec: the model and the temperature.
    params: the policy's, already rounded.
    micro: a micro-batch.

  Returns:
    (logps [R, M, 1 + K] float32, the target first; entropy [R, M] float32), over the full
    vocabulary after temperature, in nats. Candidates of id -1 give 0.
  """
  return _run(spec, params, micro)[:2]


def _run(
  spec: Spec, params: Any, micro: MicroBatch
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """`token_logps`, and the share of layers whose replayed routes are not the router's choice.

  [R, M] float32, of the pass that predicts each trained token, NaN where no routes are known; None
  where none are replayed.
  """
  _check(spec, micro)
  parallel = Parallel(spec.mesh)
  given = (spec.model, params, micro.tokens, micro.segment_ids, micro.positions)
  how: dict[str, Any] = {
    'dtype': jnp.dtype(spec.config.compute_dtype),
    'remat': 'host' if 'residuals' in spec.config.offload else spec.config.remat,
    'parallel': parallel,
  }
  different = None
  if spec.config.replay_routes:
    hidden, layers = forward_replayed(*given, micro.routes, **how)
    known = jnp.all(micro.routes >= 0, axis=(-2, -1))
    share = jnp.where(known, layers / spec.model.num_layers, jnp.nan)
    different = jnp.take_along_axis(share, micro.predict, axis=1)
  else:
    hidden = forward(*given, **how)
  hidden = constrain(parallel, hidden, 'rows', 'context', None)
  # Only these go through the head: an array of every position and candidate is never made.
  logps, entropy = trained_logps(
    parallel,
    hidden,
    head_matrix(spec.model, params).astype(LOGITS_DTYPE),
    micro.predict,
    jnp.concatenate([micro.targets[..., None], micro.candidate_ids], axis=-1),
    temperature=spec.temperature,
    chunk=spec.config.head_chunk_tokens,
  )
  return logps, entropy, different


def objective(
  spec: Spec,
  micro: MicroBatch,
  logps: jax.Array,
  entropy: jax.Array,
  denominator: jax.Array,
  different: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The micro-batch's share of the batch's loss, and aux: sums and counts, [num_sources] each.

  `different` is the share of layers that would have sent a token elsewhere, NaN where that is not
  known, [R, M] float32, where routes are replayed.
  """
  loss, aux = policy_loss(
    logp_trainer=logps[..., 0],
    logp_trainer_candidates=logps[..., 1:],
    logp_sampler=micro.logp_sampler,
    logp_sampler_candidates=micro.candidate_logps,
    candidate_ids=micro.candidate_ids,
    full_support=micro.full_support,
    adv=micro.adv,
    mask=micro.mask,
    correction=spec.correction,
    denominator=denominator,
    source=micro.source,
    num_sources=spec.num_sources,
  )
  sums = {'entropy_sum': jax.lax.stop_gradient(entropy), ADVANTAGE_SIZE: jnp.abs(micro.adv)}
  if different is not None:
    known = jnp.isfinite(different)
    sums['routed_sum'] = known.astype(jnp.float32)
    sums['route_difference_sum'] = jnp.where(known, different, 0.0)
  return loss, aux | accumulate(sums, micro.mask, micro.source, spec.num_sources)


def micro_step(
  spec: Spec, params: Any, total: Total, micro: MicroBatch, denominator: jax.Array
) -> Total:
  """Adds one micro-batch's gradients, loss and aux to `total`."""
  chex.assert_rank(denominator, 0)

  def loss_of(policy: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    policy = hold_frozen(spec.model, spec.config, policy)
    logps, entropy, different = _run(spec, policy, micro)
    return objective(spec, micro, logps, entropy, denominator, different)

  (loss, aux), grads = jax.value_and_grad(loss_of, has_aux=True)(policy_params(params))
  return Total(
    jax.tree.map(jnp.add, total.grads, grads), total.loss + loss, merge_aux(total.aux, aux)
  )


def zero_total(spec: Spec, params: Any) -> Total:
  """Nothing summed yet, for parameters of these shapes."""
  micro = empty_micro_batch(Bucket(tokens=1, trained=1, rows=1), num_candidates=1)
  one = jnp.zeros((1, 1))
  different = one if spec.config.replay_routes else None
  # What aux holds is the objective's to say; its leaves do not depend on a bucket's shape.
  shapes = jax.eval_shape(
    functools.partial(objective, spec), micro, jnp.zeros((1, 1, 2)), one, one[0, 0], different
  )
  loss, aux = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  return Total(jax.tree.map(jnp.zeros_like, params), loss, aux)


def apply(
  spec: Spec, state: TrainState, total: Total, denominator: jax.Array
) -> tuple[TrainState, dict[str, Any]]:
  """One step of AdamW, unless there was nothing to learn from or something was not finite.

  Either way `state.update` goes on by one. Parameters, moments and the optimiser's own count stay
  as they are where the batch is `empty` (it has no trained token) or `flat` (every advantage is 0,
  so that decay and old moments alone would move the parameters), or where the update is `skipped`
  (the loss, the gradient's norm or the step's was not finite; counted in `state.skipped`).

  Returns:
    (state, metrics): float32 scalars, and `aux`.
  """
  chex.assert_trees_all_equal_structs(state.params, total.grads)
  grad_norm = optax.tree.norm(total.grads)
  grads = total.grads
  if spec.config.max_grad_norm:
    # A norm of 0 gives a scale of 1; one that is not finite is skipped below.
    scale = spec.config.max_grad_norm / jnp.maximum(grad_norm, spec.config.max_grad_norm)
    grads = jax.tree.map(lambda x: x * scale, grads)
  rate = learning_rate(spec.config, optax.tree.get(state.opt_state, 'count'))
  steps, opt_state = optimizer(spec.model, spec.config).update(grads, state.opt_state, state.params)
  steps = jax.tree.map(lambda x: -rate * x, steps)
  update_norm = optax.tree.norm(steps)
  params = optax.apply_updates(state.params, steps)
  finite = jnp.isfinite(total.loss) & jnp.isfinite(grad_norm) & jnp.isfinite(update_norm)
  empty = denominator == 0
  flat = (jnp.sum(total.aux[ADVANTAGE_SIZE]) == 0) & ~empty
  skipped = ~finite & ~empty & ~flat
  taken = finite & ~empty & ~flat
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(taken, new, old),
    (params, opt_state),
    (state.params, state.opt_state),
  )
  metrics = {
    'loss': total.loss,
    'grad_norm': grad_norm,
    'update_norm': jnp.where(taken, update_norm, 0.0),
    'param_norm': optax.tree.norm(params),
    'learning_rate': rate,
    'skipped': skipped.astype(jnp.float32),
    'empty': empty.astype(jnp.float32),
    'flat': flat.astype(jnp.float32),
    'aux': total.aux,
  }
  state = TrainState(params, opt_state, state.update + 1, state.skipped + skipped)
  return state, metrics | {'skipped_total': state.skipped.astype(jnp.float32)}


class Trainer:
  """The update, compiled for one model, objective and mesh.

  `zero_total(params)`, `micro_step(params, total, micro, denominator)` and `apply(state, total,
  denominator)` are the functions of those names, jitted; `micro_step` donates its total and `apply`
  its state. `update` composes them.

  Args:
    model: the decoder.
    config: settings of the update.
    correction: the loss's switches.
    temperature: divides the logits, as the samplers' does.
    num_sources: how many pools aux is split over.
    mesh: of `sharding.make_mesh`.

  Attributes:
    routes: the shape of those that batches must bring; None where none are replayed.
  """

  def __init__(
    self,
    model: ModelConfig,
    config: TrainerConfig,
    *,
    correction: Correction,
    temperature: float,
    num_sources: int,
    mesh: Mesh,
  ) -> None:
    self.spec = Spec(model, config, correction, temperature, num_sources, mesh)
    self.routes = replayed_routes(model, config)
    self.mesh = mesh
    everywhere: Any = sharding.replicated(mesh)
    params = sharding.param_shardings(model, mesh)
    totals = Total(params, everywhere, everywhere)
    near = TrainState(params, self._like_params(params, everywhere), everywhere, everywhere)
    self.state_shardings, step = near, functools.partial(apply, self.spec)
    if 'moments' in config.offload:
      far = jax.tree.map(lambda leaf: leaf.with_memory_kind('pinned_host'), params)
      self.state_shardings = near._replace(opt_state=self._like_params(far, everywhere))
      step = functools.partial(_fetch_and_apply, step, near)
    self._new_state = jax.jit(
      functools.partial(new_state, model, config), out_shardings=self.state_shardings
    )
    self.zero_total = jax.jit(
      functools.partial(zero_total, self.spec), in_shardings=(params,), out_shardings=totals
    )
    # Micro-batches bring their own sharding, which depends on how many rows their bucket has.
    self.micro_step = jax.jit(
      functools.partial(micro_step, self.spec),
      in_shardings=(params, totals, None, everywhere),
      out_shardings=totals,
      donate_argnums=1,
    )
    self.apply = jax.jit(
      step,
      in_shardings=(self.state_shardings, totals, everywhere),
      out_shardings=(self.state_shardings, everywhere),
      donate_argnums=0,
    )

  def init_state(self, params: Any) -> TrainState:
    """A state that starts from a copy of `params`, which may be host arrays."""
    return self._new_state(params)

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of a state: what a checkpoint is restored into."""
    return jax.tree.map(
      lambda x, leaf: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=leaf),
      self._abstract_state(),
      self.state_shardings,
    )

  def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
    """Learns from one batch. `state` is donated: use the one returned.

    Returns:
      (state, metrics): what `apply` returns, on the device, and two numbers of the batch on the
      host, `packed_tokens` and `padding_share`.
    """
    denominator = jax.device_put(np.float32(batch.trained), sharding.replicated(self.mesh))
    total = self.zero_total(state.params)
    for micro in batch.micro:
      micro = sharding.place(micro, self.mesh)
      total = self.micro_step(state.params, total, micro, denominator)
    state, metrics = self.apply(state, total, denominator)
    host = {'packed_tokens': float(batch.tokens), 'padding_share': batch.padding_share}
    return state, metrics | host

  def _like_params(self, params: Any, other: Any) -> Any:
    """The optimiser's state with `params` for each of its trees of moments, else `other`."""
    return optax.tree.map_params(
      optimizer(self.spec.model, self.spec.config),
      lambda _, leaf: leaf,
      self._abstract_state().opt_state,
      params,
      transform_non_params=lambda _: other,
    )

  def _abstract_state(self) -> TrainState:
    model = self.spec.model
    params = nest(
      {row.path: jax.ShapeDtypeStruct(row.leaf_shape, jnp.float32) for row in table(model)}
    )
    return jax.eval_shape(functools.partial(new_state, model, self.spec.config), params)


def _fetch_and_apply(
  step: Callable[..., Any], near: TrainState, state: TrainState, *rest: Any
) -> tuple[TrainState, dict[str, Any]]:
  """`apply` of a state whose moments are kept on the host."""
  return step(jax.device_put(state, near), *rest)


def _check(spec: Spec, micro: MicroBatch) -> None:
  """The shapes and dtypes that `MicroBatch` states."""
  rows, tokens = micro.tokens.shape
  trained, candidates = micro.candidate_ids.shape[1:]
  chex.assert_shape([micro.tokens, micro.segment_ids, micro.positions], (rows, tokens))
  per_token = [micro.predict, micro.targets, micro.mask, micro.logp_sampler]
  per_token += [micro.full_support, micro.adv, micro.source]
  chex.assert_shape(per_token, (rows, trained))
  chex.assert_shape([micro.candidate_ids, micro.candidate_logps], (rows, trained, candidates))
  ids = [micro.tokens, micro.segment_ids, micro.positions, micro.predict, micro.targets]
  chex.assert_type([*ids, micro.candidate_ids, micro.source], int)
  chex.assert_type([micro.mask, micro.full_support], bool)
  chex.assert_type([micro.logp_sampler, micro.candidate_logps, micro.adv], float)
  shape = replayed_routes(spec.model, spec.config)
  if shape is not None:
    if micro.routes is None:
      raise ValueError('replay_routes is True and the batch brings no routes; expected some')
    chex.assert_shape(micro.routes, (rows, tokens, shape.layers, shape.per_token))
    chex.assert_type(micro.routes, int)
