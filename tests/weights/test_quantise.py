"""Encoders and decoders against tables written here, float64 and the libraries' own decoders."""

import time

import ml_dtypes
import numpy as np
import pytest

from mimo.weights import formats, quantise

QUANTISED = ('fp8_block', 'fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4')
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def bf16(values):
  return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)


def gaussian(rows, columns, *, std=0.02, seed=0):
  return bf16(np.random.default_rng(seed).normal(0.0, std, (rows, columns)))


def encode(name, weight, **options):
  scale = {'input_scale': 100.0} if name == 'nvfp4_w4a4' else {}
  return quantise.encode(name, [weight], **scale, **options)[0]


def e4m3_float64(array):
  """Decodes e4m3 from its bits: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
  bits = array.view(np.uint8).astype(np.int64)
  sign = np.where(bits & 0x80, -1.0, 1.0)
  exponent, mantissa = (bits >> 3) & 15, bits & 7
  normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
  return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def decode_float64(name, parts):
  """The formats' definitions, in float64 and one element at a time where it matters."""
  if name == 'fp8_channel':
    return e4m3_float64(parts['weight']) * parts['weight_scale'].astype(np.float64)
  if name == 'fp8_block':
    scale = parts['weight_scale_inv'].astype(np.float64).repeat(128, axis=0).repeat(128, axis=1)
    values = e4m3_float64(parts['weight'])
    return values * scale[: values.shape[0], : values.shape[1]]
  packed = parts['weight_packed']
  values = np.zeros((packed.shape[0], packed.shape[1] * 2))
  for half, nibbles in enumerate((packed & 15, packed >> 4)):  # the low nibble comes first
    values[:, half::2] = np.array([*E2M1, *(-v for v in E2M1)])[nibbles]
  scale = e4m3_float64(parts['weight_scale']).repeat(16, axis=1)
  return values * scale / parts['weight_global_scale'].astype(np.float64)


def error(weight, decoded):
  weight, decoded = weight.astype(np.float64), decoded.astype(np.float64)
  return np.linalg.norm(decoded - weight) / np.linalg.norm(weight)


@pytest.mark.parametrize('name', QUANTISED)
def test_decode_agrees_with_the_definition_in_float64(name):
  parts = encode(name, gaussian(256, 160 if name == 'fp8_block' else 64))
  exact, ours = decode_float64(name, parts), quantise.decode(name, parts)
  assert ours.dtype == ml_dtypes.bfloat16
  # bf16 keeps 8 bits; float32 before it may move a tie.
  np.testing.assert_allclose(ours.astype(np.float64), exact, rtol=2.0**-8 * 1.001, atol=0)


@pytest.mark.parametrize(
  ('name', 'expected'),
  [('fp8_block', 0.0265), ('fp8_channel', 0.0265), ('nvfp4_w4a16', 0.095), ('nvfp4_w4a4', 0.095)],
)
@pytest.mark.parametrize('std', [1e-3, 0.02, 30.0])
def test_relative_error_on_gaussian_weights_at_any_scale(name, expected, std):
  weight = gaussian(256, 512, std=std)
  assert error(weight, quantise.decode(name, encode(name, weight))) == pytest.approx(
    expected, rel=0.06
  )


def test_nvfp4_by_hand():
  # amax 6 -> global scale 448; block 0 has amax 6: scale 448. Block 1 has amax 3: scale 224.
  weight = bf16([[6, 0.5, -1, 1.5] * 4 + [3, 0.25, -0.5, 0.75] * 4])
  parts = quantise.encode('nvfp4_w4a16', [weight])[0]
  assert parts['weight_global_scale'].tolist() == [448.0]
  assert parts['weight_scale'].astype(np.float32).tolist() == [[448.0, 224.0]]
  # Codes 6 -> 7, 0.5 -> 1, -1 -> 8 + 2, 1.5 -> 3; the first of two is the low nibble.
  assert parts['weight_packed'].tolist() == [[0x17, 0x3A] * 8]
  np.testing.assert_array_equal(quantise.decode('nvfp4_w4a16', parts), weight)


def test_fp8_by_hand():
  # amax 448 x 2: scale 2, and 2 x 17 lies between e4m3's 16 and 18: to even, 16.
  parts = quantise.encode_fp8_channel(bf16([[896, -2, 34, 0], [0, 0, 0, 0]]))
  assert parts['weight_scale'].tolist() == [[2.0], [1.0]]
  assert parts['weight'].astype(np.float32).tolist() == [[448, -1, 16, 0], [0, 0, 0, 0]]
  blocks = np.zeros((256, 130), np.float32)
  blocks[0, 0], blocks[200, 129] = 448, 896
  parts = quantise.encode_fp8_block(bf16(blocks))
  assert parts['weight_scale_inv'].tolist() == [[1.0, 1.0], [1.0, 2.0]]
  assert parts['weight'].shape == (256, 130)
  np.testing.assert_array_equal(quantise.decode_fp8_block(parts), bf16(blocks))


