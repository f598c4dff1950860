import dataclasses

import pytest

from mimo.fleet import pools
from mimo.types import Source

H100 = pools.Pool(
  name='h100_fp8',
  accelerator='2xH100',
  format='fp8_block',
  kv_cache_dtype='fp8',
  sessions=16,
  turns_per_hour=790.0,
)


def test_list_prices_are_the_stated_ones():
  expected = {'B300': 7.10, 'B200': 6.25, 'H200': 4.54, 'H100': 3.95, 'A100': 2.50}
  assert {name: pools.list_price(name) for name in expected} == expected
  assert pools.list_price('RTX_PRO_6000') == 3.03


def test_an_unknown_accelerator_names_the_nearest():
  with pytest.raises(ValueError, match=r"'rtx pro 6000'; expected .* mean 'RTX_PRO_6000'\?"):
    pools.list_price('rtx pro 6000')
  assert pools.list_price('CPU') == 0.0
  with pytest.raises(ValueError, match=r"'TPU'; expected one of B300, B200"):
    pools.list_price('TPU')


def test_a_replica_costs_its_gpus():
  assert H100.replica_usd_per_hour == pytest.approx(7.90)
  assert dataclasses.replace(H100, usd_per_gpu_hour=1.5).replica_usd_per_hour == 3.0
  assert (H100.gpus_per_replica, H100.gpu) == (2, 'H100')
  alone = dataclasses.replace(H100, accelerator='RTX_PRO_6000')
  assert (alone.gpus_per_replica, alone.gpu) == (1, 'RTX_PRO_6000')
  assert H100.source == Source('h100_fp8', 'H100', 'fp8_block', 'fp8')


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('name', 'a b', "name is 'a b'; expected a letter followed by letters, digits and _"),
    ('name', '8xH100', 'name is'),
    ('name', '../a', 'name is'),
    ('name', '', 'name is'),
    ('accelerator', '0xH100', "accelerator is '0xH100'; expected 1 to 64 GPUs"),
    ('accelerator', '2xh100', "accelerator is 'h100'; expected .*; did you mean 'H100'"),
    ('server', 'vlm', "server is 'vlm'; expected one of native, vllm; did you mean 'vllm'"),
    ('sessions', 0, 'sessions is 0; expected a whole number >= 1'),
    ('sessions', 2**20, 'sessions is 1048576'),
    ('kv_cache_dtype', 'int8', "kv_cache_dtype is 'int8'; expected one of bf16, fp8"),
    ('prefix_cache', 'yes', "prefix_cache is 'yes'; expected one of keep, drop"),
    ('usd_per_gpu_hour', -1.0, 'usd_per_gpu_hour is -1.0'),
    ('usd_per_gpu_hour', float('nan'), 'usd_per_gpu_hour is nan'),
    ('turns_per_hour', 0.0, 'turns_per_hour is 0.0; expected a number > 0'),
  ],
)
def test_a_pool_that_cannot_be_is_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(H100, **{field: value})
