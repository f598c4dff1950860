"""What a decoder is: a frozen, hashable record, read from and written to config.json.

Only the fields that change what is computed are named. Everything else that config.json holds is
kept, so that a checkpoint written back says what the one read said.

| `model_type` | token mixers | feed-forward |
|---|---|---|
| llama, qwen3 | attention | dense |
| qwen3_moe | attention | experts |
| qwen3_next, qwen3_5_moe_text | gated delta nets, and gated attention with partial rotary \
embedding | experts and a shared one |
| qwen3_5_moe | the same, beside a vision tower; the decoder's config.json is its `text_config` | |
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mimo.models.parts import ROPE_SCALING, check_sizes
from mimo.models.parts import DeltaConfig as DeltaConfig
from mimo.models.parts import MoEConfig as MoEConfig
from mimo.models.parts import RopeConfig as RopeConfig

ATTENTION = 'full_attention'
DELTA = 'linear_attention'


@dataclasses.dataclass(frozen=True)
class _Family:
  """What sets a family apart, beyond what config.json says.

  Attributes:
    architecture: transformers' class.
    qk_norm: whether queries and keys are normalised per head.
    moe: whether feed-forwards are experts.
    hybrid: whether some token mixers are gated delta nets. Then attention has an output gate and
      rotates a part of each head, norms scale by 1 + weight, and there is a shared expert.
    norm_topk_prob: what it is where config.json is silent; None where it can't be False.
    text_family: where the decoder is one part of a model, the family of its `text_config`.
  """

  architecture: str
  qk_norm: bool = True
  moe: bool = False
  hybrid: bool = False
  norm_topk_prob: bool | None = None
  text_family: str | None = None


_FAMILIES = {
  'llama': _Family('LlamaForCausalLM', qk_norm=False),
  'qwen3': _Family('Qwen3ForCausalLM'),
  'qwen3_moe': _Family('Qwen3MoeForCausalLM', moe=True, norm_topk_prob=False),
  'qwen3_next': _Family('Qwen3NextForCausalLM', moe=True, hybrid=True, norm_topk_prob=True),
  'qwen3_5_moe_text': _Family('Qwen3_5MoeForCausalLM', moe=True, hybrid=True),
  'qwen3_5_moe': _Family(
    'Qwen3_5MoeForConditionalGeneration', moe=True, hybrid=True, text_family='qwen3_5_moe_text'
  ),
}

# What transformers takes where config.json is silent. Sizes that it takes from one published model,
# like Qwen3's 32 key heads of 128, must be stated instead.
_ABSENT_THETA = 10_000.0
_ABSENT_EPS = 1e-6
_ABSENT_ROTARY = 0.25  # of hybrid families
_ABSENT_INTERVAL = 4

_SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'max_positions': 'max_position_embeddings',
}
_DENSE_SIZES = {'intermediate_size': 'intermediate_size'}
_MOE_SIZES = {
  'experts_per_token': 'num_experts_per_tok',
  'intermediate_size': 'moe_intermediate_size',
}
_SHARED_SIZES = {'shared_intermediate_size': 'shared_expert_intermediate_size'}
_DELTA_SIZES = {
  'num_key_heads': 'linear_num_key_heads',
  'num_value_heads': 'linear_num_value_heads',
  'key_head_dim': 'linear_key_head_dim',
  'value_head_dim': 'linear_value_head_dim',
  'conv_size': 'linear_conv_kernel_dim',
}
# Which of the sizes of heads must be stated.
_STATED_HEADS: dict[str, tuple[str, ...]] = {
  'llama': (),
  'qwen3_moe': ('num_key_value_heads',),
}
_ALL_HEADS = ('num_key_value_heads', 'head_dim')

# Text has one position per token, to which every section of a multimodal rotary embedding comes
# down, so these are kept and not computed with.
_MROPE_KEYS = frozenset({'mrope_section', 'mrope_interleaved'})
_ROPE_KEYS = frozenset(
  {'rope_theta', 'rope_type', 'type', 'partial_rotary_factor'}.union(*ROPE_SCALING.values())
)

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
_MOE_CONSUMED = frozenset({*_MOE_SIZES.values(), 'num_experts', 'num_local_experts'})
_HYBRID_CONSUMED = frozenset(
  {*_SHARED_SIZES.values(), *_DELTA_SIZES.values(), 'layer_types', 'partial_rotary_factor'}
)

# Switches that would change the computation: refused where they hold another value.
_REQUIRED_VALUES: dict[str, tuple[Any, ...]] = {
  'hidden_act': ('silu',),
  'attention_bias': (False, None),
  'mlp_bias': (False, None),
  'use_sliding_window': (False, None),
  'pretraining_tp': (1, None),
  'rope_interleaved': (False, None),
}
_REQUIRED_WHOLE_ROTARY: dict[str, tuple[Any, ...]] = {'partial_rotary_factor': (1.0, None)}
_REQUIRED_MOE: dict[str, tuple[Any, ...]] = {
  'mlp_only_layers': ([], None),  # every layer has experts
  'decoder_sparse_step': (1, None),
}
_REQUIRED_HYBRID: dict[str, tuple[Any, ...]] = {
  'attn_output_gate': (True, None),
  'output_gate_type': ('swish', 'silu', None),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """A decoder. Hashable, so that it can be a static argument of a jitted function.

  Attributes:
    family: `model_type` of config.json; see the table above.
    intermediate_size: of a dense feed-forward; 0 where there is none.
    qk_norm: whether queries and keys are normalised per head.
    tie_embeddings: whether the head is the embedding, transposed.
    max_positions: the longest sequence the checkpoint states; nothing here enforces it.
    pattern: the kinds of token mixer, ATTENTION or DELTA, of the first layers; the others repeat
      it. The shortest that does.
    delta: None where `pattern` has no DELTA.
    moe: None where feed-forwards are dense.
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
  pattern: tuple[str, ...] = (ATTENTION,)
  delta: DeltaConfig | None = None
  moe: MoEConfig | None = None
  extra: tuple[tuple[str, str], ...] = ()

  def __post_init__(self) -> None:
    if self.family not in _FAMILIES:
      raise ValueError(f'model family is {self.family!r}; expected one of {sorted(_FAMILIES)}')
    family = _FAMILIES[self.family]
    check_sizes(self, (*_SIZES, 'num_kv_heads', 'head_dim'))
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads is {self.num_heads}; expected a multiple of num_kv_heads, {self.num_kv_heads}'
      )
    if self.head_dim % 2:
      raise ValueError(f'head_dim is {self.head_dim}; expected an even number, for RoPE')
    if self.rotary_dim % 2 or not self.rotary_dim:
      raise ValueError(
        f'{self.rope.partial_rotary_factor} of head_dim {self.head_dim} is {self.rotary_dim}; '
        'expected a positive even number, for RoPE'
      )
    if self.qk_norm != family.qk_norm:
      raise ValueError(
        f'qk_norm is {self.qk_norm}; expected {not self.qk_norm} for family {self.family!r}'
      )
    if (self.moe is not None) != family.moe:
      raise ValueError(f'family {self.family!r} got moe: {self.moe}')
    if self.moe is None:
      check_sizes(self, tuple(_DENSE_SIZES))
    elif self.intermediate_size:
      raise ValueError(
        f'intermediate_size is {self.intermediate_size}; expected 0 where every layer has experts'
      )
    self._check_pattern(family)

  def _check_pattern(self, family: _Family) -> None:
    kinds = {ATTENTION, DELTA} if family.hybrid else {ATTENTION}
    if not self.pattern or not set(self.pattern) <= kinds:
      raise ValueError(f'pattern is {self.pattern}; expected kinds of {sorted(kinds)}')
    if self.pattern != _shortest_pattern(self.pattern) or self.num_layers % len(self.pattern):
      raise ValueError(
        f'pattern is {self.pattern}; expected the shortest that {self.num_layers} layers repeat'
      )
    if (self.delta is not None) != (DELTA in self.pattern):
      raise ValueError(f'pattern {self.pattern} got delta: {self.delta}')
    if self.moe is not None and bool(self.moe.shared_intermediate_size) != family.hybrid:
      raise ValueError(
        f'family {self.family!r} got shared_intermediate_size {self.moe.shared_intermediate_size}'
      )

  @property
  def layer_types(self) -> tuple[str, ...]:
    """The kind of each layer's token mixer."""
    return self.pattern * (self.num_layers // len(self.pattern))

  @property
  def rotary_dim(self) -> int:
    """How many dimensions of a head are rotated."""
    return int(self.head_dim * self.rope.partial_rotary_factor)

  @property
  def gated(self) -> bool:
    """Whether attention has an output gate, and norms scale by 1 + weight."""
    return _FAMILIES[self.family].hybrid

  @property
  def fused_delta(self) -> bool:
    """Whether a delta net's in-projections are stored as two tensors, by key head."""
    return self.family == 'qwen3_next'

  @staticmethod
  def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json, of transformers 5 (`rope_parameters`) or older.

    Keys that may be missing take the value that transformers takes. A quantisation config is left
    out: it says how a file stores the weights.

    Raises ValueError naming the family or key, what was got and what was expected.
    """
    name = _value(config, 'model_type', None)
    if name not in _FAMILIES:
      raise ValueError(f'model_type is {name!r}; expected one of {sorted(_FAMILIES)}')
    family = _FAMILIES[name]
    text = config if family.text_family is None else _text_config(config, family)
    sizes = _SIZES if family.moe else _SIZES | _DENSE_SIZES
    _check_stated(text, name, [*sizes.values(), *_stated(name, family)])
    _check_switches(text, family)
    heads = text['num_attention_heads']
    pattern = _pattern_from_hf(text, family)
    return ModelConfig(
      family=name,
      num_kv_heads=_value(text, 'num_key_value_heads', heads),
      head_dim=_value(text, 'head_dim', text['hidden_size'] // heads),
      rms_norm_eps=float(_value(text, 'rms_norm_eps', _ABSENT_EPS)),
      rope=_rope_from_hf(text, family),
      qk_norm=family.qk_norm,
      tie_embeddings=bool(_value(config, 'tie_word_embeddings', False)),
      pattern=pattern,
      delta=DeltaConfig(**_read(text, _DELTA_SIZES)) if DELTA in pattern else None,
      moe=_moe_from_hf(text, family) if family.moe else None,
      extra=_extra(config, family),
      **({'intermediate_size': 0} | _read(text, sizes)),
    )

  def to_hf(self) -> dict[str, Any]:
    """Returns config.json's content, with `rope_parameters` as transformers 5 writes it."""
    family = _FAMILIES[self.family]
    extra = {key: json.loads(value) for key, value in self.extra}
    config: dict[str, Any] = {'architectures': [family.architecture]}
    if family.text_family is None:
      config |= {'model_type': self.family} | self._text_to_hf(extra)
    else:
      text = {'model_type': family.text_family} | self._text_to_hf(extra.pop('text_config', {}))
      config |= {'model_type': self.family} | extra | {'text_config': dict(sorted(text.items()))}
    config['tie_word_embeddings'] = self.tie_embeddings
    return dict(sorted(config.items()))

  def _text_to_hf(self, extra: dict[str, Any]) -> dict[str, Any]:
    config = {'hidden_act': 'silu', 'attention_bias': False} | extra
    config |= {theirs: getattr(self, ours) for ours, theirs in _SIZES.items()}
    config |= {
      'num_key_value_heads': self.num_kv_heads,
      'head_dim': self.head_dim,
      'rms_norm_eps': self.rms_norm_eps,
      'tie_word_embeddings': self.tie_embeddings,
    }
    rope = {'rope_theta': self.rope.theta, 'rope_type': self.rope.rope_type}
    if self.gated:
      rope['partial_rotary_factor'] = self.rope.partial_rotary_factor
      config['layer_types'] = list(self.layer_types)
    config['rope_parameters'] = {
      **extra.get('rope_parameters', {}),
      **rope,
      **dict(self.rope.scaling),
    }
    if self.moe is None:
      config['intermediate_size'] = self.intermediate_size
    else:
      config |= {theirs: getattr(self.moe, ours) for ours, theirs in _MOE_SIZES.items()}
      config |= {'num_experts': self.moe.num_experts}
      if self.moe.shared_intermediate_size:
        config |= {theirs: getattr(self.moe, ours) for ours, theirs in _SHARED_SIZES.items()}
      if _FAMILIES[self.family].norm_topk_prob is not None:
        config['norm_topk_prob'] = self.moe.norm_topk_prob
    if self.delta is not None:
      config |= {theirs: getattr(self.delta, ours) for ours, theirs in _DELTA_SIZES.items()}
    return config


def _text_config(config: Mapping[str, Any], family: _Family) -> Mapping[str, Any]:
  text = _value(config, 'text_config', None)
  if not isinstance(text, Mapping):
    raise ValueError(f'text_config is {text!r}; expected an object')
  if _value(text, 'model_type', family.text_family) != family.text_family:
    raise ValueError(
      f'model_type of text_config is {text["model_type"]!r}; expected {family.text_family!r}'
    )
  return text


def _check_stated(config: Mapping[str, Any], name: str, stated: list[str]) -> None:
  missing = [key for key in stated if _value(config, key, None) is None]
  if missing:
    raise ValueError(f'config of family {name!r} lacks {", ".join(missing)}')
  for key in stated:
    if not isinstance(config[key], int) or config[key] < 1:
      raise ValueError(f'{key} is {config[key]!r}; expected a positive integer')


def _stated(name: str, family: _Family) -> list[str]:
  """Keys whose absence transformers fills with the sizes of one published model."""
  keys = list(_STATED_HEADS.get(name, _ALL_HEADS))
  if family.moe:
    keys += _MOE_SIZES.values()
  if family.hybrid:
    keys += _SHARED_SIZES.values()
  return keys


def _check_switches(config: Mapping[str, Any], family: _Family) -> None:
  required = dict(_REQUIRED_VALUES)
  required |= _REQUIRED_HYBRID if family.hybrid else _REQUIRED_WHOLE_ROTARY
  if family.moe:
    required |= _REQUIRED_MOE
    if family.norm_topk_prob is None:
      required |= {'norm_topk_prob': (True, None)}
  for key, allowed in required.items():
    if key in config and config[key] not in allowed:
      raise ValueError(f'{key} is {config[key]!r}; expected {allowed[0]!r}')


def _pattern_from_hf(config: Mapping[str, Any], family: _Family) -> tuple[str, ...]:
  stated = _value(config, 'layer_types', None)
  count = config['num_hidden_layers']
  if not family.hybrid:
    if stated is not None and set(stated) != {ATTENTION}:
      raise ValueError(f'layer_types are {sorted(set(stated))}; expected full_attention only')
    return (ATTENTION,)
  if stated is None:
    interval = _value(config, 'full_attention_interval', _ABSENT_INTERVAL)
    stated = [DELTA if (layer + 1) % interval else ATTENTION for layer in range(count)]
  if len(stated) != count or not set(stated) <= {ATTENTION, DELTA}:
    raise ValueError(
      f'layer_types are {len(stated)} of {sorted(set(stated))}; expected {count} of '
      f'{sorted((ATTENTION, DELTA))}'
    )
  return _shortest_pattern(tuple(stated))


def _shortest_pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
  """The shortest first part that, repeated, gives `kinds`."""
  for size in range(1, len(kinds)):
    if len(kinds) % size == 0 and kinds == kinds[:size] * (len(kinds) // size):
      return kinds[:size]
  return kinds


def _moe_from_hf(config: Mapping[str, Any], family: _Family) -> MoEConfig:
  experts = _value(config, 'num_experts', _value(config, 'num_local_experts', None))
  if not isinstance(experts, int) or experts < 1:
    raise ValueError(f'num_experts is {experts!r}; expected a positive integer')
  absent = True if family.norm_topk_prob is None else family.norm_topk_prob
  return MoEConfig(
    num_experts=experts,
    norm_topk_prob=bool(_value(config, 'norm_topk_prob', absent)),
    **({'shared_intermediate_size': 0} | (_read(config, _SHARED_SIZES) if family.hybrid else {})),
    **_read(config, _MOE_SIZES),
  )


def _read(config: Mapping[str, Any], sizes: Mapping[str, str]) -> dict[str, Any]:
  _check_stated(config, _value(config, 'model_type', 'decoder'), list(sizes.values()))
  return {ours: config[theirs] for ours, theirs in sizes.items()}


def _extra(config: Mapping[str, Any], family: _Family) -> tuple[tuple[str, str], ...]:
  """What is kept of config.json, as (key, JSON text) pairs."""
  if family.text_family is None:
    kept = _kept(config, family)
  else:
    outer = ('model_type', 'text_config', 'tie_word_embeddings', 'quantization_config')
    kept = {key: value for key, value in config.items() if key not in outer}
    kept['text_config'] = _kept(config['text_config'], family)
  return tuple(sorted((key, json.dumps(value)) for key, value in kept.items()))


def _kept(config: Mapping[str, Any], family: _Family) -> dict[str, Any]:
  consumed = _CONSUMED
  consumed |= _MOE_CONSUMED if family.moe else _DENSE_SIZES.keys()
  if family.hybrid:
    consumed |= _HYBRID_CONSUMED
  if family.norm_topk_prob is not None:
    consumed |= {'norm_topk_prob'}
  kept = {key: value for key, value in config.items() if key not in consumed}
  rope = {key: value for key, value in _rope_given(config).items() if key in _MROPE_KEYS}
  return kept | ({'rope_parameters': rope} if rope else {})


def _value(config: Mapping[str, Any], key: str, absent: Any) -> Any:
  """config[key], or `absent` where config.json leaves it out or holds null."""
  return config[key] if key in config and config[key] is not None else absent


def _rope_given(config: Mapping[str, Any]) -> Mapping[str, Any]:
  # In the older form the scaling stands apart from theta, and its type was once called 'type'.
  given = _value(config, 'rope_scaling', {}) or _value(config, 'rope_parameters', {})
  if not isinstance(given, Mapping):
    raise ValueError(f'rope parameters are {given!r}; expected an object')
  return given


def _rope_from_hf(config: Mapping[str, Any], family: _Family) -> RopeConfig:
  given = _rope_given(config)
  theta = _value(given, 'rope_theta', _value(config, 'rope_theta', _ABSENT_THETA))
  rope_type = _value(given, 'rope_type', _value(given, 'type', 'default'))
  if rope_type not in ROPE_SCALING:
    raise ValueError(f'rope_type is {rope_type!r}; expected one of {sorted(ROPE_SCALING)}')
  known = _ROPE_KEYS | _MROPE_KEYS if family.hybrid else _ROPE_KEYS
  unknown = sorted(set(given) - known)
  if unknown:
    raise ValueError(f'rope_parameters hold {", ".join(unknown)}; expected {sorted(known)}')
  given = {'original_max_position_embeddings': config['max_position_embeddings'], **given}
  missing = [name for name in ROPE_SCALING[rope_type] if name not in given]
  if missing:
    raise ValueError(f'rope_type {rope_type!r} lacks {", ".join(missing)}')
  absent = _value(config, 'partial_rotary_factor', _ABSENT_ROTARY) if family.hybrid else 1.0
  factor = _value(given, 'partial_rotary_factor', absent)
  if factor != 1.0 and not family.hybrid:
    raise ValueError(
      f'partial_rotary_factor is {factor}; expected 1.0: every dimension of a head is rotated'
    )
  return RopeConfig(
    float(theta),
    rope_type,
    tuple((name, given[name]) for name in ROPE_SCALING[rope_type]),
    float(factor),
  )
