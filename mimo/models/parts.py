"""The parts of a decoder that a config describes: frozen, hashable records."""

from __future__ import annotations

import dataclasses
from typing import Any

# rope_type -> what it needs beside theta, under the names of config.json's `rope_parameters`
ROPE_SCALING = {
  'default': (),
  'linear': ('factor',),
  'llama3': (
    'factor',
    'high_freq_factor',
    'low_freq_factor',
    'original_max_position_embeddings',
  ),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Rotary position embedding.

  Attributes:
    theta: the base of the wavelengths.
    rope_type: 'default', 'linear' or 'llama3'.
    scaling: (name, value) pairs, sorted by name: what `rope_type` needs beside theta, under the
      names of config.json's `rope_parameters`.
    partial_rotary_factor: the share of each head, from its first dimension, that is rotated.
  """

  theta: float
  rope_type: str = 'default'
  scaling: tuple[tuple[str, float], ...] = ()
  partial_rotary_factor: float = 1.0

  def __post_init__(self) -> None:
    if self.rope_type not in ROPE_SCALING:
      raise ValueError(f'rope_type is {self.rope_type!r}; expected one of {sorted(ROPE_SCALING)}')
    got, expected = tuple(name for name, _ in self.scaling), ROPE_SCALING[self.rope_type]
    if got != expected:
      raise ValueError(f'rope_type {self.rope_type!r} got parameters {got}; expected {expected}')
    if not self.theta > 0:
      raise ValueError(f'rope theta is {self.theta}; expected a positive number')
    if not 0 < self.partial_rotary_factor <= 1:
      raise ValueError(
        f'partial_rotary_factor is {self.partial_rotary_factor}; expected a number in (0, 1]'
      )


@dataclasses.dataclass(frozen=True)
class MoEConfig:
  """A feed-forward of experts.

  Attributes:
    num_experts: E.
    experts_per_token: k, how many of them a token is sent to.
    intermediate_size: of one expert.
    shared_intermediate_size: of the expert that every token is sent to; 0 where there is none.
    norm_topk_prob: whether the k weights are divided by their sum.
  """

  num_experts: int
  experts_per_token: int
  intermediate_size: int
  shared_intermediate_size: int
  norm_topk_prob: bool

  def __post_init__(self) -> None:
    check_sizes(self, ('num_experts', 'experts_per_token', 'intermediate_size'))
    if self.experts_per_token > self.num_experts:
      raise ValueError(
        f'experts_per_token is {self.experts_per_token}; expected at most num_experts, '
        f'{self.num_experts}'
      )


@dataclasses.dataclass(frozen=True)
class DeltaConfig:
  """A gated delta net.

  Attributes:
    num_key_heads: of queries and keys.
    num_value_heads: a multiple of it; consecutive value heads share a key head.
    key_head_dim: of one query or key.
    value_head_dim: of one value.
    conv_size: how many tokens the convolution sees, the newest included.
  """

  num_key_heads: int
  num_value_heads: int
  key_head_dim: int
  value_head_dim: int
  conv_size: int

  def __post_init__(self) -> None:
    check_sizes(self, tuple(field.name for field in dataclasses.fields(self)))
    if self.num_value_heads % self.num_key_heads:
      raise ValueError(
        f'num_value_heads is {self.num_value_heads}; expected a multiple of num_key_heads, '
        f'{self.num_key_heads}'
      )

  @property
  def key_size(self) -> int:
    """Of all queries, or all keys, of a token."""
    return self.num_key_heads * self.key_head_dim

  @property
  def value_size(self) -> int:
    """Of all values of a token."""
    return self.num_value_heads * self.value_head_dim


def check_sizes(record: Any, names: tuple[str, ...]) -> None:
  """Raises ValueError for the first of these attributes that is no positive integer."""
  for name in names:
    value = getattr(record, name)
    if not isinstance(value, int) or value < 1:
      raise ValueError(f'{name} is {value!r}; expected a positive integer')
