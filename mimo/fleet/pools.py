"""Pools: replicas of one accelerator, format, cache dtype, server configuration and price."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
from collections.abc import Mapping

from mimo.types import Source

# List prices of renting one GPU on demand, before any discount: what a pool is priced at unless its
# owner states another `usd_per_gpu_hour`. A100 is the 80 GB part.
LIST_PRICES_USD_PER_GPU_HOUR: Mapping[str, float] = types.MappingProxyType(
  {
    'B300': 7.10,
    'B200': 6.25,
    'H200': 4.54,
    'H100': 3.95,
    'RTX_PRO_6000': 3.03,
    'A100': 2.50,
  }
)


def list_price(accelerator: str) -> float:
  """Returns the list price of one GPU in US dollars per hour.

  Raises ValueError naming the nearest accelerator that has one.
  """
  if accelerator in LIST_PRICES_USD_PER_GPU_HOUR:
    return LIST_PRICES_USD_PER_GPU_HOUR[accelerator]
  known = list(LIST_PRICES_USD_PER_GPU_HOUR)
  near = difflib.get_close_matches(accelerator.upper().replace(' ', '_'), known, n=1, cutoff=0.5)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  raise ValueError(f'accelerator is {accelerator!r}; expected one of {", ".join(known)}{hint}')


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
  """A set of equal replicas.

  Attributes:
    name: unique in a fleet.
    accelerator: such as 'H100'.
    gpus_per_replica: GPUs that one replica occupies.
    replicas: how many there are.
    format: the weight format served.
    kv_cache_dtype: 'bf16' or 'fp8'.
    prefix_cache: 'keep' or 'drop' at a weight update.
    sessions_per_replica: how many sessions one replica decodes at a time.
    usd_per_gpu_hour: what one GPU costs.
    turns_per_hour: turns that one replica serves in an hour within the latency wanted, as measured
      or stated by whoever runs it; None where nobody has: then nothing is said of cost per turn.
  """

  name: str
  accelerator: str
  gpus_per_replica: int
  replicas: int
  format: str
  kv_cache_dtype: str
  prefix_cache: str
  sessions_per_replica: int
  usd_per_gpu_hour: float
  turns_per_hour: float | None

  def __post_init__(self) -> None:
    for field in ('gpus_per_replica', 'replicas', 'sessions_per_replica'):
      if getattr(self, field) < 1:
        raise ValueError(
          f'pool {self.name}: {field} is {getattr(self, field)}; expected at least 1'
        )
    if self.kv_cache_dtype not in ('bf16', 'fp8'):
      raise ValueError(
        f'pool {self.name}: kv_cache_dtype is {self.kv_cache_dtype!r}; expected bf16 or fp8'
      )
    if self.prefix_cache not in ('keep', 'drop'):
      raise ValueError(
        f'pool {self.name}: prefix_cache is {self.prefix_cache!r}; expected keep or drop'
      )
    if not 0.0 <= self.usd_per_gpu_hour < math.inf:
      raise ValueError(
        f'pool {self.name}: usd_per_gpu_hour is {self.usd_per_gpu_hour}; expected a number >= 0'
      )
    if self.turns_per_hour is not None and not 0.0 < self.turns_per_hour < math.inf:
      raise ValueError(
        f'pool {self.name}: turns_per_hour is {self.turns_per_hour}; expected a number > 0, '
        'or None where none is stated'
      )

  @property
  def source(self) -> Source:
    """What a trajectory sampled here says of its origin."""
    return Source(self.name, self.accelerator, self.format, self.kv_cache_dtype)

  @property
  def replica_usd_per_hour(self) -> float:
    return self.gpus_per_replica * self.usd_per_gpu_hour
