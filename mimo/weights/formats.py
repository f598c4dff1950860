"""The weight formats a view can have, and how config.json states them.

| format | quantised tensors of a module | activations |
|---|---|---|
| bf16 | `weight` | as they are |
| fp8_block | `weight` e4m3, `weight_scale_inv` float32 per 128 x 128 block | e4m3, dynamic |
| fp8_channel | `weight` e4m3, `weight_scale` float32 [out, 1] | e4m3, dynamic, per token |
| nvfp4_w4a16 | `weight_packed` (two e2m1 a byte, low nibble first), `weight_scale` e4m3 per 16 \
elements, `weight_global_scale` float32 [1] | as they are |
| nvfp4_w4a4 | the same, and `input_global_scale` float32 [1] | e2m1 with e4m3 scales per 16 |

`fp8_block` is the layout of `quant_method: fp8` checkpoints; the last three are those of the
compressed-tensors library. Scales multiply, `weight_scale_inv` too despite its name, and global
scales divide: w = fp4 * weight_scale / weight_global_scale.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

BLOCK = 128  # rows and columns of an fp8_block block
GROUP = 16  # elements that share an nvfp4 block scale


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
  """One format.

  Attributes:
    name: as in the table above.
    suffixes: the names, after the module's, of the tensors that hold a quantised weight.
    activations: how a server quantises the inputs of quantised modules: 'none', 'fp8_block',
      'fp8_token' or 'nvfp4'.
  """

  name: str
  suffixes: tuple[str, ...]
  activations: str

  @property
  def quantised(self) -> bool:
    return self.name != 'bf16'


_NVFP4 = ('weight_packed', 'weight_scale', 'weight_global_scale')

FORMATS: Mapping[str, Format] = {
  form.name: form
  for form in (
    Format('bf16', ('weight',), 'none'),
    Format('fp8_block', ('weight', 'weight_scale_inv'), 'fp8_block'),
    Format('fp8_channel', ('weight', 'weight_scale'), 'fp8_token'),
    Format('nvfp4_w4a16', _NVFP4, 'none'),
    Format('nvfp4_w4a4', (*_NVFP4, 'input_global_scale'), 'nvfp4'),
  )
}

PRECISIONS: Mapping[str, str] = {'bf16': 'bf16', 'fp8': 'fp8_block', 'nvfp4': 'nvfp4_w4a16'}

BLOCK_SCALES = ('amax', 'four_over_six')


class TableRow(Protocol):
  """What this module needs to know of a tensor: a row of `mimo.models.table`."""

  @property
  def hf_name(self) -> str: ...

  @property
  def in_dims(self) -> int: ...

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def layers(self) -> tuple[int, ...] | None: ...

  @property
  def quantisable(self) -> bool: ...


def get_format(name: str) -> Format:
  """Returns the format of that name. Raises ValueError for an unknown one."""
  if name not in FORMATS:
    raise ValueError(f'unknown weight format {name!r}{_nearest(name, FORMATS)}')
  return FORMATS[name]


def resolve_format(*, precision: str | None = None, format: str | None = None) -> str:
  """Returns the name of the format that `--precision` or `--format` asks for.

  Raises ValueError for an unknown name, for neither, and for two that disagree.
  """
  if precision is not None and precision not in PRECISIONS:
    raise ValueError(f'unknown precision {precision!r}{_nearest(precision, PRECISIONS)}')
  if format is not None:
    get_format(format)
    family = '' if precision is None else precision
    if not format.startswith(family):
      raise ValueError(
        f'format {format!r} is not of precision {precision!r}; expected --format={precision}... '
        'or --precision alone'
      )
    return format
  if precision is None:
    raise ValueError(f'neither precision nor format given; expected one of {sorted(FORMATS)}')
  return PRECISIONS[precision]


def check_block_scale(rule: str) -> None:
  """Raises ValueError unless `rule` says how nvfp4 block scales are chosen."""
  if rule not in BLOCK_SCALES:
    raise ValueError(f'unknown block scale rule {rule!r}{_nearest(rule, BLOCK_SCALES)}')


def ignored_modules(table: Iterable[TableRow]) -> list[str]:
  """Returns the linear modules that stay BF16, as their names in the checkpoint.

  Convolutions are among them, since servers make them of linear modules. The head is always among
  them, also where it is tied and has no tensor of its own. Embeddings and norms are not: only
  linear modules are ever quantised, and vLLM has had releases that took a named embedding for a
  linear module and failed.
  """
  names = ['lm_head']
  for row in table:
    convolution = not row.in_dims and len(row.shape) > 2
    if row.quantisable or not (row.in_dims or convolution):
      continue
    module = row.hf_name.removesuffix('.weight')
    names += [module.replace('{layer}', str(layer)) for layer in row.layers or (0,)]
  return list(dict.fromkeys(names))


def quantization_config(name: str, ignore: Sequence[str]) -> dict[str, Any] | None:
  """Returns config.json's `quantization_config` for a format, or None for bf16.

  Args:
    name: the format.
    ignore: modules that are not quantised.
  """
  get_format(name)
  if name == 'bf16':
    return None
  if name == 'fp8_block':
    return {
      'quant_method': 'fp8',
      'fmt': 'e4m3',
      'activation_scheme': 'dynamic',
      'weight_block_size': [BLOCK, BLOCK],
      'modules_to_not_convert': list(ignore),
    }
  layout = 'float-quantized' if name == 'fp8_channel' else 'nvfp4-pack-quantized'
  weights, activations = _schemes(name)
  return {
    'quant_method': 'compressed-tensors',
    'format': layout,
    'quantization_status': 'compressed',
    'global_compression_ratio': None,
    'kv_cache_scheme': None,
    'ignore': list(ignore),
    'config_groups': {
      'group_0': {
        'targets': ['Linear'],
        'weights': weights,
        'input_activations': activations,
        'output_activations': None,
        'format': layout,
      }
    },
  }


def detect_format(hf_config: Mapping[str, Any]) -> str:
  """Returns the format that a config.json states.

  Raises ValueError when its quantization_config is none of ours.
  """
  stated = hf_config.get('quantization_config')
  if stated is None:
    return 'bf16'
  for name in FORMATS:
    if name != 'bf16' and _matches(stated, name):
      return name
  raise ValueError(
    f'quantization_config of quant_method {stated.get("quant_method")!r} has none of the known '
    f'layouts; expected one of {sorted(FORMATS)}'
  )


def _schemes(name: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
  """Returns the compressed-tensors arguments of weights and of input activations."""
  if name == 'fp8_channel':
    fp8 = {'num_bits': 8, 'type': 'float', 'symmetric': True}
    return (
      {**fp8, 'strategy': 'channel', 'dynamic': False},
      {**fp8, 'strategy': 'token', 'dynamic': True},
    )
  fp4 = {
    'num_bits': 4,
    'type': 'float',
    'symmetric': True,
    'strategy': 'tensor_group',
    'group_size': GROUP,
    'scale_dtype': 'torch.float8_e4m3fn',
  }
  activations = {**fp4, 'dynamic': 'local', 'observer': 'static_minmax'}
  return {**fp4, 'dynamic': False}, activations if name == 'nvfp4_w4a4' else None


def _matches(stated: Mapping[str, Any], name: str) -> bool:
  """Whether a quantization_config states the layout `name`; other writers add keys of their own."""
  ours = quantization_config(name, ())
  assert ours is not None
  if stated.get('quant_method') != ours['quant_method']:
    return False
  if name == 'fp8_block':
    return stated.get('weight_block_size') == [BLOCK, BLOCK]
  groups = list((stated.get('config_groups') or {}).values())
  if len(groups) != 1 or not isinstance(groups[0], Mapping):
    return False
  expected = ours['config_groups']['group_0']
  return all(_covers(groups[0].get(key), expected[key]) for key in ('weights', 'input_activations'))


def _covers(stated: Mapping[str, Any] | None, expected: Mapping[str, Any] | None) -> bool:
  if stated is None or expected is None:
    return stated is expected
  said = {key: value for key, value in expected.items() if key not in ('scale_dtype', 'observer')}
  return all(key in stated and stated[key] == value for key, value in said.items())


def _nearest(name: str, known: Iterable[str]) -> str:
  """Returns the tail of an error: what was expected, and the nearest of it."""
  options = sorted(known)
  near = difflib.get_close_matches(name, options, n=1)
  hint = f' (did you mean {near[0]!r}?)' if near else ''
  return f'; expected one of {options}{hint}'
