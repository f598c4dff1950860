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

from mimo.models import families
from mimo.models.families import ATTENTION as ATTENTION
from mimo.models.families import DELTA as DELTA
from mimo.models.families import FAMILIES, Family
from mimo.models.parts import DeltaConfig as DeltaConfig
from mimo.models.parts import MoEConfig as MoEConfig
from mimo.models.parts import RopeConfig as RopeConfig
from mimo.models.parts import check_sizes


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
    if self.family not in FAMILIES:
      raise ValueError(f'model family is {self.family!r}; expected one of {sorted(FAMILIES)}')
    family = FAMILIES[self.family]
    check_sizes(self, (*families.SIZES, 'num_kv_heads', 'head_dim'))
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
      check_sizes(self, tuple(families.DENSE_SIZES))
    elif self.intermediate_size:
      raise ValueError(
        f'intermediate_size is {self.intermediate_size}; expected 0 where every layer has experts'
      )
    self._check_pattern(family)

  def _check_pattern(self, family: Family) -> None:
    kinds = {ATTENTION, DELTA} if family.hybrid else {ATTENTION}
    if not self.pattern or not set(self.pattern) <= kinds:
      raise ValueError(f'pattern is {self.pattern}; expected kinds of {sorted(kinds)}')
    if self.pattern != families.shortest_pattern(self.pattern) or self.num_layers % len(
      self.pattern
    ):
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
    return FAMILIES[self.family].hybrid

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
    name = families.value(config, 'model_type', None)
    if name not in FAMILIES:
      raise ValueError(f'model_type is {name!r}; expected one of {sorted(FAMILIES)}')
    family = FAMILIES[name]
    text = config if family.text_family is None else families.text_config(config, family)
    sizes = families.SIZES if family.moe else families.SIZES | families.DENSE_SIZES
    families.check_stated(text, name, [*sizes.values(), *families.stated_keys(name, family)])
    families.check_switches(text, family)
    heads = text['num_attention_heads']
    pattern = families.pattern_from_hf(text, family)
    return ModelConfig(
      family=name,
      num_kv_heads=families.value(text, 'num_key_value_heads', heads),
      head_dim=families.value(text, 'head_dim', text['hidden_size'] // heads),
      rms_norm_eps=float(families.value(text, 'rms_norm_eps', families.ABSENT_EPS)),
      rope=families.rope_from_hf(text, family),
      qk_norm=family.qk_norm,
      tie_embeddings=bool(families.value(config, 'tie_word_embeddings', False)),
      pattern=pattern,
      delta=DeltaConfig(**families.read_sizes(text, families.DELTA_SIZES))
      if DELTA in pattern
      else None,
      moe=families.moe_from_hf(text, family) if family.moe else None,
      extra=families.kept_of(config, family),
      **({'intermediate_size': 0} | families.read_sizes(text, sizes)),
    )

  def to_hf(self) -> dict[str, Any]:
    """Returns config.json's content, with `rope_parameters` as transformers 5 writes it."""
    family = FAMILIES[self.family]
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
    config |= {theirs: getattr(self, ours) for ours, theirs in families.SIZES.items()}
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
      config |= {theirs: getattr(self.moe, ours) for ours, theirs in families.MOE_SIZES.items()}
      config |= {'num_experts': self.moe.num_experts}
      if self.moe.shared_intermediate_size:
        config |= {
          theirs: getattr(self.moe, ours) for ours, theirs in families.SHARED_SIZES.items()
        }
      if FAMILIES[self.family].norm_topk_prob is not None:
        config['norm_topk_prob'] = self.moe.norm_topk_prob
    if self.delta is not None:
      config |= {theirs: getattr(self.delta, ours) for ours, theirs in families.DELTA_SIZES.items()}
    return config
