"""What the trainer is told and what it keeps: settings, the optimiser, the state.

AdamW (Loshchilov and Hutter, 2019), as the reference study (see docs/objective.md) ran it: b1 0.9,
b2 0.98, decay 0.1, a constant learning rate, here after an optional linear warm-up. Weight decay
acts on matrices, the embedding included, and not on the scales of norms.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mimo import checks
from mimo.models.config import ModelConfig
from mimo.models.moe import route_shape
from mimo.models.parallel import MESH_AXES
from mimo.models.table import ROUTER, leaf, nest, table
from mimo.trainer.packing import Bucket
from mimo.types import RouteShape

COMPUTE_DTYPES = ('float32', 'bfloat16')
OFFLOADS = ('residuals', 'moments')

# Of a micro-batch: 64 rows of the longest context here. What is larger is a slip of the hand.
_MOST_TOKENS = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
  """Settings of the update: the section `trainer` of a configuration.

  Attributes:
    learning_rate: reached after `warmup_updates`, then constant.
    b1: decay of AdamW's first moment.
    b2: decay of AdamW's second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled; on matrices only.
    max_grad_norm: gradients of a larger norm are scaled down to it; 0 is off.
    warmup_updates: updates of a linear rise from learning_rate / warmup_updates; 0 is off.
    compute_dtype: 'float32' or 'bfloat16' passes; weights are rounded to bf16 either way.
    remat: computes each layer again in the backward pass instead of keeping it.
    offload: what the host keeps: 'moments', between updates; 'residuals', remat's inputs of layers.
    freeze_router: routers of experts stay as they are: no gradient and no decay.
    replay_routes: sends tokens to the experts that their sampler sent them to, where it said which.
    rows: rows of a micro-batch.
    row_tokens: the most tokens of a row.
    row_trained_tokens: the most tokens of a row that are trained on.
    head_chunk_tokens: how many tokens' logits the head holds at a time.
    mesh: sizes of mesh axes, such as 'fsdp=4,context=2'; empty is one device.

  Where routes are not replayed, the trainer's own router, of other weights and another precision
  than the sampler's, sends some tokens elsewhere, and log-probs are then of other functions than
  those that were drawn from. What a router's weights of the chosen experts are is the trainer's to
  say either way.
  """

  learning_rate: float = 2e-4
  b1: float = 0.9
  b2: float = 0.98
  eps: float = 1e-8
  weight_decay: float = 0.1
  max_grad_norm: float = 1.0
  warmup_updates: int = 2
  compute_dtype: str = 'float32'
  remat: bool = False
  offload: tuple[str, ...] = ()
  freeze_router: bool = False
  replay_routes: bool = False
  rows: int = 8
  row_tokens: int = 160
  row_trained_tokens: int = 80
  head_chunk_tokens: int = 512
  mesh: str = ''

  def __post_init__(self) -> None:
    checks.number('learning_rate', self.learning_rate, above=0, most=1)
    checks.number('b1', self.b1, least=0, below=1)
    checks.number('b2', self.b2, least=0, below=1)
    checks.number('eps', self.eps, above=0, most=1)
    checks.number('weight_decay', self.weight_decay, least=0, most=100)
    checks.number('max_grad_norm', self.max_grad_norm, least=0)
    checks.whole('warmup_updates', self.warmup_updates, least=0)
    checks.one_of('compute_dtype', self.compute_dtype, COMPUTE_DTYPES)
    for name in self.offload:
      checks.one_of('offload', name, OFFLOADS)
    if 'residuals' in self.offload and not self.remat:
      raise ValueError('offload holds residuals and remat is False; expected True')
    checks.whole('rows', self.rows, least=1, most=2**16)
    for name in ('row_tokens', 'row_trained_tokens', 'head_chunk_tokens'):
      checks.whole(name, getattr(self, name), least=1, most=2**24)
    if self.rows * self.row_tokens > _MOST_TOKENS:
      raise ValueError(
        f'rows is {self.rows} and row_tokens {self.row_tokens}; expected at most {_MOST_TOKENS} '
        'tokens in a micro-batch'
      )
    self.mesh_sizes()

  def mesh_sizes(self) -> dict[str, int]:
    """Returns the sizes that `mesh` states, by axis.

    Raises ValueError naming an axis that there is not, or that has no size.

    >>> TrainerConfig(mesh='fsdp=4,context=2').mesh_sizes()
    {'fsdp': 4, 'context': 2}
    """
    sizes: dict[str, int] = {}
    for part in filter(None, self.mesh.split(',')):
      axis, _, size = (piece.strip() for piece in part.partition('='))
      checks.one_of('mesh', axis, MESH_AXES)
      if not size.isdecimal() or axis in sizes:
        raise ValueError(f'mesh is {self.mesh!r}; expected one size of {axis}, a whole number')
      sizes[axis] = int(size)
    return sizes

  @property
  def buckets(self) -> tuple[Bucket, ...]:
    """The shapes of micro-batches."""
    return (Bucket(self.row_tokens, self.row_trained_tokens, self.rows),)


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
