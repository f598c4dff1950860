"""Calibration of the input scales that nvfp4_w4a4 fixes in advance."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.decoder import input_amax
from mimo.models.table import fuse_key, hf_params
from mimo.weights import quantise


def calibrate(
  config: ModelConfig,
  params: Mapping[str, Any],
  sequences: Sequence[np.ndarray],
  *,
  batch: int = 8,
) -> dict[str, float]:
  """Returns the `input_global_scale` of every quantisable weight: its name -> scale.

  input_global_scale = 448 * 6 / amax, where amax is the largest magnitude that entered the
  projection over the sequences: a divisor, the convention of compressed-tensors. Weights that a
  server fuses have one input, and share it. An expert that no token was sent to is taken to meet
  what the others of its layer did. A projection that saw only zeros gets 1.

  Args:
    config: the model.
    params: its parameters.
    sequences: token ids, each [T] int32, such as the policy meets: a few dozen suffice.
    batch: how many run at a time.

  Raises:
    ValueError: there are no sequences, or one is empty.
  """
  if not len(sequences) or not all(len(sequence) for sequence in sequences):
    raise ValueError(
      f'{len(sequences)} calibration sequences; expected at least one and none empty'
    )
  length = max(len(sequence) for sequence in sequences)
  measure = jax.jit(functools.partial(input_amax, config))
  amax: dict[tuple[str, ...], np.ndarray] = {}
  for start in range(0, len(sequences), batch):
    tokens = np.zeros((batch, length), np.int32)
    segment_ids = np.zeros((batch, length), np.int32)
    for row, sequence in enumerate(sequences[start : start + batch]):
      tokens[row, : len(sequence)] = sequence
      segment_ids[row, : len(sequence)] = 1
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
    found = jax.device_get(measure(params, tokens, segment_ids, positions))
    amax = {path: np.maximum(x, amax.get(path, np.float32(0.0))) for path, x in found.items()}
  return _scales(config, amax)


def _scales(config: ModelConfig, amax: Mapping[tuple[str, ...], np.ndarray]) -> dict[str, float]:
  largest: dict[Any, float] = {}
  keys: dict[str, Any] = {}
  for name, row, index in hf_params(config):
    if row.quantisable:
      key = keys[name] = fuse_key(row, index) or name
      found = float(amax[row.path][index])
      if row.experts and not found:
        # No token was sent to this expert: the others of its layer say what to expect.
        found = float(amax[row.path][index[0]].max())
      largest[key] = max(found, largest.get(key, 0.0))
  return {name: float(quantise.global_scale(largest[key])) for name, key in keys.items()}
