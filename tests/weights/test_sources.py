"""What every kind of source does alike."""

import ml_dtypes
import numpy as np
import pytest

from mimo.weights import sources


@pytest.mark.parametrize('dtype', [ml_dtypes.bfloat16, np.float16, np.float32])
def test_is_finite_of_every_value(dtype):
  bits = np.arange(1 << 16, dtype=np.uint16)
  if dtype == np.float32:
    values = (bits.astype(np.uint32) << 16).view(np.float32)
  else:
    values = bits.view(dtype)
  finite = np.isfinite(values.astype(np.float32))
  assert 0 < finite.sum() < values.size
  for value, expected in zip(values[::7], finite[::7], strict=True):
    assert sources.is_finite(value.reshape(1)) == expected
  assert sources.is_finite(values[finite]) and sources.is_finite(values[:0])
