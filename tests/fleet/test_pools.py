import dataclasses

import pytest

from mimo.fleet import pools
from mimo.types import Source

H100 = pools.Pool(
  name='h100_fp8',
  accelerator='H100',
  gpus_per_replica=2,
  replicas=4,
  format='fp8_block',
  kv_cache_dtype='fp8',
  prefix_cache='keep',
  sessions_per_replica=16,
  usd_per_gpu_hour=3.95,
  turns_per_hour=790.0,
)


def test_list_prices_are_the_stated_ones():
  expected = {'B300': 7.10, 'B200': 6.25, 'H200': 4.54, 'H100': 3.95, 'A100': 2.50}
  assert {name: pools.list_price(name) for name in expected} == expected
  assert pools.list_price('RTX_PRO_6000') == 3.03


def test_an_unknown_accelerator_names_the_nearest():
  with pytest.raises(ValueError, match=r"'rtx pro 6000'; expected .* mean 'RTX_PRO_6000'\?"):
    pools.list_price('rtx pro 6000')
  with pytest.raises(ValueError, match=r"'TPU'; expected one of B300, B200"):
    pools.list_price('TPU')


def test_a_replica_costs_its_gpus():
  assert H100.replica_usd_per_hour == pytest.approx(7.90)
  assert H100.source == Source('h100_fp8', 'H100', 'fp8_block', 'fp8')


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('gpus_per_replica', 0, 'pool h100_fp8: gpus_per_replica is 0; expected at least 1'),
    ('replicas', -1, 'replicas is -1'),
    ('sessions_per_replica', 0, 'sessions_per_replica is 0'),
    ('kv_cache_dtype', 'int8', "kv_cache_dtype is 'int8'; expected bf16 or fp8"),
    ('prefix_cache', 'yes', "prefix_cache is 'yes'; expected keep or drop"),
    ('usd_per_gpu_hour', -1.0, 'usd_per_gpu_hour is -1.0'),
    ('usd_per_gpu_hour', float('nan'), 'usd_per_gpu_hour is nan'),
    ('turns_per_hour', 0.0, 'turns_per_hour is 0.0; expected a number > 0, or None'),
  ],
)
def test_a_pool_that_cannot_be_is_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(H100, **{field: value})
