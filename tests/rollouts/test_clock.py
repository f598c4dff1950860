import asyncio
import os
import signal
import time

import pytest

from mimo.rollouts.clock import VirtualLoop


def _run(coroutine):
  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    return runner.run(coroutine)


def test_time_jumps_to_the_next_timer():
  async def main():
    loop = asyncio.get_running_loop()
    assert loop.time() == 0.0
    seen = []

    async def wait(secs):
      await asyncio.sleep(secs)
      seen.append((secs, loop.time()))

    await asyncio.gather(*(wait(secs) for secs in (3600.0 * 24 * 30, 0.25, 7.0)))
    assert seen == [(0.25, 0.25), (7.0, 7.0), (3600.0 * 24 * 30, 3600.0 * 24 * 30)]

  began = time.monotonic()
  _run(main())
  assert time.monotonic() - began < 60.0  # a month


def test_what_runs_takes_no_time_of_it():
  async def main():
    timer = asyncio.ensure_future(asyncio.sleep(1e-9))
    for _ in range(1000):
      await asyncio.sleep(0)
    assert not timer.done() and asyncio.get_running_loop().time() == 0.0
    await timer

  _run(main())


def test_timers_of_one_moment_fire_in_the_order_in_which_they_were_set():
  """A heap alone keeps no such order: it depends on the timers that were set and cancelled."""

  async def order(cancelled):
    loop, fired = asyncio.get_running_loop(), []
    others = [loop.call_at(4.0 + i % 3, fired.append, 'other') for i in range(cancelled)]
    for number in range(20):
      loop.call_at(5.0, fired.append, number)
      if others:
        others.pop(number % len(others)).cancel()
    for other in others:
      other.cancel()
    await asyncio.sleep(10.0)
    return fired

  for cancelled in (0, 1, 7, 40):
    assert _run(order(cancelled)) == list(range(20))


def test_a_timeout_is_of_this_clock():
  async def main():
    with pytest.raises(TimeoutError):
      async with asyncio.timeout(100.0):
        await asyncio.get_running_loop().create_future()
    assert asyncio.get_running_loop().time() == 100.0

  _run(main())


def test_where_nothing_can_happen_that_is_said():
  async def main():
    await asyncio.get_running_loop().create_future()

  with pytest.raises(RuntimeError, match='nothing can happen any more'):
    _run(main())


def test_a_signal_is_heard_between_two_jumps():
  async def main():
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, stop.set)
    waiting = asyncio.ensure_future(stop.wait())
    loop.call_later(5.0, os.kill, os.getpid(), signal.SIGUSR1)
    while not stop.is_set():
      await asyncio.sleep(1.0)
    await waiting
    assert 5.0 <= loop.time() <= 7.0
    loop.remove_signal_handler(signal.SIGUSR1)

  _run(main())
