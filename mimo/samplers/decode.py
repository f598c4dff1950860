"""The jitted steps of the native sampler: prefill a chunk, or decode a few tokens.

Both are pure functions of weights, cache and rows. They are compiled once per `Program` and array
shapes, so pools whose models have one shape share their compilations, whatever they weigh.

A row feeds its known tokens first (what is left of a prompt or an observation), draws once they
are used up, and then feeds what it drew, until a stop id or its limit. Rows do not see each other.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mimo.models.activations import ActivationQuant
from mimo.models.config import ModelConfig
from mimo.models.decoder import Cache, extend, extend_routed, head_matrix
from mimo.models.moe import route_shape
from mimo.samplers.draw import Array, Draw, DrawParams, draw
from mimo.types import ROUTE_DTYPE


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
  """What is compiled in.

  Attributes:
    config: the model.
    kv_quant: how keys and values are rounded as they are cached, as `extend` names it.
    num_candidates: K, the largest cap of any row.
    width: how many of the largest logits are looked at before all are, as `draw` has it.
    window: how many positions of the cache are read; no token may lie beyond.
    routes: whether the experts that tokens are sent to are told.
  """

  config: ModelConfig
  kv_quant: str | None
  num_candidates: int
  width: int
  window: int
  routes: bool = False


def computed(config: ModelConfig) -> ModelConfig:
  """Returns `config` without what does not change the computation: equal ones compile once."""
  return dataclasses.replace(config, extra=())


class Weights(NamedTuple):
  """What a view holds, on the device.

  Attributes:
    params: the model's, float32.
    activation_quant: how inputs of projections are rounded, or None.
  """

  params: Any
  activation_quant: ActivationQuant | None


class Rows(NamedTuple):
  """What each slot is to do in one decode.

  Attributes:
    known_ids: [B, N] int32, the next known tokens that are not in the cache yet.
    num_known: [B] int32, how many there are, which may exceed N; 0: the row idles.
    start: [B] int32, how many tokens the cache holds.
    room: [B] int32, how many tokens may be drawn.
    keys: [B, 2] uint32, the session's random key.
    stop_ids: [B, S] int32, padded with -1.
    draw: how each row draws.
  """

  known_ids: Array
  num_known: Array
  start: Array
  room: Array
  keys: Array
  stop_ids: Array
  draw: DrawParams


class Decoded(NamedTuple):
  """What a decode did.

  Attributes:
    draws: leaves [N, B, ...]: row b drew at steps num_known[b] - 1 up to that plus num_drawn[b].
    num_fed: [B] int32, tokens written to the cache.
    num_drawn: [B] int32.
    stopped: [B] bool, whether the last token drawn is a stop id.
    num_steps: [] int32, how many steps were run.
    routes: [N, B, L, k] int16, the experts that the token fed at a step was sent to, -1 where none
      was fed; None where the program does not tell.
  """

  draws: Draw
  num_fed: Array
  num_drawn: Array
  stopped: Array
  num_steps: Array
  routes: Array | None


class _Carry(NamedTuple):
  step: jax.Array
  cache: Cache
  last: jax.Array
  done: jax.Array
  num_fed: jax.Array
  num_drawn: jax.Array
  stopped: jax.Array
  draws: Draw
  routes: jax.Array | None


@functools.partial(jax.jit, static_argnames='program', donate_argnames='cache')
def decode(
  program: Program, weights: Weights, cache: Cache, rows: Rows, min_active: jax.Array
) -> tuple[Cache, Decoded]:
  """Runs up to N steps, one token per row and step.

  Stops early once fewer than `min_active` rows have anything left to do: a full batch is worth
  more than the dispatch that is saved.
  """
  size, max_steps = rows.known_ids.shape
  head = head_matrix(program.config, weights.params)
  keys = jax.random.wrap_key_data(rows.keys, impl='threefry2x32')

  def keep_going(carry: _Carry) -> jax.Array:
    active = jnp.sum(~carry.done)
    return (carry.step < max_steps) & (active >= jnp.maximum(min_active, 1))

  def one(carry: _Carry) -> _Carry:
    step, active = carry.step, ~carry.done
    fed = jnp.where(step < rows.num_known, rows.known_ids[:, step], carry.last)
    start, count = rows.start + step, active.astype(jnp.int32)
    hidden, cache, routes = _extend(program, weights, carry.cache, fed[:, None], start, count)
    # The head is float32 on every backend: the contract states it.
    logits = jnp.dot(hidden[:, 0].astype(jnp.float32), head, precision=jax.lax.Precision.HIGHEST)
    drawn = draw(
      logits,
      jax.vmap(jax.random.fold_in)(keys, rows.start + step + 1),
      rows.draw,
      num_candidates=program.num_candidates,
      width=program.width,
    )
    drew = active & (step + 1 >= rows.num_known)
    num_drawn = carry.num_drawn + drew
    stopped = drew & jnp.any(drawn.ids[:, None] == rows.stop_ids, axis=-1)
    return _Carry(
      step=step + 1,
      cache=cache,
      last=jnp.where(drew, drawn.ids, carry.last),
      done=carry.done | stopped | (drew & (num_drawn >= rows.room)),
      num_fed=carry.num_fed + active,
      num_drawn=num_drawn,
      stopped=carry.stopped | stopped,
      draws=jax.tree.map(lambda old, new: old.at[step].set(new), carry.draws, drawn),
      routes=jax.tree.map(lambda old, new: old.at[step].set(new[:, 0]), carry.routes, routes),
    )

  zeros = jnp.zeros(size, jnp.int32)
  end = jax.lax.while_loop(
    keep_going,
    one,
    _Carry(
      step=jnp.int32(0),
      cache=cache,
      last=zeros,
      done=rows.num_known == 0,
      num_fed=zeros,
      num_drawn=zeros,
      stopped=zeros > 0,
      draws=_empty_draws(program, max_steps, size),
      routes=_empty_routes(program, max_steps, size),
    ),
  )
  return end.cache, Decoded(
    end.draws, end.num_fed, end.num_drawn, end.stopped, end.step, end.routes
  )


@functools.partial(jax.jit, static_argnames='program', donate_argnames='cache')
def prefill(
  program: Program,
  weights: Weights,
  cache: Cache,
  slots: jax.Array,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
) -> tuple[Cache, jax.Array | None]:
  """Writes known tokens of a few slots to the cache.

  Args:
    program: static.
    weights: of the version served.
    cache: of all slots; donated.
    slots: [b] int32, distinct; beyond the last slot where the row is padding.
    tokens: [b, C] int32.
    start: [b] int32, how many tokens each slot's cache holds.
    count: [b] int32, how many of the C are real.

  Returns:
    (the cache, [b, C, L, k] int16 as `Decoded.routes`, or None).
  """
  few = jax.tree.map(lambda a: a.at[:, slots].get(mode='clip'), cache)
  _, few, routes = _extend(program, weights, few, tokens, start, count)
  cache = jax.tree.map(lambda a, new: a.at[:, slots].set(new, mode='drop'), cache, few)
  return cache, routes


def _extend(
  program: Program,
  weights: Weights,
  cache: Cache,
  tokens: jax.Array,
  start: jax.Array,
  count: jax.Array,
) -> tuple[jax.Array, Cache, jax.Array | None]:
  """Returns (hidden, the cache, the routes where the program tells them)."""
  given = (program.config, weights.params, cache, tokens, start, count)
  how: dict[str, Any] = {
    'activation_quant': weights.activation_quant,
    'kv_quant': program.kv_quant,
    'window': program.window,
  }
  if not program.routes:
    return *extend(*given, **how), None
  hidden, cache, routes = extend_routed(*given, **how)
  return hidden, cache, routes.astype(ROUTE_DTYPE)


def _empty_routes(program: Program, steps: int, size: int) -> jax.Array | None:
  shape = route_shape(program.config) if program.routes else None
  if shape is None:
    return None
  return jnp.full((steps, size, shape.layers, shape.per_token), -1, ROUTE_DTYPE)


def _empty_draws(program: Program, steps: int, size: int) -> Draw:
  k = min(program.num_candidates, program.config.vocab_size)
  return Draw(
    ids=jnp.zeros((steps, size), jnp.int32),
    logps=jnp.zeros((steps, size), jnp.float32),
    candidate_ids=jnp.zeros((steps, size, k), jnp.int32),
    candidate_logps=jnp.zeros((steps, size, k), jnp.float32),
    full_support=jnp.zeros((steps, size), bool),
  )
