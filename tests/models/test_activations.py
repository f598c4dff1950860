import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo.models import activations
from mimo.models.activations import ActivationQuant

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def nvfp4_numpy(x, global_scale):
  """By search in the table of e2m1 values; the even code wins a tie."""
  y = np.empty(x.shape, np.float64)
  for index in np.ndindex(*x.shape[:-1]):
    for start in range(0, x.shape[-1], 16):
      block = x[index][start : start + 16].astype(np.float64)
      wanted = min(global_scale * np.abs(block).max() / 6, 448.0)
      scale = float(np.float32(wanted).astype(ml_dtypes.float8_e4m3fn)) / global_scale
      for i, value in enumerate(block):
        distance = np.abs(abs(value) / scale - E2M1) if scale else np.abs(0 - E2M1)
        nearest = np.flatnonzero(distance == distance.min())
        code = nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]
        y[index][start + i] = np.sign(value) * E2M1[code] * scale
  return y


@pytest.mark.parametrize(
  ('rounded', 'dtype', 'largest'),
  [
    (activations._e4m3, ml_dtypes.float8_e4m3fn, 448.0),
    (activations._e2m1, ml_dtypes.float4_e2m1fn, 6.0),
  ],
)
def test_rounding_equals_ml_dtypes(rounded, dtype, largest):
  """Every value of the format, every tie between two, their neighbours in float32, and beyond."""
  codes = np.arange(256 if largest > 6 else 16, dtype=np.uint8).view(dtype).astype(np.float32)
  values = np.unique(codes[np.isfinite(codes)])
  ties = (values[1:] + values[:-1]) / 2
  x = np.concatenate([values, ties])
  x = np.concatenate([x, np.nextafter(x, np.float32(-1e9)), np.nextafter(x, np.float32(1e9))])
  x = np.concatenate([x, [1e-30, -1e-30, 1e6, -1e6]]).astype(np.float32)
  expected = np.clip(x, -largest, largest).astype(dtype).astype(np.float32)
  np.testing.assert_array_equal(jax.jit(rounded)(x), expected)
  assert np.all(np.isnan(rounded(jnp.array([jnp.nan]))))


def test_fp8_token_by_hand():
  # amax 448 gives scale 1. Between 256 and 512 e4m3 steps by 32, between 1 and 2 by 1/8.
  x = jnp.array([[448.0, 300.0, -1.07, 0.0], [0.0, 0.0, 0.0, 0.0]])
  expected = [[448.0, 288.0, -1.125, 0.0], [0.0, 0.0, 0.0, 0.0]]
  np.testing.assert_array_equal(jax.jit(activations.fp8_token)(x), expected)


def test_fp8_token_rows_have_scales_of_their_own():
  x = jax.random.normal(jax.random.key(0), (2, 3, 32))
  x = np.array(x * jnp.array([1.0, 1e-2, 1e4])[:, None])
  expected = np.empty(x.shape, np.float32)
  for index in np.ndindex(2, 3):
    # The operations of vLLM's kernels in float32, where a last bit may move a value across a tie.
    scale = np.abs(x[index]).max() / np.float32(448)
    codes = (x[index] * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn)
    expected[index] = codes.astype(np.float32) * scale
  np.testing.assert_array_equal(activations.fp8_token(x), expected)
  np.testing.assert_array_equal(jax.jit(activations.fp8_token)(x), expected)
  one = jax.vmap(activations.fp8_token)(x)
  np.testing.assert_array_equal(one, activations.fp8_token(x))


def test_fp8_token_scale_has_the_floor_of_servers():
  # The scale of this row would be 1e-6 / 448: with the floor of 1 / (448 * 512), it is one code.
  step = 2.0**-9 / (448 * 512)  # the smallest e4m3 number times the scale
  got = activations.fp8_token(jnp.array([[1e-8, 0.0, 4e-9]]))
  np.testing.assert_allclose(got, [[step, 0.0, 0.0]], rtol=1e-6)


def test_fp8_block_is_about_fp8_token_of_each_run_of_128():
  x = jax.random.normal(jax.random.key(2), (3, 300)) * jnp.repeat(jnp.array([1.0, 1e-3, 9.0]), 100)
  runs = [activations.fp8_token(x[:, i : i + 128]) for i in (0, 128, 256)]
  got, expected = activations.fp8_block(x), jnp.concatenate(runs, axis=1)
  # The one divides by the scale, the other multiplies by its inverse: a tie may fall elsewhere.
  assert np.mean(got != expected) < 0.01
  np.testing.assert_allclose(got, expected, rtol=0.13)
  assert (activations.fp8_block(x) != activations.fp8_token(x)).any()


