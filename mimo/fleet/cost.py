"""What sampling costs: modelled from turns and stated throughput, and as billed from time.

  usd_per_turn = replica_usd_per_hour / turns_per_hour           (per pool)
  modelled     = sum over pools of turns * usd_per_turn
  billed       = sum over pools of replica_secs / 3600 * replica_usd_per_hour

Prices and session counts alone say nothing of a saving: where a pool states no throughput, its
modelled cost is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mimo.fleet.pools import Pool

_SECS_PER_HOUR = 3600.0


def usd_per_turn(pool: Pool) -> float | None:
  """Returns what one turn costs when the pool runs at its stated throughput, else None."""
  if pool.turns_per_hour is None:
    return None
  return pool.replica_usd_per_hour / pool.turns_per_hour


def modelled_usd(pools: Sequence[Pool], turns: Mapping[str, int]) -> dict[str, float | None]:
  """Prices counted turns, by pool.

  Args:
    pools: the fleet.
    turns: turns sampled, by pool name; a pool that is absent sampled none.

  Returns:
    Dollars by pool name, in the order of `pools`; None where turns were sampled at no stated
    throughput.

  Raises:
    ValueError: `turns` names a pool that isn't in the fleet.
  """
  _check_names(pools, turns)
  out: dict[str, float | None] = {}
  for pool in pools:
    count = turns.get(pool.name, 0)
    price = usd_per_turn(pool)
    out[pool.name] = 0.0 if count == 0 else None if price is None else count * price
  return out


def billed_usd(pools: Sequence[Pool], replica_secs: Mapping[str, float]) -> dict[str, float]:
  """Prices the time that replicas were held, idle or not, by pool.

  Args:
    pools: the fleet.
    replica_secs: seconds held, summed over the pool's replicas, by pool name; absent is none.

  Raises:
    ValueError: `replica_secs` names a pool that isn't in the fleet.
  """
  _check_names(pools, replica_secs)
  return {
    pool.name: replica_secs.get(pool.name, 0.0) / _SECS_PER_HOUR * pool.replica_usd_per_hour
    for pool in pools
  }


def _check_names(pools: Sequence[Pool], names: Iterable[str]) -> None:
  known = {pool.name for pool in pools}
  unknown = sorted(set(names) - known)
  if unknown:
    raise ValueError(f'pool {unknown[0]!r} is not in the fleet; expected {sorted(known)}')
