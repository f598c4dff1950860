"""The parameter table: one row per parameter of a decoder.

Sharding, import, export and the quantisers all read it, so a parameter's Hugging Face name, its
layout there and its logical axes are stated once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mimo.models.config import DELTA, ModelConfig

HEAD = 'lm_head.weight'
EMBEDDING = 'model.embed_tokens.weight'
ROUTER = ('router', 'kernel')  # how the path of a router ends

Index = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Param:
  """One parameter: a leaf, and the Hugging Face tensors that it stacks.

  Attributes:
    path: its keys in the parameter dict.
    hf_name: the Hugging Face name of a tensor, with '{layer}' and '{expert}' where the leaf stacks
      one per layer and per expert.
    shape: of one tensor, in our layout.
    axes: a logical axis, or None, for each dimension of `shape`: 'vocab', 'embed', 'heads',
      'kv_heads', 'mlp', 'expert_mlp', 'delta_heads' (value heads of a delta net) or 'delta_qkv'
      (its queries, keys and values, end to end). At most one dimension of the embedding and of the
      head has a name: an embedding that is sharded on both dimensions is gathered whole at every
      lookup.
    in_dims: how many leading dimensions of `shape` are a projection's input; 0 where our layout
      is Hugging Face's.
    layers: the decoder layers whose tensors the leaf stacks, in order; None: it stacks none.
    experts: how many experts' tensors the leaf stacks for each layer; 0: it stacks none.
    quantisable: whether low-precision formats store it quantised.
    fuse_group: tensors of one module with the same group are fused by servers, and share one
      nvfp4 global scale (see `fuse_key`); None for a tensor that stands alone.
  """

  path: tuple[str, ...]
  hf_name: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  in_dims: int
  layers: tuple[int, ...] | None
  experts: int
  quantisable: bool
  fuse_group: str | None

  @property
  def lead_shape(self) -> tuple[int, ...]:
    """The leading dimensions of the leaf, which an index into it fixes: layers, then experts."""
    return (
      *(() if self.layers is None else (len(self.layers),)),
      *(self.experts,) * bool(self.experts),
    )

  @property
  def leaf_shape(self) -> tuple[int, ...]:
    """The shape of the leaf."""
    return (*self.lead_shape, *self.shape)

  @property
  def leaf_axes(self) -> tuple[str | None, ...]:
    """A logical axis, or None, for each dimension of the leaf; 'expert' for that of experts."""
    lead = () if self.layers is None else (None,)
    return (*lead, *('expert',) * bool(self.experts), *self.axes)

  def hf_names(self) -> Iterator[tuple[str, Index]]:
    """Yields (Hugging Face name, index into the leaf) of each tensor, in the leaf's order."""
    for index in np.ndindex(*self.lead_shape):
      yield self.hf_name_at(index), index

  def hf_name_at(self, index: Index) -> str:
    """Returns the Hugging Face name of the tensor at an index into the leaf."""
    if self.layers is None:
      return self.hf_name
    # Formatting both is harmless where there is no '{expert}'.
    return self.hf_name.format(layer=self.layers[index[0]], expert=index[-1])

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """The Hugging Face tensor's shape: [out, in] for a projection."""
    if not self.in_dims:
      return self.shape
    return math.prod(self.shape[self.in_dims :]), math.prod(self.shape[: self.in_dims])

  def to_hf(self, x: Any) -> Any:
    """One tensor in our layout -> Hugging Face's. numpy or jax; the dtype is kept."""
    return x if not self.in_dims else x.reshape(self.hf_shape[::-1]).T

  def from_hf(self, x: Any) -> Any:
    """The inverse of `to_hf`."""
    return x if not self.in_dims else x.T.reshape(self.shape)


class _Rows:
  """Makes the rows of one position of the pattern: of the layers that have it."""

  def __init__(self, config: ModelConfig, position: int):
    period = len(config.pattern)
    self.layers = tuple(range(position, config.num_layers, period))
    self._path = ('layers',) if period == 1 else ('layers', str(position))
    self._hf = 'model.layers.{layer}'

  def projection(
    self,
    module: tuple[str, ...],
    hf_module: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    in_dims: int = 1,
    experts: int = 0,
    quantisable: bool = True,
    fuse_group: str | None = None,
  ) -> Param:
    return Param(
      path=(*self._path, *module, 'kernel'),
      hf_name=f'{self._hf}.{hf_module}.weight',
      shape=shape,
      axes=axes,
      in_dims=in_dims,
      layers=self.layers,
      experts=experts,
      quantisable=quantisable,
      fuse_group=fuse_group,
    )

  def plain(
    self,
    path: tuple[str, ...],
    hf_name: str,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...] = (None,),
  ) -> Param:
    row = _plain((*self._path, *path), f'{self._hf}.{hf_name}', shape, axes)
    return dataclasses.replace(row, layers=self.layers)


