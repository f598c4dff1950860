"""Several processes, one run: process 0 drives, the others take part in what spans all devices.

Process 0 samples, publishes, writes metrics and answers to the user. Before each step that needs
every device it tells the others what comes: an update and its batch, a snapshot, the gathering of
one tensor for publication, a save (every process writes its own part of a checkpoint). So the
others follow a script that only process 0 knows, and all of them compute the same states.

Where a run's processes are comes from the configuration's section `distributed`, or from the
environment, which goes before it: MIMO_COORDINATOR, MIMO_PROCESSES, MIMO_PROCESS.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from mimo import checks
from mimo.models.config import ModelConfig
from mimo.models.table import hf_params, leaf, table
from mimo.trainer import sharding
from mimo.trainer.packing import Batch, Bucket, empty_micro_batch
from mimo.types import RouteShape

COORDINATOR, PROCESSES, PROCESS = 'MIMO_COORDINATOR', 'MIMO_PROCESSES', 'MIMO_PROCESS'
_KEYS = {'coordinator': COORDINATOR, 'processes': PROCESSES, 'process': PROCESS}

BEGIN, UPDATE, SNAPSHOT, TENSOR, SAVE, STOP = range(6)
_NUMBERS = 5  # the most that a command carries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """Which process of how many this is: the section `distributed` of a configuration.

  Attributes:
    coordinator: host:port of process 0; MIMO_COORDINATOR goes before it.
    processes: how many there are; MIMO_PROCESSES goes before it.
    process: which of them this is, from 0; MIMO_PROCESS goes before it.
  """

  coordinator: str = ''
  processes: int = 1
  process: int = 0

  def __post_init__(self) -> None:
    checks.whole('processes', self.processes, least=1, most=2**16)
    if not 0 <= self.process < self.processes:
      raise ValueError(
        f'process is {self.process} of {self.processes}; expected one of 0 to {self.processes - 1}'
      )
    if self.processes > 1 and not self.coordinator.rpartition(':')[2].isdigit():
      raise ValueError(f'coordinator is {self.coordinator!r}; expected host:port of process 0')


def from_environment(cluster: Cluster) -> Cluster:
  """Returns a cluster with what the environment says in place of what it states.

  Raises ValueError naming what does not fit.
  """
  stated: dict[str, Any] = {}
  for key, variable in _KEYS.items():
    if variable in os.environ:
      text = os.environ[variable]
      if key != 'coordinator' and not text.isdigit():
        raise ValueError(f'{variable} is {text!r}; expected a whole number')
      stated[key] = text if key == 'coordinator' else int(text)
  try:
    return dataclasses.replace(cluster, **stated)
  except ValueError as error:
    raise ValueError(f'distributed.{error}') from None


def start(cluster: Cluster) -> None:
  """Joins the other processes. Call before anything asks jax for its devices."""
  if cluster.processes == 1:
    return
  # What simulated devices speak over; other backends have their own.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(cluster.coordinator, cluster.processes, cluster.process)


class Peers:
  """How process 0 and the others agree on what comes next. Alone, it does nothing."""

  def __init__(self) -> None:
    self.several = jax.process_count() > 1
    self.primary = jax.process_index() == 0

  def tell(self, command: int, *numbers: int) -> None:
    """Process 0: says what all processes do next."""
    if self.several:
      sent = np.zeros(1 + _NUMBERS, np.int32)
      sent[: 1 + len(numbers)] = (command, *numbers)
      multihost_utils.broadcast_one_to_all(sent)

  def hear(self) -> tuple[int, tuple[int, ...]]:
    """The others: waits for what comes next."""
    got = multihost_utils.broadcast_one_to_all(np.zeros(1 + _NUMBERS, np.int32))
    return int(got[0]), tuple(int(number) for number in got[1:])

  def send_batch(self, batch: Batch, buckets: Sequence[Bucket]) -> None:
    """Process 0: announces an update, and gives its batch to the others."""
    if not self.several:
      return
    self.tell(UPDATE, batch.trained, batch.tokens, batch.capacity, len(batch.micro))
    for micro in batch.micro:
      rows, tokens = micro.tokens.shape
      bucket = buckets.index(Bucket(tokens=tokens, trained=micro.mask.shape[1], rows=rows))
      multihost_utils.broadcast_one_to_all(np.int32(bucket))
      multihost_utils.broadcast_one_to_all(micro)

  def receive_batch(
    self,
    numbers: Sequence[int],
    buckets: Sequence[Bucket],
    num_candidates: int,
    routes: RouteShape | None,
  ) -> Batch:
    """The others: takes the batch that an UPDATE of these numbers announced."""
    trained, tokens, capacity, count = numbers[:4]
    micro = []
    for _ in range(count):
      bucket = buckets[int(multihost_utils.broadcast_one_to_all(np.int32(0)))]
      empty = empty_micro_batch(bucket, num_candidates, routes)
      micro.append(multihost_utils.broadcast_one_to_all(empty))
    return Batch(tuple(micro), (), trained, tokens, capacity)


class SharedSnapshot:
  """The BF16 weights of one update, on all devices; process 0 iterates them, one at a time.

  As `mimo.weights.publication.Snapshot`, for parameters that no process holds whole. Of the
  tensors that a leaf stacks, one layer's are gathered at a time.
  """

  def __init__(self, config: ModelConfig, params: Any, mesh: Mesh, peers: Peers) -> None:
    """All processes take it; process 0 says so first."""
    if peers.primary:
      peers.tell(SNAPSHOT)
    self._config = config
    self._peers = peers
    self._rows = table(config)
    self._params = jax.jit(
      lambda tree: jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), tree),
      out_shardings=sharding.param_shardings(config, mesh),
    )(params)
    everywhere = sharding.replicated(mesh)
    self._whole = jax.jit(lambda x: x, out_shardings=everywhere)
    self._layer = jax.jit(lambda x, layer: x[layer], out_shardings=everywhere)

  def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
    """Process 0: yields (Hugging Face name, tensor), while the others hear what to gather."""
    numbers = {row.path: number for number, row in enumerate(self._rows)}
    held: dict[int, tuple[int, np.ndarray]] = {}
    for name, row, index in hf_params(self._config):
      number, layer = numbers[row.path], index[0] if index else 0
      if number not in held or held[number][0] != layer:
        self._peers.tell(TENSOR, number, layer)
        held[number] = layer, self.gather(number, layer)
      x = held[number][1]
      yield name, np.ascontiguousarray(row.to_hf(x[index[1:]] if index[1:] else x))

  def gather(self, number: int, layer: int) -> np.ndarray:
    """All processes: one layer's part of a row's leaf, or all of one that is not stacked."""
    row = self._rows[number]
    x = leaf(self._params, row.path)
    whole = self._whole(x) if row.layers is None else self._layer(x, np.int32(layer))
    return np.asarray(whole.addressable_data(0))
