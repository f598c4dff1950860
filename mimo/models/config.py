"""What a decoder is: a frozen, hashable record, read from and written to config.json.

Only the fields that change what is computed are named. Everything else that config.json holds is
kept, so that a checkpoint written back says what the one read said.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

# family -> (architecture, whether queries and keys are normalised per head)
_FAMILIES = {'qwen3': ('Qwen3ForCausalLM', True), 'llama': ('LlamaForCausalLM', False)}

_ROPE_SCALING = {
  'default': (),
  'linear': ('factor',),
  'llama3': (
    'factor',
    'high_freq_factor',
    'low_freq_factor',
    'original_max_position_embeddings',
  ),
}

# What transformers takes where config.json is silent, for both families. Sizes that it takes from
# one published model, like Qwen3's 32 key heads of 128, must be stated instead.
_ABSENT_THETA = 10_000.0
_ABSENT_EPS = 1e-6

_SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'intermediate_size': 'intermediate_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'max_positions': 'max_position_embeddings',
}

_ROPE_KEYS = frozenset(
  {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}.union(*_ROPE_SCALING.values())
)

_QWEN3_STATED = ('num_key_value_heads', 'head_dim')

_CONSUMED = frozenset(
  {
    *_SIZES.values(),
    'model_type',
    'num_key_value_heads',
    'head_dim',
    'rms_norm_eps',
    'rope_parameters',
    'rope_scaling',
    'rope_theta',
    'tie_word_embeddings',
    'quantization_config',  # describes the file it came in, not the model
  }
)

# Switches that would change the computation: refused where they hold another value.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
  'hidden_act': ('silu',),
  'attention_bias': (False, None),
  'mlp_bias': (False, None),
  'use_sliding_window': (False, None),
  'pretraining_tp': (1, None),
  'rope_interleaved': (False, None),
  'partial_rotary_factor': (1.0, None),
}


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Rotary position embedding.

  Attributes:
    theta: the base of the wavelengths.
    rope_type: 'default', 'linear' or 'llama3'.
    scaling: (name, value) pairs, sorted by name: what `rope_type` needs beside theta, under the
      names of config.json's `rope_parameters`.
  """

  theta: float
  rope_type: str = 'default'
  scaling: tuple[tuple[str, float], ...] = ()

  def __post_init__(self) -> None:
    if self.rope_type not in _ROPE_SCALING:
      raise ValueError(f'rope_type is {self.rope_type!r}; expected one of {sorted(_ROPE_SCALING)}')
    got, expected = tuple(name for name, _ in self.scaling), _ROPE_SCALING[self.rope_type]
    if got != expected:
      raise ValueError(f'rope_type {self.rope_type!r} got parameters {got}; expected {expected}')
    if not self.theta > 0:
      raise ValueError(f'rope theta is {self.theta}; expected a positive number')


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder. Hashable, so that it can be a static argument of a jitted function.

  Attributes:
    family: 'qwen3' or 'llama'.
    qk_norm: whether queries and keys are normalised per head.
    tie_embeddings: whether the head is the embedding, transposed.
    max_positions: the longest sequence the checkpoint states; nothing here enforces it.
    extra: (key, JSON text) pairs, sorted by key: what else config.json held.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rms_norm_eps: float
  rope: RopeConfig
  qk_norm: bool
  tie_embeddings: bool
  max_positions: int
  extra: tuple[tuple[str, str], ...] = ()

  def __post_init__(self) -> None:
    if self.family not in _FAMILIES:
      raise ValueError(f'model family is {self.family!r}; expected one of {sorted(_FAMILIES)}')
    for name in (*_SIZES, 'num_kv_heads', 'head_dim'):
      value = getattr(self, name)
      if not isinstance(value, int) or value < 1:
        raise ValueError(f'{name} is {value!r}; expected a positive integer')
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads is {self.num_heads}; expected a multiple of num_kv_heads, {self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim is {self.head_dim}; expected an even number, for RoPE')
    if self.qk_norm != _FAMILIES[self.family][1]:
      raise ValueError(
        f'qk_norm is {self.qk_norm}; expected {not self.qk_norm} for family {self.family!r}'
      )

  @staticmethod
  def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json, of transformers 5 (`rope_parameters`) or older.

    Keys that may be missing take the value that transformers takes. A quantisation config is left
    out: it says how a file stores the weights.

    Raises ValueError naming the family or key, what was got and what was expected.
    """
    family = _value(config, 'model_type', None)
    if family not in _FAMILIES:
      raise ValueError(f'model_type is {family!r}; expected one of {sorted(_FAMILIES)}')
    stated = [*_SIZES.values(), *(_QWEN3_STATED if family == 'qwen3' else ())]
    missing = [key for key in stated if _value(config, key, None) is None]
    if missing:
      raise ValueError(f'config of family {family!r} lacks {", ".join(missing)}')
    for key in stated:
      if not isinstance(config[key], int) or config[key] < 1:
        raise ValueError(f'{key} is {config[key]!r}; expected a positive integer')
    for key, allowed in _REQUIRED_VALUES.items():
      if key in config and config[key] not in allowed:
        raise ValueError(f'{key} is {config[key]!r}; expected {allowed[0]!r}')
    layer_types = _value(config, 'layer_types', None)
    if layer_types is not None and set(layer_types) != {'full_attention'}:
      raise ValueError(f'layer_types are {sorted(set(layer_types))}; expected full_attention only')
    heads = config['num_attention_heads']
    extra = {key: json.dumps(value) for key, value in config.items() if key not in _CONSUMED}
    return ModelConfig(
      family=family,
      num_kv_heads=_value(config, 'num_key_value_heads', heads),
      head_dim=_value(config, 'head_dim', config['hidden_size'] // heads),
      rms_norm_eps=float(_value(config, 'rms_norm_eps', _ABSENT_EPS)),
      rope=_rope_from_hf(config),
      qk_norm=_FAMILIES[family][1],
      tie_embeddings=bool(_value(config, 'tie_word_embeddings', False)),
      extra=tuple(sorted(extra.items())),
      **{ours: config[theirs] for ours, theirs in _SIZES.items()},
    )

  def to_hf(self) -> dict[str, Any]:
    """Returns config.json's content, with `rope_parameters` as transformers 5 writes it."""
    config: dict[str, Any] = {
      'architectures': [_FAMILIES[self.family][0]],
      'model_type': self.family,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
    config |= {key: json.loads(value) for key, value in self.extra}
    config |= {theirs: getattr(self, ours) for ours, theirs in _SIZES.items()}
    config |= {
      'num_key_value_heads': self.num_kv_heads,
      'head_dim': self.head_dim,
      'rms_norm_eps': self.rms_norm_eps,
      'rope_parameters': {
        'rope_theta': self.rope.theta,
        'rope_type': self.rope.rope_type,
        **dict(self.rope.scaling),
      },
      'tie_word_embeddings': self.tie_embeddings,
    }
    return dict(sorted(config.items()))


def _value(config: Mapping[str, Any], key: str, absent: Any) -> Any:
  """config[key], or `absent` where config.json leaves it out or holds null."""
  return config[key] if key in config and config[key] is not None else absent


def _rope_from_hf(config: Mapping[str, Any]) -> RopeConfig:
  # In the older form the scaling stands apart from theta, and its type was once called 'type'.
  given = _value(config, 'rope_scaling', {}) or _value(config, 'rope_parameters', {})
  if not isinstance(given, Mapping):
    raise ValueError(f'rope parameters are {given!r}; expected an object')
  theta = _value(given, 'rope_theta', _value(config, 'rope_theta', _ABSENT_THETA))
  rope_type = _value(given, 'rope_type', _value(given, 'type', 'default'))
  if rope_type not in _ROPE_SCALING:
    raise ValueError(f'rope_type is {rope_type!r}; expected one of {sorted(_ROPE_SCALING)}')
  unknown = sorted(set(given) - _ROPE_KEYS)
  if unknown:
    raise ValueError(f'rope_parameters hold {", ".join(unknown)}; expected {sorted(_ROPE_KEYS)}')
  given = {'original_max_position_embeddings': config['max_position_embeddings'], **given}
  missing = [name for name in _ROPE_SCALING[rope_type] if name not in given]
  if missing:
    raise ValueError(f'rope_type {rope_type!r} lacks {", ".join(missing)}')
  if _value(given, 'partial_rotary_factor', 1.0) != 1.0:
    raise ValueError(
      f'partial_rotary_factor is {given["partial_rotary_factor"]}; expected 1.0: every dimension '
      'of a head is rotated'
    )
  return RopeConfig(
    float(theta), rope_type, tuple((name, given[name]) for name in _ROPE_SCALING[rope_type])
  )
