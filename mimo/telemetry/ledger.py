"""The cost ledger: what sampling cost by pool, per update and since the run began.

Two books, never mixed. `modelled` is turns counted times a stated price per turn: what the update
would cost on a fleet that serves at its stated throughput. `billed` is the time that replicas were
held times their list price, idle time included. Both are worked out where prices live; the ledger
adds them up. A pool that states no throughput has no modelled cost, nor has any total over it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

MODELLED = 'modelled_usd'
BILLED = 'billed_usd'
TURNS = 'turns'
_BOOKS = (TURNS, MODELLED, BILLED)


class Ledger:
  """Cumulative turns and dollars by pool. Unknown dollars are NaN, and stay so."""

  def __init__(self, pools: Sequence[str]) -> None:
    """Opens empty books for `pools`."""
    self._books = {book: dict.fromkeys(pools, 0.0) for book in _BOOKS}

  def add(
    self,
    *,
    turns: Mapping[str, int],
    modelled_usd: Mapping[str, float | None],
    billed_usd: Mapping[str, float],
  ) -> dict[str, float]:
    """Books one update.

    Args:
      turns: turns sampled since the last call, trained on or not, by pool.
      modelled_usd: dollars for those turns, by pool; None where no throughput is stated.
      billed_usd: dollars for the time held since the last call, by pool.

    Returns:
      Scalars: `cost/<book>/<pool>` and `cost/<book>` of this update, and the same with `_total`
      since the run began, for the books `turns`, `modelled_usd` and `billed_usd`.

    Raises:
      ValueError: a pool that isn't in the books, or a negative entry.
    """
    entries: dict[str, Mapping[str, float | None]] = {
      TURNS: turns,
      MODELLED: modelled_usd,
      BILLED: billed_usd,
    }
    amounts = {book: self._amounts(book, entries[book]) for book in _BOOKS}
    scalars: dict[str, float] = {}
    for book, by_pool in amounts.items():
      totals = self._books[book]
      for pool, amount in by_pool.items():
        totals[pool] += amount
      for name, part in ((book, by_pool), (f'{book}_total', totals)):
        scalars |= {f'cost/{name}/{pool}': amount for pool, amount in part.items()}
        scalars[f'cost/{name}'] = math.fsum(part.values())
    return scalars

  def _amounts(self, book: str, entries: Mapping[str, float | None]) -> dict[str, float]:
    pools = self._books[book]
    unknown = sorted(set(entries) - set(pools))
    if unknown:
      raise ValueError(f'{book}: pool {unknown[0]!r} has no books; expected one of {sorted(pools)}')
    out = dict.fromkeys(pools, 0.0)
    for pool, amount in entries.items():
      if amount is not None and not amount >= 0:
        raise ValueError(f'{book} of {pool} is {amount}; expected a number >= 0')
      out[pool] = math.nan if amount is None else float(amount)
    return out

  def state(self) -> dict[str, Any]:
    """Returns the books as JSON values, NaN being None."""
    return {
      book: {pool: None if math.isnan(amount) else amount for pool, amount in totals.items()}
      for book, totals in self._books.items()
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Takes the books of a checkpoint; a pool that has left the fleet keeps what it cost.

    Raises ValueError where `state` isn't such books.
    """
    if set(state) != set(_BOOKS):
      raise ValueError(
        f'the ledger to resume from is {json.dumps(state)[:80]}; expected {", ".join(_BOOKS)}'
      )
    for book, totals in state.items():
      for pool, amount in totals.items():
        self._books[book][pool] = math.nan if amount is None else float(amount)
