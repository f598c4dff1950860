"""Trees of JSON values and numpy arrays as one JSON object, exactly."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

_LEVEL = 1  # log-probs and caches hardly shrink, whatever the effort


def freeze(tree: Any) -> dict[str, Any]:
  """Returns a JSON object that holds `tree`, whose keys are strings; tuples become lists."""
  arrays: list[np.ndarray] = []
  shown = _out(tree, arrays)
  buffer = io.BytesIO()
  np.savez(buffer, *arrays, allow_pickle=False)
  packed = zlib.compress(buffer.getvalue(), _LEVEL)
  return {'tree': shown, 'arrays': base64.b64encode(packed).decode()}


def thaw(frozen: Mapping[str, Any]) -> Any:
  """The inverse of `freeze`."""
  packed = zlib.decompress(base64.b64decode(frozen['arrays']))
  with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
    return _in(frozen['tree'], arrays)


def _out(tree: Any, arrays: list[np.ndarray]) -> Any:
  if isinstance(tree, np.ndarray):
    arrays.append(tree)
    return {'array': len(arrays) - 1}
  if isinstance(tree, Mapping):
    # An object of its own, so that no key of the tree is taken for an array's.
    return {'dict': {key: _out(value, arrays) for key, value in tree.items()}}
  if isinstance(tree, list | tuple):
    return [_out(value, arrays) for value in tree]
  return tree


def _in(shown: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  if isinstance(shown, list):
    return [_in(value, arrays) for value in shown]
  if not isinstance(shown, Mapping):
    return shown
  if 'array' in shown:
    return arrays[f'arr_{shown["array"]}']
  return {key: _in(value, arrays) for key, value in shown['dict'].items()}
