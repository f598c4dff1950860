"""How much memory an update takes on each device, by counting arrays: nothing is run or compiled.

Counts are of arrays that must exist at once, from the shapes of the model, the micro-batch and the
mesh. What a compiler adds for itself (padding, copies, fragmentation) is not in them; a compiled
program's own figures are what `mimo.experiments.plan` prints beside them.

Axis letters: n tokens of a device, D hidden size, V vocabulary, E experts, k experts of a token,
F features of an expert, H heads, Dh their size, C channels of a delta net's convolution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from mimo.models.config import DELTA, ModelConfig
from mimo.models.parallel import MESH_AXES, Parallel, only, spec_axes
from mimo.models.parallel_mixers import EXPERT_TOKENS
from mimo.models.table import Param, table
from mimo.trainer.packing import Bucket
from mimo.trainer.state import TrainerConfig, replayed_routes

_F32 = 4


class Line(NamedTuple):
  """One line of a plan: what, and its bytes on a device and on its host."""

  name: str
  device: int
  host: int = 0


@dataclasses.dataclass(frozen=True)
class Plan:
  """Bytes of one device.

  Attributes:
    state: what lives from update to update: parameters, moments, the sums of gradients.
    step: what a micro-step adds to it at its peak.
  """

  state: tuple[Line, ...]
  step: tuple[Line, ...]

  @property
  def device(self) -> int:
    """Bytes on the device at the peak."""
    return sum(line.device for line in (*self.state, *self.step))

  @property
  def host(self) -> int:
    """Bytes on the host, of this device."""
    return sum(line.host for line in (*self.state, *self.step))


def make_parallel(sizes: Mapping[str, int]) -> Parallel:
  """Returns a mesh of these sizes without devices: for counting only."""
  shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
  return Parallel(AbstractMesh(shape, MESH_AXES))


def parameter_count(model: ModelConfig) -> int:
  """How many parameters the model has."""
  return sum(math.prod(row.leaf_shape) for row in table(model))


def active_parameter_count(model: ModelConfig) -> int:
  """How many parameters a token meets: of the experts, those it is sent to."""
  total = 0
  for row in table(model):
    count = math.prod(row.leaf_shape)
    if row.experts:
      assert model.moe is not None
      count = count * model.moe.experts_per_token // row.experts
    total += count
  return total


def make_plan(
  model: ModelConfig,
  config: TrainerConfig,
  bucket: Bucket,
  *,
  num_candidates: int,
  parallel: Parallel,
) -> Plan:
  """Counts what an update of micro-batches of this shape takes.

  The peak is within the backward pass of one layer, when the layers before it are kept, or of the
  head, whichever is larger.
  """
  stored = sum(_stored(row, parallel) for row in table(model))
  moments = 2 * _F32 * stored
  on_host = 'moments' in config.offload
  state = (
    Line('parameters', _F32 * stored),
    Line('moments', 0 if on_host else moments, moments if on_host else 0),
    Line('gradient sums', _F32 * stored),
  )
  work = _Work(model, config, bucket, parallel)
  kept = work.kept()
  away = config.remat and 'residuals' in config.offload
  layer, head = work.layer(), work.head(num_candidates)
  step = (
    Line('weights rounded to bf16, in float32', _F32 * stored),
    Line('gradient of the micro-step', _F32 * stored),
    Line(
      'inputs of blocks' if config.remat else 'what blocks keep',
      0 if away else kept,
      kept if away else 0,
    ),
    Line('micro-batch', work.batch(num_candidates)),
    Line('embedding gathered, and its gradient', work.embedding()),
    Line('head and a chunk of logits', head)
    if head > layer
    else Line('one block: recomputed, its weights gathered, its gradients', layer),
  )
  return Plan(state, step)


def _stored(row: Param, parallel: Parallel) -> int:
  """Elements of a parameter that one device stores."""
  return _part(row.leaf_shape, parallel.param(row.leaf_shape, row.leaf_axes), parallel)


def _part(shape: tuple[int, ...], spec: P, parallel: Parallel) -> int:
  return math.prod(shape) // math.prod(parallel.size(axis) for axis in spec_axes(spec))


@dataclasses.dataclass(frozen=True)
class _Work:
  """The arrays of one micro-step on one device."""

  model: ModelConfig
  config: TrainerConfig
  bucket: Bucket
  parallel: Parallel

  @property
  def width(self) -> int:
    """Bytes of an activation."""
    return jnp.dtype(self.config.compute_dtype).itemsize

  @property
  def rows(self) -> int:
    """Rows of a device."""
    return self._local((self.bucket.rows,), ('rows',))

  @property
  def tokens(self) -> int:
    """n: tokens of a device."""
    return self._local((self.bucket.rows, self.bucket.tokens), ('rows', 'context'))

  def _local(self, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> int:
    return _part(shape, self.parallel.activation(shape, axes), self.parallel)

  def _over_tensor(self, size: int, axis: str) -> int:
    """What a device has of features that are split over 'tensor' where they divide."""
    return self._local((size,), (axis,))

  def kept(self) -> int:
    """Bytes that all blocks keep for the backward pass; with remat their inputs, [n, D] each.

    Without it also what they read, which includes the weights they gathered.
    """
    n, d, b = self.tokens, self.model.hidden_size, self.width
    inputs = self.model.num_layers * n * d * b
    if self.config.remat:
      return inputs
    held = 0
    inputs += sum(self._gathered().values())  # weights, as they were gathered
    if self.model.moe is not None:  # experts that run in chunks keep their inputs only
      held = self._experts() - self._experts_kept()
    return inputs + sum(self._block(kind) - held for kind in self.model.layer_types)

  def layer(self) -> int:
    """The largest block: what its backward pass reads, as much of gradients, gathered weights."""
    blocks = max(self._block(kind) for kind in set(self.model.layer_types))
    if not self.config.remat:
      blocks //= 2  # what it reads is kept already
    weights = max(self._gathered().values())
    return 2 * blocks + (2 if self.config.remat else 1) * weights

  def _block(self, kind: str) -> int:
    mixer = self._delta() if kind == DELTA else self._attention()
    return mixer + self._feed_forward()

  def _attention(self) -> int:
    """x normalised; q (and its gate), k and v as projected, normalised and rotated; the result."""
    m, n, b = self.model, self.tokens, self.width
    q = self._over_tensor(m.num_heads, 'heads') * m.head_dim
    k = self._over_tensor(m.num_kv_heads, 'kv_heads') * m.head_dim
    per_token = m.hidden_size + 3 * q + 4 * k + q
    if m.gated:
      per_token += 2 * q
    whole = 0
    if self.parallel.size('context') > 1:  # keys and values of whole rows
      whole = 2 * self.rows * self.bucket.tokens * k * b
    log_sums = self._over_tensor(m.num_heads, 'heads') * n * _F32
    return n * per_token * b + whole + log_sums

  def _delta(self) -> int:
    """x normalised; q, k, v before and after the convolution and silu; z; decays; the results."""
    m, n, b, c = self.model, self.tokens, self.width, self.model.delta
    assert c is not None
    channels = 2 * c.key_size + c.value_size
    values = self._over_tensor(c.num_value_heads, 'delta_heads') * c.value_head_dim
    heads = self._over_tensor(c.num_value_heads, 'delta_heads')
    mixed = self._over_tensor(channels, 'delta_qkv')
    per_token = b * (m.hidden_size + 4 * mixed + 4 * values) + _F32 * (values + 3 * heads)
    return n * per_token

  def _feed_forward(self) -> int:
    m, n, b = self.model, self.tokens, self.width
    if m.moe is None:
      features = self._over_tensor(m.intermediate_size, 'mlp')
      return n * b * (m.hidden_size + 3 * features)
    routed = n * (m.hidden_size * (b + _F32) + 2 * m.moe.num_experts * _F32)
    shared = self._over_tensor(m.moe.shared_intermediate_size or 1, 'mlp')
    return routed + n * b * 3 * shared + self._experts()

  def _experts(self) -> int:
    return max(self._expert_bytes())

  def _experts_kept(self) -> int:
    return self._expert_bytes()[1]

  def _expert_bytes(self) -> tuple[int, int]:
    """While they run, and what is kept: sorted [n k, D], [n k, F] three times, a float32 sum."""
    m, b = self.model, self.width
    assert m.moe is not None
    spec = self.parallel.activation((self.bucket.rows, self.bucket.tokens), ('rows', 'context'))
    tokens = self.tokens
    if 'expert' in spec_axes(spec) and m.moe.num_experts % self.parallel.size('expert') == 0:
      tokens *= self.parallel.size('expert')
    chunked = tokens > EXPERT_TOKENS
    tokens = min(tokens, EXPERT_TOKENS)
    features = m.moe.intermediate_size
    if features % self.parallel.size('tensor') == 0:
      features //= self.parallel.size('tensor')
    each = b * (2 * m.hidden_size + 3 * features) + _F32 * m.hidden_size
    working = tokens * m.moe.experts_per_token * each
    return working, self.tokens * m.hidden_size * b if chunked else working

  def _gathered(self) -> dict[int, int]:
    """Each block's weights in the compute dtype, as a device uses them."""
    blocks: dict[int, int] = {}
    for row, layer in _rows_by_layer(self.model):
      shape, axes = row.leaf_shape[1:], row.leaf_axes[1:]
      spec = only(self.parallel.param(shape, axes), ('tensor', *(('expert',) * bool(row.experts))))
      size = self.width * _part(shape, spec, self.parallel)
      blocks[layer] = blocks.setdefault(layer, 0) + size
    return blocks

  def _vocabulary(self) -> int:
    """Elements of the embedding, or of the head, split over 'tensor' only."""
    shape = (self.model.vocab_size, self.model.hidden_size)
    return _part(
      shape, only(self.parallel.param(shape, ('vocab', None)), ('tensor',)), self.parallel
    )

  def embedding(self) -> int:
    """The embedding and its gradient, in float32."""
    return 2 * _F32 * self._vocabulary()

  def head(self, num_candidates: int) -> int:
    """The head and its gradient; hidden states of trained tokens; logits and their gradient."""
    chunk = min(self.config.head_chunk_tokens, self._trained())
    logits = chunk * (self._vocabulary() // self.model.hidden_size) * _F32
    rows = self.rows * self.bucket.trained * self.model.hidden_size * self.width
    ids = self._trained() * (1 + num_candidates) * 3 * _F32
    states = self._trained() * self.model.hidden_size * 3 * _F32
    return 2 * _F32 * self._vocabulary() + 3 * logits + 2 * rows + ids + states

  def batch(self, num_candidates: int) -> int:
    """The micro-batch itself."""
    shape = replayed_routes(self.model, self.config)
    routes = 0 if shape is None else 2 * shape.layers * shape.per_token
    return (12 + routes) * self.tokens + self._trained() * (8 * num_candidates + 22)

  def _trained(self) -> int:
    return self._local((self.bucket.rows, self.bucket.trained), ('rows', 'context'))


def _rows_by_layer(model: ModelConfig) -> Iterator[tuple[Param, int]]:
  for row in table(model):
    for layer in row.layers or ():
      yield row, layer
