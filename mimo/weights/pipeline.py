"""Work on many tensors at once, with what is in memory bounded."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_Item = TypeVar('_Item')
_Result = TypeVar('_Result')

# What is being worked on at a time; more than this only where one item alone is larger.
BUDGET_BYTES = 256 * 2**20

_WORKERS = 8


def ordered(
  work: Callable[[_Item], _Result], items: Iterable[tuple[_Item, int]]
) -> Iterator[_Result]:
  """Yields `work(item)` of each item in order, computed by several threads ahead of the reader.

  Items begun, and results not yet yielded, take `BUDGET_BYTES` together at most, or are one item.
  numpy lets go of the interpreter lock while it computes or copies, so threads suffice.

  Args:
    work: called in a thread.
    items: (item, bytes that it takes while it is worked on and until its result is dropped).

  Raises:
    What the first failing `work` raised, in the order of items; what follows it is given up.
  """
  pending: list[tuple[concurrent.futures.Future[_Result], int]] = []
  held = 0
  with concurrent.futures.ThreadPoolExecutor(min(_WORKERS, os.cpu_count() or 1)) as pool:
    try:
      for item, size in items:
        while pending and held + size > BUDGET_BYTES:
          future, freed = pending.pop(0)
          yield future.result()
          held -= freed
        pending.append((pool.submit(work, item), size))
        held += size
      while pending:
        yield pending.pop(0)[0].result()
    finally:
      for future, _ in pending:
        future.cancel()
