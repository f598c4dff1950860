"""Per format: a view that a running sampler loads again is served as a cold start serves it."""

import asyncio
import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo.models.decoder import init
from mimo.models.table import hf_params, named_tensors
from mimo.samplers.engine import EngineSettings
from mimo.samplers.native import NativeSampler
from mimo.types import Source, Version
from mimo.weights.views import ViewSpec, write_view

A, B = Version(1, 0, 0), Version(2, 0, 1)
PROMPT = np.array([3, 1, 4, 1, 5, 9], np.int32)


@pytest.fixture(scope='module')
def square(config):
  """A model that every format can hold: blocks of 128 rows and columns."""
  shape = {'hidden_size': 128, 'intermediate_size': 128, 'num_heads': 8, 'num_kv_heads': 4}
  return dataclasses.replace(config, **shape, head_dim=32, num_layers=1)


@pytest.fixture(scope='module')
def weights(square):
  """The BF16 tensors of each version."""
  params = init(square, jax.random.key(0))
  params['embed']['embedding'] = params['embed']['embedding'] * 8.0
  named = [(name, x.astype(ml_dtypes.bfloat16)) for name, x in named_tensors(square, params)]
  return {A: named, B: [(name, np.roll(x, 1, axis=0)) for name, x in named]}


class Feed:
  """Views on disk, by number."""

  def __init__(self, root):
    self._root = root

  def latest(self):
    return A

  def open(self, version):
    return self._root / str(version.number)


@pytest.mark.parametrize(
  'format', ['bf16', 'fp8_block', 'fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4']
)
def test_the_second_load_of_a_view_is_a_cold_load(format, square, weights, sampling, tmp_path):
  names = [name for name, row, _ in hf_params(square) if row.quantisable]
  for version, tensors in weights.items():
    write_view(
      tmp_path / str(version.number),
      square,
      tensors,
      # Of each version's own, and no power of two apart: the other's would show.
      ViewSpec(format, input_scales=dict.fromkeys(names, 63.0 + 37.0 * version.number)),
      tokenizer_files={},
    )

  def sampler():
    settings = EngineSettings(slots=2, max_tokens=16, kv_cache_dtype='bf16', decode_steps=4)
    return NativeSampler(
      Feed(tmp_path),
      source=Source('p', 'CPU', format, 'bf16'),
      config=square,
      settings=settings,
      # The one format whose views say how; it compiles anew.
      emulate_activations=format == 'nvfp4_w4a4',
    )

  async def served(versions):
    """What one sampler draws under each version in turn; no session is released."""
    one, samples = sampler(), []
    await one.start()
    for number, version in enumerate(versions):
      await one.pin(version)
      key = np.array([1, 2], np.uint32)
      samples.append(await one.sample(f's{number}', PROMPT, sampling(candidates=48), key))
    await one.close()
    return samples

  _, between, again = asyncio.run(served([A, B, A]))
  (cold,) = asyncio.run(served([A]))
  assert again.spans[0].version == cold.spans[0].version == A.number
  for name in ('tokens', 'logps'):
    np.testing.assert_array_equal(getattr(again, name), getattr(cold, name))
  for got, expected in zip(again.candidates.dense(48), cold.candidates.dense(48), strict=True):
    np.testing.assert_array_equal(got, expected)
  assert between.spans[0].version == B.number
  assert not np.array_equal(between.logps, cold.logps)
