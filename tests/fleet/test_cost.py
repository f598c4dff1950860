import dataclasses

import pytest

from mimo.fleet import cost, pools

A = pools.Pool(
  name='a',
  accelerator='2xH100',
  format='fp8_block',
  kv_cache_dtype='fp8',
  sessions=16,
  usd_per_gpu_hour=4.0,
  turns_per_hour=1000.0,
)
B = dataclasses.replace(A, name='b', accelerator='H100', usd_per_gpu_hour=2.5, turns_per_hour=500.0)
UNSTATED = dataclasses.replace(A, name='c', turns_per_hour=None)


def test_a_turn_costs_replica_price_over_throughput():
  assert cost.usd_per_turn(A) == pytest.approx(8.0 / 1000)  # 2 GPUs at 4.00, 1,000 turns an hour
  assert cost.usd_per_turn(B) == pytest.approx(2.5 / 500)


def test_an_update_sums_turns_times_price():
  costs = cost.modelled_usd([A, B], {'b': 300, 'a': 100})
  assert list(costs) == ['a', 'b']
  assert costs['a'] == pytest.approx(0.80)
  assert costs['b'] == pytest.approx(1.50)


def test_no_figure_without_a_stated_throughput():
  assert cost.usd_per_turn(UNSTATED) is None
  costs = cost.modelled_usd([A, UNSTATED], {'a': 100, 'c': 1})
  assert costs['c'] is None
  # A pool that sampled nothing cost nothing, whatever its throughput.
  assert cost.modelled_usd([A, UNSTATED], {'a': 100}) == {'a': pytest.approx(0.8), 'c': 0.0}


def test_billed_cost_is_time_held():
  # 3 replicas for 20 minutes are one replica-hour, of 2 GPUs at 4.00.
  costs = cost.billed_usd([A, B], {'a': 3 * 1200.0})
  assert costs == {'a': pytest.approx(8.0), 'b': 0.0}


def test_a_pool_outside_the_fleet_is_refused():
  with pytest.raises(ValueError, match=r"pool 'z' is not in the fleet; expected \['a', 'b'\]"):
    cost.modelled_usd([A, B], {'z': 1})
  with pytest.raises(ValueError, match="pool 'z'"):
    cost.billed_usd([A, B], {'z': 1.0})
