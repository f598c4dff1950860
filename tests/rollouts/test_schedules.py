import asyncio
import math

from mimo.rollouts.base import SCHEDULES, Pacing, RolloutOptions, VirtualOptions
from mimo.rollouts.clock import VirtualLoop
from mimo.rollouts.schedules import schedule_of


def _of(name, **options):
  return schedule_of(RolloutOptions(schedule=name, **options))


def test_every_name_stands_for_something():
  assert [_of(name).pacing.pin_lag for name in SCHEDULES] == [None, 1, None]
  assert [_of(name).threads for name in SCHEDULES] == [True, False, False]


def test_async_samples_beside_training_on_the_real_clock():
  schedule = _of('async', in_flight_batches=0.5, buffered_batches=3.0)
  assert schedule.pacing == Pacing(in_flight=0.5, buffered=3.0, pin_lag=None)
  assert schedule.loop is asyncio.new_event_loop
  assert schedule.update_secs == 0.0 and schedule.virtual is None
  assert schedule.first_update(7) == 7 and 100 - schedule.kept_updates == math.inf


def test_lockstep_holds_one_batch_and_keeps_what_it_lags_behind():
  schedule = _of('lockstep', lag_updates=3, in_flight_batches=2.0)
  assert schedule.pacing == Pacing(in_flight=1.0, buffered=0.0, pin_lag=3)
  assert schedule.first_update(7) == 7 and 100 - schedule.kept_updates == 97


def test_a_simulated_run_has_a_virtual_clock_and_begins_again():
  virtual = VirtualOptions(update_secs=5.0)
  schedule = _of('simulated', virtual=virtual)
  assert schedule.loop is VirtualLoop and schedule.virtual is virtual
  assert schedule.update_secs == 5.0 and schedule.pacing.pin_lag is None
  assert schedule.first_update(7) == 0 and 100 - schedule.kept_updates == -math.inf