def _plain(
  path: tuple[str, ...], hf_name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> Param:
  return Param(
    path=path,
    hf_name=hf_name,
    shape=shape,
    axes=axes,
    in_dims=0,
    layers=None,
    experts=0,
    quantisable=False,
    fuse_group=None,
  )


def _attention(config: ModelConfig, rows: _Rows) -> Iterator[Param]:
  d, h, k, n = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
  # Where attention has an output gate, a head's is made beside its query: the second half.
  wide = 2 * n if config.gated else n
  for name, heads, dim, axis in (
    ('q_proj', h, wide, 'heads'),
    ('k_proj', k, n, 'kv_heads'),
    ('v_proj', k, n, 'kv_heads'),
  ):
    yield rows.projection(
      ('attention', name),
      f'self_attn.{name}',
      (d, heads, dim),
      ('embed', axis, None),
      fuse_group='qkv',
    )
  yield rows.projection(
    ('attention', 'o_proj'), 'self_attn.o_proj', (h, n, d), ('heads', None, 'embed'), in_dims=2
  )
  if config.qk_norm:
    for name in ('q_norm', 'k_norm'):
      yield rows.plain(('attention', name, 'scale'), f'self_attn.{name}.weight', (n,))


def _delta(config: ModelConfig, rows: _Rows) -> Iterator[Param]:
  c = config.delta
  assert c is not None
  d, h, n = config.hidden_size, c.num_value_heads, c.value_head_dim
  channels = 2 * c.key_size + c.value_size

  def make(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **how: Any) -> Param:
    return rows.projection(('delta', name), f'linear_attn.{name}', shape, axes, **how)

  if config.fused_delta:
    # Of each key head: query, key, and the values and gates of its value heads.
    group = h // c.num_key_heads
    wide = 2 * c.key_head_dim + 2 * group * n
    yield make('in_proj_qkvz', (d, c.num_key_heads, wide), ('embed', 'delta_heads', None))
    yield make(
      'in_proj_ba',
      (d, c.num_key_heads, 2 * group),
      ('embed', 'delta_heads', None),
      quantisable=False,
    )
  else:
    yield make('in_proj_qkv', (d, channels), ('embed', 'delta_qkv'), fuse_group='in_proj')
    yield make('in_proj_z', (d, h, n), ('embed', 'delta_heads', None), fuse_group='in_proj')
    for name in ('in_proj_b', 'in_proj_a'):
      yield make(name, (d, h), ('embed', 'delta_heads'), quantisable=False)
  yield rows.plain(
    ('delta', 'conv', 'kernel'),
    'linear_attn.conv1d.weight',
    (channels, 1, c.conv_size),
    ('delta_qkv', None, None),
  )
  for name in ('dt_bias', 'A_log'):
    yield rows.plain(('delta', name), f'linear_attn.{name}', (h,), ('delta_heads',))
  yield rows.plain(('delta', 'norm', 'scale'), 'linear_attn.norm.weight', (n,))
  yield make('out_proj', (h, n, d), ('delta_heads', None, 'embed'), in_dims=2)


def _swiglu(
  module: tuple[str, ...], hf_module: str, sizes: tuple[int, int], rows: _Rows, experts: int = 0
) -> Iterator[Param]:
  d, f = sizes
  axis = 'expert_mlp' if experts else 'mlp'
  for name in ('gate_proj', 'up_proj'):
    yield rows.projection(
      (*module, name),
      f'{hf_module}.{name}',
      (d, f),
      ('embed', axis),
      experts=experts,
      fuse_group='gate_up',
    )
  yield rows.projection(
    (*module, 'down_proj'), f'{hf_module}.down_proj', (f, d), (axis, 'embed'), experts=experts
  )


def _moe(config: ModelConfig, rows: _Rows) -> Iterator[Param]:
  c = config.moe
  assert c is not None
  d = config.hidden_size
  yield rows.projection(
    ('moe', 'router'), 'mlp.gate', (d, c.num_experts), ('embed', None), quantisable=False
  )
  yield from _swiglu(
    ('moe', 'experts'), 'mlp.experts.{expert}', (d, c.intermediate_size), rows, c.num_experts
  )
  if c.shared_intermediate_size:
    yield from _swiglu(
      ('moe', 'shared_expert'), 'mlp.shared_expert', (d, c.shared_intermediate_size), rows
    )
    yield rows.projection(
      ('moe', 'shared_expert_gate'),
      'mlp.shared_expert_gate',
      (d, 1),
      ('embed', None),
      quantisable=False,
    )


def _block(config: ModelConfig, position: int) -> Iterator[Param]:
  rows, d = _Rows(config, position), config.hidden_size
  yield rows.plain(('mixer_norm', 'scale'), 'input_layernorm.weight', (d,))
  yield from (_delta if config.pattern[position] == DELTA else _attention)(config, rows)
  yield rows.plain(('mlp_norm', 'scale'), 'post_attention_layernorm.weight', (d,))
  if config.moe is None:
    yield from _swiglu(('mlp',), 'mlp', (d, config.intermediate_size), rows)
  else:
    yield from _moe(config, rows)


def table(config: ModelConfig) -> tuple[Param, ...]:
  """Returns every parameter of the decoder, each once.

  Where the kinds of token mixers alternate, `params['layers']` has one dict for each position of
  their pattern, '0' and on, which stacks the layers at that position.
  """
  v, d = config.vocab_size, config.hidden_size
  rows = (
    _plain(('embed', 'embedding'), EMBEDDING, (v, d), ('vocab', None)),
    *(row for position in range(len(config.pattern)) for row in _block(config, position)),
    _plain(('final_norm', 'scale'), 'model.norm.weight', (d,), (None,)),
  )
  if config.tie_embeddings:
    return rows
  head = dataclasses.replace(_plain(('head', 'kernel'), HEAD, (d, v), (None, 'vocab')), in_dims=1)
  return (*rows, head)


def fuse_key(row: Param, index: Index) -> tuple[Any, ...] | None:
  """Returns what two tensors that a server fuses have in common; None for one that stands alone."""
  return None if row.fuse_group is None else (row.path[:-2], index, row.fuse_group)


def leaf(params: Mapping[str, Any], path: tuple[str, ...]) -> Any:
  """Returns the leaf of a nested dict at `path`."""
  for key in path:
    params = params[key]
  return params


def nest(leaves: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
  """Returns the nested dict that holds each leaf at its path."""
  nested: dict[str, Any] = {}
  for path, value in leaves.items():
    node = nested
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = value
  return nested


def hf_params(config: ModelConfig) -> Iterator[tuple[str, Param, Index]]:
  """Yields (Hugging Face name, row, index into the leaf) of every tensor.

  In table order, layer by layer, and expert by expert within a layer.
  """
  rows = table(config)
  stacked = [i for i, row in enumerate(rows) if row.layers is not None]
  for row in rows[: stacked[0]]:
    yield row.hf_name, row, ()
  blocks = [
    [row for row in rows if row.layers is not None and position in row.layers]
    for position in range(len(config.pattern))
  ]
  for layer in range(config.num_layers):
    stack, position = divmod(layer, len(blocks))
    for experts, group in itertools.groupby(blocks[position], key=lambda row: row.experts):
      members = tuple(group)
      for index in np.ndindex(*(experts,) * bool(experts)):
        for row in members:
          yield row.hf_name_at((stack, *index)), row, (stack, *index)
  for row in rows[stacked[-1] + 1 :]:
    yield row.hf_name, row, ()


def named_tensors(
  config: ModelConfig, params: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (Hugging Face name, tensor in its layout) one at a time; the dtype is kept.

  Only the tensor yielded is copied to the host; of experts, one layer's.
  """
  held: dict[tuple[str, ...], tuple[int, np.ndarray]] = {}
  for name, row, index in hf_params(config):
    x = leaf(params, row.path)
    if row.experts:
      if row.path not in held or held[row.path][0] != index[0]:
        held[row.path] = index[0], _at(x, index[:1])
      x = held[row.path][1][index[1]]
    else:
      x = _at(x, index)
    yield name, np.ascontiguousarray(row.to_hf(x))


def _at(x: Any, index: Index) -> np.ndarray:
  """Returns a part of a leaf on the host. Where it is on a device, only the index goes there."""
  with jax.transfer_guard_host_to_device('allow'):
    return np.asarray(jax.device_get(x[index] if index else x))


def from_named_tensors(
  config: ModelConfig,
  read: Callable[[str], np.ndarray],
  dtype: Any = np.float32,
  *,
  place: Callable[[Param, np.ndarray], Any] | None = None,
) -> dict[str, Any]:
  """Builds the parameters from Hugging Face tensors, read one at a time.

  Args:
    config: the model.
    read: a Hugging Face name -> the tensor. KeyError where there is none.
    dtype: of the parameters.
    place: puts one finished leaf where it shall live, as with the sharding that its row implies;
      None leaves it to jax.

  Raises:
    ValueError: naming the tensor that is missing or has the wrong shape.
  """
  leaves: dict[tuple[str, ...], Any] = {}
  for row in table(config):
    if row.lead_shape:
      x = np.empty(row.leaf_shape, dtype)
      for name, index in row.hf_names():
        x[index] = row.from_hf(_read(read, row, name))
    else:
      x = np.ascontiguousarray(row.from_hf(_read(read, row, row.hf_name))).astype(dtype)
    leaves[row.path] = jax.device_put(x) if place is None else place(row, x)
  return nest(leaves)


def _read(read: Callable[[str], np.ndarray], row: Param, name: str) -> np.ndarray:
  try:
    x = read(name)
  except KeyError:
    raise ValueError(f'tensor {name} is missing; expected shape {list(row.hf_shape)}') from None
  if x.shape != row.hf_shape:
    raise ValueError(
      f'tensor {name} has shape {list(x.shape)}; expected {list(row.hf_shape)} for this config'
    )
  return x