@pytest.mark.parametrize('name', QUANTISED)
@pytest.mark.parametrize('rule', ['amax', 'four_over_six'])
def test_zeros_decode_to_exact_zeros_and_nothing_overflows(name, rule):
  zeros = bf16(np.zeros((128, 64)))
  decoded = quantise.decode(name, encode(name, zeros, block_scale=rule))
  assert not decoded.astype(np.float32).any()
  wide = bf16(np.full((128, 64), 1e-30))
  wide[0, 0], wide[1, 1], wide[2, :] = 3e38, -3e38, 0  # blocks and rows of very different sizes
  decoded = quantise.decode(name, encode(name, wide, block_scale=rule)).astype(np.float32)
  assert np.isfinite(decoded).all()
  assert not decoded[2].any()
  assert decoded[0, 0] == pytest.approx(3e38, rel=0.07)
  tiny = bf16(np.full((128, 64), 1e-40))
  assert np.isfinite(quantise.decode(name, encode(name, tiny)).astype(np.float32)).all()


def test_e4m3_saturates():
  # The cast alone gives NaN above 464, where nothing is left to round to.
  values = quantise._to_e4m3(np.array([500.0, -1e9, 448.0], np.float32))
  assert values.astype(np.float32).tolist() == [448.0, -448.0, 448.0]


def test_small_blocks_keep_what_the_smallest_scale_can_hold():
  weight = np.full((1, 32), 1.0, np.float32)
  weight[0, 16:] = 2.0**-20 * 1.5  # its scale would round to zero in e4m3
  parts = quantise.encode_nvfp4([bf16(weight)])[0]
  assert (parts['weight_scale'].astype(np.float32) > 0).all()


def test_fused_weights_share_the_global_scale():
  q, k = gaussian(128, 64, std=1.0), gaussian(64, 64, std=0.01, seed=1)
  amax = np.float32(np.abs(q.astype(np.float32)).max())
  for weights in ([q, k], [k, q]):
    shared = quantise.encode('nvfp4_w4a16', weights)
    for weight, parts in zip(weights, shared, strict=True):
      assert parts['weight_global_scale'] == np.float32(448 * 6) / amax
      assert error(weight, quantise.decode('nvfp4_w4a16', parts)) < 0.15


def test_four_over_six_never_has_the_larger_squared_error():
  weight = gaussian(64, 256, seed=3)
  plain, chosen = (
    decode_float64('nvfp4_w4a16', encode('nvfp4_w4a16', weight, block_scale=rule))
    for rule in ('amax', 'four_over_six')
  )
  assert error(weight, chosen) < 0.95 * error(weight, plain)
  errors = [
    np.square((x - weight.astype(np.float64)).reshape(64, 16, 16)).sum(axis=2)
    for x in (chosen, plain)
  ]
  assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
  # 4 x scale is what the largest magnitude maps to where 1..4 are all wanted.
  evenly = bf16([[4, 3, 2, 1] * 4 + [24.0] * 16])
  parts = quantise.encode_nvfp4([evenly], block_scale='four_over_six')[0]
  np.testing.assert_array_equal(quantise.decode_nvfp4(parts), evenly)
  assert (quantise.decode_nvfp4(quantise.encode_nvfp4([evenly])[0]) != evenly).any()


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: quantise.encode('fp9', [gaussian(2, 16)]), 'unknown weight format'),
    (lambda: quantise.encode('nvfp4_w4a16', [gaussian(2, 24)]), 'multiple of 16; got 24'),
    (lambda: quantise.encode('nvfp4_w4a4', [gaussian(2, 16)]), 'calibrated input_global_scale'),
    (
      lambda: quantise.encode('nvfp4_w4a4', [gaussian(2, 16)], input_scale=np.inf),
      'positive finite',
    ),
    (
      lambda: quantise.encode('fp8_block', [gaussian(128, 16), gaussian(64, 16)]),
      'multiples of 128; got 64',
    ),
    (lambda: quantise.encode('fp8_channel', [np.zeros((2, 2))]), 'float64.*expected a bfloat16'),
    (lambda: quantise.encode('nvfp4_w4a16', [gaussian(2, 16)], block_scale='max'), 'block scale'),
    (lambda: quantise.decode('fp8_channel', {'weight': gaussian(2, 2)}), 'weight is bfloat16'),
    (lambda: quantise.decode('nvfp4_w4a16', {}), 'weight_packed is missing'),
  ],
)
def test_mistakes_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_wrong_parts_are_named():
  parts = quantise.encode_fp8_channel(gaussian(4, 16))
  with pytest.raises(ValueError, match=r'weight_scale has shape \[4\]; expected \[4, 1\]'):
    quantise.decode_fp8_channel(parts | {'weight_scale': parts['weight_scale'][:, 0]})
  parts = quantise.encode_nvfp4([gaussian(4, 32)])[0]
  with pytest.raises(ValueError, match=r'weight_global_scale is 0\.0; expected a positive'):
    quantise.decode_nvfp4(parts | {'weight_global_scale': np.zeros(1, np.float32)})


