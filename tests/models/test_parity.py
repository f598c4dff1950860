"""Every family against transformers; `python -m benchmarks.parity` prints the figures."""

import pytest

from benchmarks import parity


@pytest.mark.reference
@pytest.mark.parametrize('name', ['qwen3_moe', 'qwen3_next', 'qwen3_5_moe'])
def test_agrees_with_transformers(name):
  """Logits and gradients, packed and padded; decoding through a cache; neighbours in a row."""
  figures = parity.measure(name)
  assert figures.logits < 1e-4
  assert figures.gradients < 1e-3
  assert figures.cached < 1e-4
  assert figures.packed < 1e-5
