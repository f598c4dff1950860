"""Which replica takes a session: pure functions of counts, or of the seed.

A session stays where it is put. Capacities are concurrent sessions, one number per replica; the
index returned is the replica's place in that sequence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np

from mimo import keys


def least_loaded(
  in_use: Sequence[int], capacity: Sequence[int], allowed: Collection[int] | None = None
) -> int | None:
  """Returns the replica with the largest free share of its sessions, or None when all are full.

  Shares are compared exactly, as fractions; a tie goes to the first. Where `allowed` is given, only
  those replicas are looked at.
  """
  best: int | None = None
  for r in range(len(capacity)):
    free = capacity[r] - in_use[r]
    if free <= 0 or (allowed is not None and r not in allowed):
      continue
    # free / capacity > best's, without division.
    if best is None or free * capacity[best] > (capacity[best] - in_use[best]) * capacity[r]:
      best = r
  return best


def table(capacity: Sequence[int]) -> tuple[int, ...]:
  """Returns replicas laid out in proportion to their sessions and as evenly as can be.

  Replica r occurs capacity[r] / gcd(capacity) times; any run of the table holds each in about its
  proportion (smooth weighted round robin: each step the replica furthest behind its share).

  Raises ValueError when there is no replica, or one with no session.
  """
  if not capacity or min(capacity) < 1:
    raise ValueError(f'sessions per replica are {list(capacity)}; expected at least 1 each')
  divisor = math.gcd(*capacity)
  weights = [c // divisor for c in capacity]
  total = sum(weights)
  credit = [0] * len(weights)
  out = []
  for _ in range(total):
    credit = [c + w for c, w in zip(credit, weights, strict=True)]
    chosen = max(range(len(credit)), key=lambda r: (credit[r], -r))
    credit[chosen] -= total
    out.append(chosen)
  return tuple(out)


def fixed(table: Sequence[int], *, seed: int, group: int, member: int) -> int:
  """Returns the replica of one session, a function of nothing but the arguments.

  A group starts at a place of the table drawn from (seed, group), and its members take the places
  that follow, so that a group meets the pools in about their proportion.
  """
  start = int(keys.seed_sequence('routing', seed, group).generate_state(1, np.uint64)[0])
  return table[(start + member) % len(table)]
