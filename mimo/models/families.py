"""What sets families apart, and how each states its parts in config.json.

What transformers takes where config.json is silent is taken here too; switches that would change
the computation are refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from mimo.models.parts import ROPE_SCALING, MoEConfig, RopeConfig

ATTENTION = 'full_attention'
DELTA = 'linear_attention'


@dataclasses.dataclass(frozen=True)
class Family:
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


FAMILIES = {
  'llama': Family('LlamaForCausalLM', qk_norm=False),
  'qwen3': Family('Qwen3ForCausalLM'),
  'qwen3_moe': Family('Qwen3MoeForCausalLM', moe=True, norm_topk_prob=False),
  'qwen3_next': Family('Qwen3NextForCausalLM', moe=True, hybrid=True, norm_topk_prob=True),
  'qwen3_5_moe_text': Family('Qwen3_5MoeForCausalLM', moe=True, hybrid=True),
  'qwen3_5_moe': Family(
    'Qwen3_5MoeForConditionalGeneration', moe=True, hybrid=True, text_family='qwen3_5_moe_text'
  ),
}

# What transformers takes where config.json is silent. Sizes that it takes from one published model,
# like Qwen3's 32 key heads of 128, must be stated instead.
_ABSENT_THETA = 10_000.0
ABSENT_EPS = 1e-6
_ABSENT_ROTARY = 0.25  # of hybrid families
_ABSENT_INTERVAL = 4

SIZES = {
  'vocab_size': 'vocab_size',
  'hidden_size': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'max_positions': 'max_position_embeddings',
}
DENSE_SIZES = {'intermediate_size': 'intermediate_size'}
MOE_SIZES = {
  'experts_per_token': 'num_experts_per_tok',
  'intermediate_size': 'moe_intermediate_size',
}
SHARED_SIZES = {'shared_intermediate_size': 'shared_expert_intermediate_size'}
DELTA_SIZES = {
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
    *SIZES.values(),
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
_MOE_CONSUMED = frozenset({*MOE_SIZES.values(), 'num_experts', 'num_local_experts'})
_HYBRID_CONSUMED = frozenset(
  {*SHARED_SIZES.values(), *DELTA_SIZES.values(), 'layer_types', 'partial_rotary_factor'}
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


def text_config(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
  """Returns the decoder's part of a larger model's config.json."""
  text = value(config, 'text_config', None)
  if not isinstance(text, Mapping):
    raise ValueError(f'text_config is {text!r}; expected an object')
  if value(text, 'model_type', family.text_family) != family.text_family:
    raise ValueError(
      f'model_type of text_config is {text["model_type"]!r}; expected {family.text_family!r}'
    )
  return text


def check_stated(config: Mapping[str, Any], name: str, stated: list[str]) -> None:
  """Raises ValueError unless these keys are there and positive integers."""
  missing = [key for key in stated if value(config, key, None) is None]
  if missing:
    raise ValueError(f'config of family {name!r} lacks {", ".join(missing)}')
  for key in stated:
    if not isinstance(config[key], int) or config[key] < 1:
      raise ValueError(f'{key} is {config[key]!r}; expected a positive integer')


def stated_keys(name: str, family: Family) -> list[str]:
  """Keys whose absence transformers fills with the sizes of one published model."""
  keys = list(_STATED_HEADS.get(name, _ALL_HEADS))
  if family.moe:
    keys += MOE_SIZES.values()
  if family.hybrid:
    keys += SHARED_SIZES.values()
  return keys


def check_switches(config: Mapping[str, Any], family: Family) -> None:
  """Raises ValueError for the first switch that would change the computation."""
  required = dict(_REQUIRED_VALUES)
  required |= _REQUIRED_HYBRID if family.hybrid else _REQUIRED_WHOLE_ROTARY
  if family.moe:
    required |= _REQUIRED_MOE
    if family.norm_topk_prob is None:
      required |= {'norm_topk_prob': (True, None)}
  for key, allowed in required.items():
    if key in config and config[key] not in allowed:
      raise ValueError(f'{key} is {config[key]!r}; expected {allowed[0]!r}')


def pattern_from_hf(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
  """Returns the shortest pattern of token mixers that the layers repeat."""
  stated = value(config, 'layer_types', None)
  count = config['num_hidden_layers']
  if not family.hybrid:
    if stated is not None and set(stated) != {ATTENTION}:
      raise ValueError(f'layer_types are {sorted(set(stated))}; expected full_attention only')
    return (ATTENTION,)
  if stated is None:
    interval = value(config, 'full_attention_interval', _ABSENT_INTERVAL)
    stated = [DELTA if (layer + 1) % interval else ATTENTION for layer in range(count)]
  if len(stated) != count or not set(stated) <= {ATTENTION, DELTA}:
    raise ValueError(
      f'layer_types are {len(stated)} of {sorted(set(stated))}; expected {count} of '
      f'{sorted((ATTENTION, DELTA))}'
    )
  return shortest_pattern(tuple(stated))


def shortest_pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
  """The shortest first part that, repeated, gives `kinds`."""
  for size in range(1, len(kinds)):
    if len(kinds) % size == 0 and kinds == kinds[:size] * (len(kinds) // size):
      return kinds[:size]
  return kinds


def moe_from_hf(config: Mapping[str, Any], family: Family) -> MoEConfig:
  """Reads what is stated of the experts."""
  experts = value(config, 'num_experts', value(config, 'num_local_experts', None))
  if not isinstance(experts, int) or experts < 1:
    raise ValueError(f'num_experts is {experts!r}; expected a positive integer')
  absent = True if family.norm_topk_prob is None else family.norm_topk_prob
  return MoEConfig(
    num_experts=experts,
    norm_topk_prob=bool(value(config, 'norm_topk_prob', absent)),
    **(
      {'shared_intermediate_size': 0} | (read_sizes(config, SHARED_SIZES) if family.hybrid else {})
    ),
    **read_sizes(config, MOE_SIZES),
  )


def read_sizes(config: Mapping[str, Any], sizes: Mapping[str, str]) -> dict[str, Any]:
  """Returns our name -> value of sizes that must be stated."""
  check_stated(config, value(config, 'model_type', 'decoder'), list(sizes.values()))
  return {ours: config[theirs] for ours, theirs in sizes.items()}


def kept_of(config: Mapping[str, Any], family: Family) -> tuple[tuple[str, str], ...]:
  """What is kept of config.json, as (key, JSON text) pairs."""
  if family.text_family is None:
    kept = _kept(config, family)
  else:
    outer = ('model_type', 'text_config', 'tie_word_embeddings', 'quantization_config')
    kept = {key: value for key, value in config.items() if key not in outer}
    kept['text_config'] = _kept(config['text_config'], family)
  return tuple(sorted((key, json.dumps(value)) for key, value in kept.items()))


def _kept(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
  consumed = _CONSUMED
  consumed |= _MOE_CONSUMED if family.moe else DENSE_SIZES.keys()
  if family.hybrid:
    consumed |= _HYBRID_CONSUMED
  if family.norm_topk_prob is not None:
    consumed |= {'norm_topk_prob'}
  kept = {key: value for key, value in config.items() if key not in consumed}
  rope = {key: value for key, value in _rope_given(config).items() if key in _MROPE_KEYS}
  return kept | ({'rope_parameters': rope} if rope else {})


def value(config: Mapping[str, Any], key: str, absent: Any) -> Any:
  """config[key], or `absent` where config.json leaves it out or holds null."""
  return config[key] if key in config and config[key] is not None else absent


def _rope_given(config: Mapping[str, Any]) -> Mapping[str, Any]:
  # In the older form the scaling stands apart from theta, and its type was once called 'type'.
  given = value(config, 'rope_scaling', {}) or value(config, 'rope_parameters', {})
  if not isinstance(given, Mapping):
    raise ValueError(f'rope parameters are {given!r}; expected an object')
  return given


def rope_from_hf(config: Mapping[str, Any], family: Family) -> RopeConfig:
  """Reads the rotary embedding, of transformers 5 or older."""
  given = _rope_given(config)
  theta = value(given, 'rope_theta', value(config, 'rope_theta', _ABSENT_THETA))
  rope_type = value(given, 'rope_type', value(given, 'type', 'default'))
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
  absent = value(config, 'partial_rotary_factor', _ABSENT_ROTARY) if family.hybrid else 1.0
  factor = value(given, 'partial_rotary_factor', absent)
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
