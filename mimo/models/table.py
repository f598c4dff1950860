"""The parameter table: one row per parameter of a decoder.

Sharding, import, export and the quantisers all read it, so a parameter's Hugging Face name, its
layout there and its logical axes are stated once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from mimo.models.config import ModelConfig

HEAD = 'lm_head.weight'
EMBEDDING = 'model.embed_tokens.weight'


@dataclasses.dataclass(frozen=True)
class Param:
  """One parameter.

  Attributes:
    path: its keys in the parameter dict.
    hf_name: its Hugging Face name, with '{layer}' where there is one tensor per layer.
    shape: of one layer's tensor, in our layout.
    axes: a logical axis, or None, for each dimension of `shape`: 'vocab', 'embed', 'heads',
      'kv_heads' or 'mlp'. At most one dimension of the embedding and of the head has a name: an
      embedding that is sharded on both dimensions is gathered whole at every lookup.
    in_dims: how many leading dimensions of `shape` are a projection's input; 0 where our layout
      is Hugging Face's.
    stacked: whether the leaf has a leading dimension of layers.
    quantisable: whether low-precision formats store it quantised.
    fuse_group: tensors of one layer with the same group are fused by servers, and share one
      nvfp4 global scale; None for a tensor that stands alone.
  """

  path: tuple[str, ...]
  hf_name: str
  shape: tuple[int, ...]
  axes: tuple[str | None, ...]
  in_dims: int
  stacked: bool
  quantisable: bool
  fuse_group: str | None

  @property
  def hf_shape(self) -> tuple[int, ...]:
    """The Hugging Face tensor's shape: [out, in] for a projection."""
    if not self.in_dims:
      return self.shape
    return math.prod(self.shape[self.in_dims :]), math.prod(self.shape[: self.in_dims])

  def to_hf(self, x: Any) -> Any:
    """One layer's tensor in our layout -> Hugging Face's. numpy or jax; the dtype is kept."""
    return x if not self.in_dims else x.reshape(self.hf_shape[::-1]).T

  def from_hf(self, x: Any) -> Any:
    """The inverse of `to_hf`."""
    return x if not self.in_dims else x.T.reshape(self.shape)


def _projection(
  module: tuple[str, ...],
  hf_module: str,
  shape: tuple[int, ...],
  axes: tuple[str | None, ...],
  *,
  in_dims: int = 1,
  fuse_group: str | None = None,
) -> Param:
  return Param(
    path=('layers', *module, 'kernel'),
    hf_name=f'model.layers.{{layer}}.{hf_module}.weight',
    shape=shape,
    axes=axes,
    in_dims=in_dims,
    stacked=True,
    quantisable=True,
    fuse_group=fuse_group,
  )


def _plain(
  path: tuple[str, ...], hf_name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> Param:
  return Param(
    path=path,
    hf_name=hf_name,
    shape=shape,
    axes=axes,
    in_dims=0,
    stacked='{layer}' in hf_name,
    quantisable=False,
    fuse_group=None,
  )


def _attention(config: ModelConfig) -> tuple[Param, ...]:
  d, h, k, n = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
  hf = 'model.layers.{layer}.self_attn'
  rows = [
    _projection(
      ('attention', name),
      f'self_attn.{name}',
      (d, heads, n),
      ('embed', axis, None),
      fuse_group='qkv',
    )
    for name, heads, axis in (
      ('q_proj', h, 'heads'),
      ('k_proj', k, 'kv_heads'),
      ('v_proj', k, 'kv_heads'),
    )
  ]
  rows.append(
    _projection(
      ('attention', 'o_proj'), 'self_attn.o_proj', (h, n, d), ('heads', None, 'embed'), in_dims=2
    )
  )
  if config.qk_norm:
    rows += [
      _plain(('layers', 'attention', name, 'scale'), f'{hf}.{name}.weight', (n,), (None,))
      for name in ('q_norm', 'k_norm')
    ]
  return tuple(rows)


def _swiglu(config: ModelConfig) -> tuple[Param, ...]:
  d, f = config.hidden_size, config.intermediate_size
  return (
    *(
      _projection(('mlp', name), f'mlp.{name}', (d, f), ('embed', 'mlp'), fuse_group='gate_up')
      for name in ('gate_proj', 'up_proj')
    ),
    _projection(('mlp', 'down_proj'), 'mlp.down_proj', (f, d), ('mlp', 'embed')),
  )


def table(config: ModelConfig) -> tuple[Param, ...]:
  """Returns every parameter of the decoder, each once."""
  v, d = config.vocab_size, config.hidden_size
  block = 'model.layers.{layer}'
  rows = (
    _plain(('embed', 'embedding'), EMBEDDING, (v, d), ('vocab', None)),
    _plain(('layers', 'mixer_norm', 'scale'), f'{block}.input_layernorm.weight', (d,), (None,)),
    *_attention(config),
    _plain(
      ('layers', 'mlp_norm', 'scale'), f'{block}.post_attention_layernorm.weight', (d,), (None,)
    ),
    *_swiglu(config),
    _plain(('final_norm', 'scale'), 'model.norm.weight', (d,), (None,)),
  )
  if config.tie_embeddings:
    return rows
  head = dataclasses.replace(_plain(('head', 'kernel'), HEAD, (d, v), (None, 'vocab')), in_dims=1)
  return (*rows, head)


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


def hf_params(config: ModelConfig) -> Iterator[tuple[str, Param, int | None]]:
  """Yields (Hugging Face name, row, layer) of every tensor, in table order and layer by layer.

  `layer` is None for a tensor that is not stacked.
  """
  rows = table(config)
  stacked = [i for i, row in enumerate(rows) if row.stacked]
  for row in rows[: stacked[0]]:
    yield row.hf_name, row, None
  for layer in range(config.num_layers):
    for i in stacked:
      yield rows[i].hf_name.format(layer=layer), rows[i], layer
  for row in rows[stacked[-1] + 1 :]:
    yield row.hf_name, row, None


def named_tensors(
  config: ModelConfig, params: Mapping[str, Any]
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields (Hugging Face name, tensor in its layout) one at a time; the dtype is kept.

  Only the tensor yielded is copied to the host.
  """
  for name, row, layer in hf_params(config):
    x = leaf(params, row.path)
    x = np.asarray(x if layer is None else x[layer])
    yield name, np.ascontiguousarray(row.to_hf(x))


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
    if row.stacked:
      x = np.empty((config.num_layers, *row.shape), dtype)
      for layer in range(config.num_layers):
        x[layer] = row.from_hf(_read(read, row, row.hf_name.format(layer=layer)))
    else:
      x = np.ascontiguousarray(row.from_hf(_read(read, row, row.hf_name))).astype(dtype)
    leaves[row.path] = jnp.asarray(x) if place is None else place(row, x)
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
