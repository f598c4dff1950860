"""Pools: replicas of one accelerator, format, cache dtype, server configuration and price."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Mapping

from mimo import checks
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


# An accelerator that is none: a server computes in float32 on this machine's cores.
CPU = 'CPU'

KV_CACHE_DTYPES = ('bf16', 'fp8')
PREFIX_CACHES = ('keep', 'drop')
SERVERS = ('native', 'vllm')

_NAME = re.compile(r'[A-Za-z][A-Za-z0-9_]*')


def list_price(accelerator: str) -> float:
  """Returns the list price of one GPU in US dollars per hour; 'CPU' costs nothing.

  Raises ValueError naming the nearest accelerator that has one.
  """
  if accelerator == CPU:
    return 0.0
  if accelerator not in LIST_PRICES_USD_PER_GPU_HOUR:
    known = list(LIST_PRICES_USD_PER_GPU_HOUR)
    hint = checks.nearest(accelerator.upper().replace(' ', '_'), known)
    raise ValueError(f'accelerator is {accelerator!r}; expected one of {", ".join(known)}{hint}')
  return LIST_PRICES_USD_PER_GPU_HOUR[accelerator]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
  """One replica of one server configuration: a section of a configuration's `pools`.

  Attributes:
    name: unique in a fleet; a letter followed by letters, digits and _.
    accelerator: a key of the price table, such as 'H100'; '2xH100' is a replica on two; or 'CPU'.
    format: the weight format served.
    server: 'native', which samples in this process; 'vllm', a server that is started for it.
    kv_cache_dtype: 'bf16' or 'fp8'.
    prefix_cache: 'keep' or 'drop' at a weight update.
    sessions: how many sessions a replica decodes at a time.
    turns_per_hour: turns an hour that a replica serves, as measured or stated; None prices nothing.
    usd_per_gpu_hour: US dollars an hour that one GPU costs; None is its list price.
  """

  name: str
  accelerator: str
  format: str
  server: str = 'native'
  kv_cache_dtype: str = 'fp8'
  prefix_cache: str = 'keep'
  sessions: int
  turns_per_hour: float | None = None
  usd_per_gpu_hour: float | None = None

  def __post_init__(self) -> None:
    if not _NAME.fullmatch(self.name):
      raise ValueError(
        f'name is {self.name!r}; expected a letter followed by letters, digits and _'
      )
    if not 1 <= self.gpus_per_replica <= 64:
      raise ValueError(f'accelerator is {self.accelerator!r}; expected 1 to 64 GPUs')
    list_price(self.gpu)
    checks.one_of('server', self.server, SERVERS)
    checks.one_of('kv_cache_dtype', self.kv_cache_dtype, KV_CACHE_DTYPES)
    checks.one_of('prefix_cache', self.prefix_cache, PREFIX_CACHES)
    checks.whole('sessions', self.sessions, least=1, most=2**12)
    if self.turns_per_hour is not None:
      checks.number('turns_per_hour', self.turns_per_hour, above=0, most=1e9)
    if self.usd_per_gpu_hour is not None:
      checks.number('usd_per_gpu_hour', self.usd_per_gpu_hour, least=0, most=1e6)

  @property
  def gpus_per_replica(self) -> int:
    """GPUs that one replica occupies: 2 where `accelerator` is '2xH100'."""
    count, times, _ = self.accelerator.partition('x')
    return int(count) if times and count.isdecimal() else 1

  @property
  def gpu(self) -> str:
    """The accelerator without a count."""
    count, times, name = self.accelerator.partition('x')
    return name if times and count.isdecimal() else self.accelerator

  @property
  def source(self) -> Source:
    """What a trajectory sampled here says of its origin."""
    return Source(self.name, self.gpu, self.format, self.kv_cache_dtype)

  @property
  def replica_usd_per_hour(self) -> float:
    """What one replica costs, at the stated price or the list price."""
    price = list_price(self.gpu) if self.usd_per_gpu_hour is None else self.usd_per_gpu_hour
    return self.gpus_per_replica * price