def test_nvfp4_by_hand():
  # amax 6 under a global scale of 1 gives block scale 1, and the values are rounded to e2m1:
  # 2.5 and 1.75 are ties and go to the even code.
  x = np.zeros((1, 16), np.float32)
  x[0, :6] = [6.0, 2.5, 1.75, -0.2, 5.1, 0.3]
  expected = np.zeros((1, 16))
  expected[0, :6] = [6.0, 2.0, 2.0, 0.0, 6.0, 0.5]
  got = jax.jit(activations.nvfp4)(jnp.asarray(x), jnp.float32(1.0))
  np.testing.assert_array_equal(got, expected)


def test_nvfp4_against_numpy():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 3, 64)).astype(np.float32)
  x[0, 0] = 0.0
  x[1, 2, :16] *= 100.0  # beyond what the global scale was calibrated for: saturates
  scale = np.float32(448 * 6 / np.abs(x[0]).max())
  got = activations.nvfp4(jnp.asarray(x), jnp.asarray(scale))
  np.testing.assert_allclose(got, nvfp4_numpy(x, float(scale)), rtol=1e-6, atol=1e-7)


def test_nvfp4_refuses_a_part_of_a_block():
  with pytest.raises(ValueError, match='nvfp4 activations have 24 features; expected a multiple'):
    activations.nvfp4(jnp.zeros((1, 24)), jnp.float32(1.0))


def test_cache_rounding():
  x = jnp.array([1.07, -300.0, 1e4, -1e4, 0.0])
  fp8 = jax.jit(activations.fp8_static)(x)
  np.testing.assert_array_equal(fp8, [1.125, -288.0, 448.0, -448.0, 0.0])
  # bf16 steps by 1/128 between 1 and 2.
  np.testing.assert_array_equal(
    jax.jit(activations.bf16)(jnp.array([1.005, -3.0])), [1.0078125, -3]
  )


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_dtype_is_kept(dtype):
  x = jnp.ones((2, 16), dtype)
  assert activations.fp8_token(x).dtype == dtype
  assert activations.nvfp4(x, jnp.float32(1.0)).dtype == dtype
  assert activations.fp8_static(x).dtype == dtype
  assert activations.bf16(x).dtype == dtype


def test_scales_are_data_and_the_kind_is_static():
  quant = ActivationQuant('nvfp4', {('layers', 'mlp', 'up_proj', 'kernel'): jnp.ones(2)})
  leaves, structure = jax.tree.flatten(quant)
  assert len(leaves) == 1
  assert jax.tree.unflatten(structure, leaves).kind == 'nvfp4'


@pytest.mark.parametrize(
  ('quant', 'message'),
  [
    (ActivationQuant('int8'), "activation quantisation is 'int8'; expected one of"),
    (ActivationQuant('nvfp4'), 'nvfp4 got scales: none; expected one per projection'),
    (ActivationQuant('fp8_token', {('a',): jnp.ones(2)}), 'fp8_token got scales: 1; expected none'),
  ],
)
def test_refusals(quant, message):
  with pytest.raises(ValueError, match=message):
    activations.check_activation_quant(quant)


@pytest.mark.reference
@pytest.mark.parametrize('kind', ['fp8_token', 'nvfp4'])
def test_equals_compressed_tensors(kind):
  import torch
  from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
  from compressed_tensors.quantization.lifecycle.forward import fake_quantize
  from compressed_tensors.quantization.utils import calculate_qparams

  rng = np.random.default_rng(1)
  x = rng.standard_normal((6, 64)).astype(np.float32) * np.float32(0.3)
  wide = torch.tensor(x)
  if kind == 'fp8_token':
    args = QuantizationArgs(num_bits=8, type='float', strategy='token', dynamic=True)
    scale, zero = calculate_qparams(wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True), args)
    expected = fake_quantize(wide, scale, zero, args)
    got = activations.fp8_token(jnp.asarray(x))
  else:
    args = QuantizationArgs(
      num_bits=4, type='float', strategy=QuantizationStrategy.TENSOR_GROUP, group_size=16,
      dynamic='local', scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    global_scale = torch.tensor([448 * 6 / np.abs(x).max()], dtype=torch.float32)
    blocks = wide.reshape(6, 4, 16)
    scale, zero = calculate_qparams(
      blocks.amin(-1), blocks.amax(-1), args, global_scale=global_scale
    )
    expected = fake_quantize(wide, scale, zero, args, global_scale=global_scale)
    got = activations.nvfp4(jnp.asarray(x), jnp.asarray(global_scale.numpy()[0]))
  np.testing.assert_allclose(got, expected.numpy(), rtol=1e-6, atol=0)
