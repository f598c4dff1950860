"""What the name of a schedule stands for. Nothing else in mimo looks at that name."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping

from mimo.rollouts.base import Pacing, RolloutOptions, VirtualOptions
from mimo.rollouts.clock import VirtualLoop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
  """How a run samples, and on which clock.

  Attributes:
    pacing: how sampling keeps step with training.
    loop: makes the event loop of the run, and with it its clock.
    threads: whether samplers and updates work beside the event loop, in threads of their own.
    virtual: how long things take on a virtual clock; None where they take what they take.
    update_secs: what an update takes on the run's clock, beyond what it takes of itself.
    redraws: whether a run that goes on draws again what had led to its checkpoint, in place of
      taking up what is saved of its source: then what was in flight comes again as well.
    kept_updates: how many updates before the last checkpoint the store keeps publications of, for
      a run that goes on from there; negative where it needs none.
  """

  pacing: Pacing
  loop: Callable[[], asyncio.AbstractEventLoop]
  threads: bool = False
  virtual: VirtualOptions | None = None
  update_secs: float = 0.0
  redraws: bool = False
  kept_updates: float = -math.inf

  def first_update(self, start: int) -> int:
    """Returns the update of the first batch that a run draws which goes on from update `start`."""
    return 0 if self.redraws else start


def _beside(options: RolloutOptions) -> Pacing:
  return Pacing(
    in_flight=options.in_flight_batches, buffered=options.buffered_batches, pin_lag=None
  )


def _async(options: RolloutOptions) -> Schedule:
  return Schedule(pacing=_beside(options), loop=asyncio.new_event_loop, threads=True)


def _lockstep(options: RolloutOptions) -> Schedule:
  return Schedule(
    pacing=Pacing(in_flight=1.0, buffered=0.0, pin_lag=options.lag_updates),
    loop=asyncio.new_event_loop,
    kept_updates=options.lag_updates,
  )


def _simulated(options: RolloutOptions) -> Schedule:
  return Schedule(
    pacing=_beside(options),
    loop=VirtualLoop,
    virtual=options.virtual,
    update_secs=options.virtual.update_secs,
    redraws=True,
    kept_updates=math.inf,
  )


_SCHEDULES: Mapping[str, Callable[[RolloutOptions], Schedule]] = {
  'async': _async,
  'lockstep': _lockstep,
  'simulated': _simulated,
}


def schedule_of(options: RolloutOptions) -> Schedule:
  """Returns what the schedule that `options` name stands for."""
  return _SCHEDULES[options.schedule](options)
