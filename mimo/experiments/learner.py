"""One batch of groups in, numbers out later: packing, the jitted update, one fetch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from mimo.experiments import hosts
from mimo.objectives import advantages
from mimo.objectives.diagnostics import summarise, total_aux
from mimo.telemetry import names
from mimo.trainer.drift import Drift
from mimo.trainer.packing import Bucket, pack
from mimo.trainer.state import TrainState
from mimo.trainer.update import ADVANTAGE_SIZE, Trainer
from mimo.types import Group
from mimo.weights.publication import Snapshot


class PendingUpdate:
  """An update that was handed to the device, and what it measures once it is done."""

  def __init__(
    self,
    metrics: dict[str, Any],
    measures: dict[str, float],
    tokens: int,
    sources: Sequence[str],
    began_at: float,
  ) -> None:
    """Waits for nothing.

    Args:
      metrics: what `Trainer.update` returned, on the device.
      measures: numbers that the host has already, by name.
      tokens: of the batch, padding left out.
      sources: pool names.
      began_at: when its batch was there, on `time.perf_counter`.
    """
    self._metrics = metrics
    self._measures = measures
    self._tokens = tokens
    self._sources = tuple(sources)
    self._began_at = began_at
    self._secs: float | None = None

  def wait(self) -> None:
    """Returns once it is done, and notes how long it took."""
    if self._secs is None:
      jax.block_until_ready(self._metrics)
      self._secs = time.perf_counter() - self._began_at

  def scalars(self) -> dict[str, float]:
    """Waits for it, and returns scalars over all tokens and by source."""
    self.wait()
    assert self._secs is not None
    metrics = jax.device_get(self._metrics) | self._measures
    aux = metrics.pop('aux')
    scalars = {names.of_train(name): float(value) for name, value in metrics.items()}
    scalars |= {names.of_train(n): float(v) for n, v in _objective(total_aux(aux)).items()}
    for i, pool in enumerate(self._sources):
      row = _objective({name: leaf[i] for name, leaf in aux.items()})
      if row[names.TOKENS]:
        scalars |= {names.of_source(pool, name): float(value) for name, value in row.items()}
    speed = {names.TRAINER_SPEED: self._tokens / self._secs, 'speed/update_secs': self._secs}
    return scalars | speed


class Learner:
  """Owns the training state, which each update donates. Used from one thread at a time.

  Args:
    trainer: the compiled update.
    state: what it starts from.
    advantage: a rule of `mimo.objectives.advantages`.
    buckets: shapes of micro-batches.
    num_candidates: K.
    sources: pool names.
    peers: the run's other processes, which do the same on their devices.
    drift: measures the drift of a batch where that is asked for.
  """

  def __init__(
    self,
    trainer: Trainer,
    state: TrainState,
    *,
    advantage: str,
    buckets: Sequence[Bucket],
    num_candidates: int,
    sources: Sequence[str],
    peers: hosts.Peers,
    drift: Drift | None = None,
  ) -> None:
    if drift is not None and peers.several:
      raise ValueError(
        'drift_every_updates is not 0; expected one process, which alone measures it'
      )
    self.state = state
    self._trainer = trainer
    self._advantage = advantage
    self._buckets = tuple(buckets)
    self._num_candidates = num_candidates
    self._sources = tuple(sources)
    self._peers = peers
    self._drift = drift
    self._pending: PendingUpdate | None = None

  def update(self, groups: Sequence[Group], *, measure_drift: bool = False) -> PendingUpdate:
    """Learns from one batch, on the device; its numbers are taken later.

    Where it was given a `Drift`, `measure_drift` adds its norms.
    """
    begin = time.perf_counter()
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    adv = [
      advantages([trajectory.reward for trajectory in group.trajectories], self._advantage)
      for group in groups
    ]
    batch = pack(
      trajectories,
      np.concatenate(adv),
      buckets=self._buckets,
      num_candidates=self._num_candidates,
      sources=self._sources,
      temperature=self._trainer.spec.temperature,
      routes=self._trainer.routes,
    )
    self._peers.send_batch(batch, self._buckets)
    measures = {}
    if self._drift is not None and measure_drift:
      measures = self._drift.measure(self.state.params, batch)
    self.state, metrics = self._trainer.update(self.state, batch)
    self._pending = PendingUpdate(metrics, measures, batch.tokens, self._sources, begin)
    return self._pending

  def snapshot(self) -> Iterable[tuple[str, np.ndarray]]:
    """Returns the policy as it is now, which the next update leaves alone."""
    if self._pending is not None:
      self._pending.wait()  # what follows waits for it anyway, and this tells when it was done
    spec = self._trainer.spec
    if self._peers.several:
      return hosts.SharedSnapshot(spec.model, self.state.params, spec.mesh, self._peers)
    return Snapshot(spec.model, self.state.params)

  def before_save(self, update: int) -> None:
    """Has the other processes save as well; the caller saves next."""
    self._peers.tell(hosts.SAVE, update)

  def follow(self, save: Callable[[int, TrainState], None]) -> None:
    """Any process but the first: does what the first one says, until it has no more to say."""
    snapshot = None
    while True:
      command, numbers = self._peers.hear()
      if command == hosts.UPDATE:
        batch = self._peers.receive_batch(
          numbers, self._buckets, self._num_candidates, self._trainer.routes
        )
        self.state, _ = self._trainer.update(self.state, batch)
      elif command == hosts.SNAPSHOT:
        snapshot = self.snapshot()
      elif command == hosts.TENSOR:
        assert isinstance(snapshot, hosts.SharedSnapshot), 'no snapshot was taken'
        snapshot.gather(*numbers[:2])
      elif command == hosts.SAVE:
        save(numbers[0], self.state)
      else:
        assert command == hosts.STOP, command
        return


# Of aux, what the trainer adds to the objective's.
_OWN = ('entropy_sum', ADVANTAGE_SIZE, 'routed_sum', 'route_difference_sum')


def _objective(aux: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Returns the objective's ratios, the entropy and the masked share of one set of tokens.

  Where routes are replayed, also the share of the layers that a token passed whose router chooses
  other experts than the sampler's did.
  """
  row = summarise({name: leaf for name, leaf in aux.items() if name not in _OWN})
  tokens = float(row[names.TOKENS])
  entropy = np.float64(aux['entropy_sum'] / tokens if tokens else math.nan)
  masked = row[names.MASKED_LOW] + row[names.MASKED_HIGH]
  added = {'entropy': entropy, names.MASKED_SHARE: masked}
  if 'routed_sum' in aux:
    known = float(aux['routed_sum'])
    share = aux['route_difference_sum'] / known if known else math.nan
    added['route_difference'] = np.float64(share)
  return row | added
