"""What the trainer is told and what it keeps: settings, the optimiser, the state.

AdamW (Loshchilov and Hutter, 2019), as the reference study (see docs/objective.md) ran it: b1 0.9,
b2 0.98, decay 0.1, a constant learning rate, here after an optional linear warm-up. Weight decay
acts on matrices, the embedding included, and not on the scales of norms.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mimo.models.config import ModelConfig
from mimo.models.moe import route_shape
from mimo.models.table import ROUTER, leaf, nest, table
from mimo.types import RouteShape

COMPUTE_DTYPES = ('float32', 'bfloat16')
OFFLOADS = ('residuals', 'moments')


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
  """Settings of the update.

  Attributes:
    learning_rate: reached after `warmup_updates`, then constant.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled; on matrices only.
    max_grad_norm: gradients of a larger norm are scaled down to it; 0 is off.
    warmup_updates: the first rises linearly from learning_rate / warmup_updates; 0 is off.
    temperature: logits are divided by it, as the samplers do.
    head_chunk_tokens: how many tokens' logits the head holds at a time.
    compute_dtype: of the forward and backward passes. Weights are rounded to bf16 either way.
    remat: whether the backward pass computes each layer again instead of keeping it.
    offload: what is kept in the host's memory: 'residuals', the inputs of layers, which remat
      keeps; 'moments', between updates.
    freeze_router: whether the routers of experts stay as they are: no gradient and no decay.
    replay_routes: whether tokens are sent to the experts that their sampler sent them to, where it
      said which. The trainer's own router, of other weights and another precision, sends some
      elsewhere, and log-probs are then of other functions than those that were drawn from.
      What a router's weights of the chosen experts are is the trainer's to say either way.
  """

  learning_rate: float
  b1: float = 0.9
  b2: float = 0.98
  eps: float = 1e-8
  weight_decay: float = 0.1
  max_grad_norm: float = 0.0
  warmup_updates: int = 0
  temperature: float = 1.0
  head_chunk_tokens: int = 512
  compute_dtype: str = 'float32'
  remat: bool = False
  offload: tuple[str, ...] = ()
  freeze_router: bool = False
  replay_routes: bool = False

  def __post_init__(self) -> None:
    for name in ('learning_rate', 'eps', 'temperature'):
      value = getattr(self, name)
      if not (value > 0 and math.isfinite(value)):
        raise ValueError(f'{name} is {value}; expected a finite number above 0')
    for name in ('weight_decay', 'max_grad_norm', 'warmup_updates'):
      value = getattr(self, name)
      if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f'{name} is {value}; expected a finite number of at least 0')
    for name in ('b1', 'b2'):
      value = getattr(self, name)
      if not 0 <= value < 1:
        raise ValueError(f'{name} is {value}; expected a number in [0, 1)')
    for name in self.offload:
      if name not in OFFLOADS:
        raise ValueError(f'offload holds {name!r}; expected some of {", ".join(OFFLOADS)}')
    if 'residuals' in self.offload and not self.remat:
      raise ValueError('offload holds residuals and remat is False; expected True')
    if self.head_chunk_tokens < 1:
      raise ValueError(f'head_chunk_tokens is {self.head_chunk_tokens}; expected at least 1')
    if self.compute_dtype not in COMPUTE_DTYPES:
      raise ValueError(
        f'compute_dtype is {self.compute_dtype!r}; expected one of {", ".join(COMPUTE_DTYPES)}'
      )


def replayed_routes(model: ModelConfig, config: TrainerConfig) -> RouteShape | None:
  """Returns the shape of the routes that batches bring, None where none are replayed.

  Raises ValueError where they are asked for of a model that has no experts.
  """
  if not config.replay_routes:
    return None
  shape = route_shape(model)
  if shape is None:
    raise ValueError(f'replay_routes is True of a {model.family} model; expected one with experts')
  return shape


class TrainState(NamedTuple):
  """All that an update changes. A pytree.

  Attributes:
    params: float32 master parameters.
    opt_state: float32 moments and the count of updates applied.
    update: [] int32, batches taken, skipped ones included.
    skipped: [] int32, batches whose loss or gradient was not finite: they changed no parameter.
  """

  params: Any
  opt_state: Any
  update: jax.Array
  skipped: jax.Array


def learning_rate(config: TrainerConfig, applied: jax.Array) -> jax.Array:
  """The rate of the next update, after `applied` of them."""
  return config.learning_rate * jnp.minimum(1.0, (applied + 1) / max(config.warmup_updates, 1))


def optimizer(model: ModelConfig, config: TrainerConfig) -> optax.GradientTransformation:
  """AdamW's direction of ascent, before the learning rate: m / (sqrt(v) + eps) + decay * params.

  Clipping and the learning rate are the update's, which reports them.
  """
  frozen = frozen_paths(model, config)
  matrices = nest({row.path: len(row.shape) > 1 and row.path not in frozen for row in table(model)})
  return optax.chain(
    optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps, mu_dtype=jnp.float32),
    optax.add_decayed_weights(config.weight_decay, mask=matrices),
  )


def frozen_paths(model: ModelConfig, config: TrainerConfig) -> frozenset[tuple[str, ...]]:
  """Returns the paths of the parameters that no update changes.

  Raises ValueError where routers are to be frozen of a model that has none.
  """
  if config.freeze_router and model.moe is None:
    raise ValueError(f'freeze_router is True of a {model.family} model; expected one with experts')
  rows = table(model) if config.freeze_router else ()
  return frozenset(row.path for row in rows if row.path[-2:] == ROUTER)


def hold_frozen(model: ModelConfig, config: TrainerConfig, params: Any) -> Any:
  """Returns `params`, whose frozen ones have a gradient of zero."""
  frozen = frozen_paths(model, config)
  if not frozen:
    return params
  leaves = {row.path: leaf(params, row.path) for row in table(model)}
  return nest({p: jax.lax.stop_gradient(x) if p in frozen else x for p, x in leaves.items()})


def new_state(model: ModelConfig, config: TrainerConfig, params: Any) -> TrainState:
  """A state that starts from `params`, copied: an update donates its state."""
  params = jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), params)
  zero = jnp.zeros((), jnp.int32)
  return TrainState(params, optimizer(model, config).init(params), zero, jnp.copy(zero))
