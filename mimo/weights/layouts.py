"""How a checkpoint of a family stores what the table names, and what else it holds.

The parameter table names each expert's matrices by themselves. Qwen3.5's published checkpoints
store a layer's experts in two tensors instead:

    ...mlp.experts.gate_up_proj  [E, 2 F, D]   of each expert its gate's rows, then its up's
    ...mlp.experts.down_proj     [E, D, F]

A checkpoint that was read so is written so again; quantised views always name experts singly, as
servers expect. Tensors of parts that aren't trained (a vision tower, multi-token prediction) are
carried from checkpoint to checkpoint as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from mimo.models.config import ModelConfig
from mimo.models.table import Index, Param
from mimo.weights.shards import TensorSpec
from mimo.weights.tensors import DTYPES, TensorReader

_FUSED_FAMILIES = frozenset({'qwen3_5_moe', 'qwen3_5_moe_text'})
_MULTIMODAL_FAMILIES = frozenset({'qwen3_5_moe'})
_CARRIED: Mapping[str, tuple[str, ...]] = {
  'qwen3_5_moe': ('model.visual.', 'mtp.'),
  'qwen3_5_moe_text': ('model.visual.', 'mtp.'),
  'qwen3_next': ('mtp.',),
}
_PREFIX = 'model'  # of names in the table
_PREFIXES = (_PREFIX, 'model.language_model')

_SINGLE = re.compile(r'\.mlp\.experts\.\d+\.')
_EXPERT = re.compile(r'(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)\.weight')


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a tensor of the table is in a checkpoint: a whole tensor, or a part of one.

  Attributes:
    name: of the stored tensor.
    shape: of the stored tensor.
    index: which of its leading dimensions.
    rows: which rows of what is there.
  """

  name: str
  shape: tuple[int, ...]
  index: Index
  rows: slice | None

  def check_shape(self, reader: TensorReader) -> None:
    """Raises KeyError where a checkpoint lacks it, ValueError where its shape is another."""
    got = reader.info(self.name).shape
    if got != self.shape:
      raise ValueError(
        f'tensor {self.name} has shape {list(got)}; expected {list(self.shape)} for this config'
      )


@dataclasses.dataclass(frozen=True)
class Layout:
  """How a checkpoint stores a model, as far as its config doesn't say.

  Attributes:
    fused_experts: whether a layer's experts are two tensors; else each has three of its own.
    prefix: what the decoder's names begin with, 'model' or 'model.language_model'.
  """

  fused_experts: bool
  prefix: str

  @staticmethod
  def published(config: ModelConfig) -> Layout:
    """Returns how the family's publisher stores its checkpoints."""
    nested = config.family in _MULTIMODAL_FAMILIES
    return Layout(config.family in _FUSED_FAMILIES, _PREFIXES[nested])

  @staticmethod
  def detect(config: ModelConfig, names: Collection[str]) -> Layout:
    """Returns the layout that a checkpoint of such names has."""
    published = Layout.published(config)
    prefix = published.prefix
    if not any(name.startswith(f'{prefix}.layers.') for name in names):
      found = [p for p in _PREFIXES if any(name.startswith(f'{p}.layers.') for name in names)]
      prefix = found[0] if found else prefix
    blocks = [name for name in names if name.startswith(f'{prefix}.layers.')]
    fused = any(name.endswith('.mlp.experts.gate_up_proj') for name in blocks)
    single = any(_SINGLE.search(name) for name in blocks)
    return Layout(fused if fused or single else published.fused_experts, prefix)

  @staticmethod
  def from_json(stated: Mapping[str, Any]) -> Layout:
    """Inverse of `dataclasses.asdict`. ValueError where it isn't one."""
    fused, prefix = stated.get('fused_experts'), stated.get('prefix')
    if not isinstance(fused, bool) or prefix not in _PREFIXES:
      raise ValueError(f'layout is {dict(stated)}; expected fused_experts and a prefix')
    return Layout(fused, prefix)

  def single(self) -> Layout:
    """Returns the layout that quantised views have."""
    return dataclasses.replace(self, fused_experts=False)

  def rename(self, name: str) -> str:
    """Returns the stored name of a tensor, or module, that isn't part of another."""
    return self.prefix + name.removeprefix(_PREFIX) if name.startswith(f'{_PREFIX}.') else name

  def place(self, row: Param, index: Index) -> Place:
    """Returns where the tensor at an index of a row's leaf is."""
    name = self.rename(row.hf_name_at(index))
    expert = _EXPERT.fullmatch(name) if self.fused_experts and row.experts else None
    if expert is None:
      return Place(name, row.hf_shape, (), None)
    stack, matrix = expert.groups()
    out, into = row.hf_shape
    if matrix == 'down_proj':
      return Place(f'{stack}.down_proj', (row.experts, out, into), index[-1:], None)
    rows = slice(0, out) if matrix == 'gate_proj' else slice(out, 2 * out)
    return Place(f'{stack}.gate_up_proj', (row.experts, 2 * out, into), index[-1:], rows)


@dataclasses.dataclass(frozen=True)
class Carried:
  """Tensors of a checkpoint that are copied as they are.

  Attributes:
    reader: of the checkpoint.
    names: of the tensors, sorted.
  """

  reader: TensorReader
  names: tuple[str, ...]

  def specs(self) -> list[TensorSpec]:
    """Returns what they are."""
    infos = [(name, self.reader.info(name)) for name in self.names]
    return [TensorSpec(name, DTYPES[info.dtype], info.shape) for name, info in infos]

  def modules(self) -> list[str]:
    """Returns the modules with matrices, which servers must not take for quantised ones."""
    matrices = [spec.name for spec in self.specs() if len(spec.shape) > 1]
    # What has no '.weight' is a parameter of the module that holds it, as a stack of experts is.
    modules = (
      n.removesuffix('.weight') if n.endswith('.weight') else n.rpartition('.')[0] for n in matrices
    )
    return list(dict.fromkeys(modules))


@dataclasses.dataclass(frozen=True)
class Origin:
  """What a policy's files say beyond its config and its parameters.

  Attributes:
    layout: how its checkpoint names tensors.
    carried: what else the checkpoint holds; None: nothing.
  """

  layout: Layout
  carried: Carried | None


def is_carried(config: ModelConfig, name: str) -> bool:
  """Whether a tensor of this name belongs to a part that isn't trained."""
  return name.startswith(_CARRIED.get(config.family, ()))