@pytest.mark.parametrize('name', QUANTISED)
def test_a_small_model_encodes_in_little_time(name):
  weights = [gaussian(384, 128, seed=seed) for seed in range(15)]  # 0.74M
  start = time.process_time()
  for weight in weights:
    encode(name, weight)
  assert time.process_time() - start < 0.5  # some 20 ms where nothing else runs


@pytest.mark.reference
@pytest.mark.parametrize('rule', ['amax', 'four_over_six'])
@pytest.mark.parametrize('name', ['fp8_channel', 'nvfp4_w4a16', 'nvfp4_w4a4'])
def test_compressed_tensors_decodes_to_the_same_bits(name, rule):
  torch = pytest.importorskip('torch')
  quantization = pytest.importorskip('compressed_tensors.quantization')
  compressors = pytest.importorskip('compressed_tensors.compressors')
  config = quantization.QuantizationConfig.model_validate(formats.quantization_config(name, ()))
  scheme = config.config_groups['group_0']
  weight = gaussian(96, 64, seed=5)
  weight[3] = 0
  parts = encode(name, weight, block_scale=rule)
  state = {suffix: to_torch(torch, array) for suffix, array in parts.items()}
  compressor = compressors.BaseCompressor.get_value_from_registry(config.format)
  theirs = compressor.decompress(state, scheme)['weight'].to(torch.bfloat16)
  ours = quantise.decode(name, parts)
  np.testing.assert_array_equal(theirs.view(torch.uint16).numpy(), ours.view(np.uint16))
  if rule == 'amax':  # and it encodes to our codes, given our scales
    scales = {k: v.float() if k == 'weight_scale' else v for k, v in state.items()}
    packed = compressor.compress(scales | {'weight': to_torch(torch, weight)}, scheme)
    for suffix in set(parts) & {'weight', 'weight_packed'}:
      assert torch.equal(packed[suffix].view(torch.uint8), state[suffix].view(torch.uint8))


@pytest.mark.parametrize(
  ('dtype', 'most', 'encode'),
  [
    (quantise.E4M3, 448.0, lambda x: quantise._to_e4m3(x).view(np.uint8)),
    (quantise.E2M1, 6.0, lambda x: np.take(quantise._E2M1_CODES, quantise._keys(x))),
  ],
)
def test_rounding_by_table_is_rounding_to_nearest(dtype, most, encode):
  """ml_dtypes casts float32 at once; ours goes through 16 bits."""
  every = np.arange(256, dtype=np.uint8).view(quantise.E4M3).astype(np.float32)
  if dtype == quantise.E2M1:
    every = np.arange(16, dtype=np.uint8).view(dtype).astype(np.float32)
  values = np.unique(every[np.isfinite(every)])
  halfway = (values[1:] + values[:-1]) / 2
  near = [np.nextafter(halfway, np.float32(side)) for side in (-np.inf, np.inf)]
  bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
  random = bits.view(np.float32)
  x = np.concatenate([values, halfway, *near, random[np.isfinite(random)]])
  x = np.concatenate([x, np.float32([0.0, -0.0, 1e-45, 3e38])])
  theirs = np.clip(x, -most, most).astype(dtype).view(np.uint8)
  np.testing.assert_array_equal(encode(x), theirs & (15 if dtype == quantise.E2M1 else 255))


@pytest.mark.reference
def test_transformers_decodes_fp8_block_to_the_same_bits():
  torch = pytest.importorskip('torch')
  fp8 = pytest.importorskip('transformers.integrations.finegrained_fp8')
  parts = quantise.encode_fp8_block(gaussian(256, 384, seed=7))
  theirs = fp8.Fp8Dequantize(None)._dequantize_one(
    to_torch(torch, parts['weight']), to_torch(torch, parts['weight_scale_inv']), torch.bfloat16
  )
  ours = quantise.decode_fp8_block(parts)
  np.testing.assert_array_equal(theirs.view(torch.uint16).numpy(), ours.view(np.uint16))


def to_torch(torch, array):
  """numpy knows neither bf16 nor e4m3: carried over as bits."""
  kinds = {'bfloat16': torch.bfloat16, 'float8_e4m3fn': torch.float8_e4m3fn}
  if array.dtype.name not in kinds:
    return torch.from_numpy(array.copy())
  bits = array.view(np.dtype(f'u{array.dtype.itemsize}')).copy()
  return torch.from_numpy(bits).view(kinds[array.dtype.name])
