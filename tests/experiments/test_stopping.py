"""A run is asked to stop: results that are there are taken, and a second signal ends it at once."""

import asyncio
import signal
import subprocess
import sys

import pytest

from mimo.experiments import stopping

# Says that it is ready, waits to be told to stop, and says so; then waits for ever where argv[1] is
# 'stuck', in one call that runs no Python, as a long computation does.
_CHILD = """
import asyncio, sys
from mimo.experiments import stopping

async def main():
  with stopping.on_signals() as stop:
    print('ready', flush=True)
    await stop.wait()
    print('stopping', flush=True)
    if sys.argv[1] == 'stuck':
      sys.stdin.read()

asyncio.run(main())
"""


def _child(how: str, **options) -> subprocess.Popen[str]:
  child = subprocess.Popen(
    [sys.executable, '-c', _CHILD, how],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )
  assert child.stdout.readline() == 'ready\n'
  return child


def test_any_of_the_signals_stops_it_in_good_order():
  children = {number: _child('quick') for number in stopping.SIGNALS}
  for number, child in children.items():
    child.send_signal(number)
  for child in children.values():
    out, error = child.communicate()
    assert (out, error, child.returncode) == ('stopping\n', '', 0)


def test_a_second_signal_ends_it_at_once_whatever_runs():
  child = _child('stuck')
  child.send_signal(signal.SIGTERM)
  assert child.stdout.readline() == 'stopping\n'
  child.send_signal(signal.SIGINT)
  assert child.wait() == -signal.SIGINT


def test_a_signal_that_was_ignored_stays_ignored():
  def ignore():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

  child = _child('quick', preexec_fn=ignore)
  child.send_signal(signal.SIGHUP)
  child.send_signal(signal.SIGTERM)
  assert child.communicate()[0] == 'stopping\n'


def test_handlers_are_put_back():
  before = [signal.getsignal(number) for number in stopping.SIGNALS]

  async def main():
    with stopping.on_signals():
      assert signal.getsignal(signal.SIGTERM) not in before

  asyncio.run(main())
  after = [signal.getsignal(number) for number in stopping.SIGNALS]
  # The runner of an event loop has its own for SIGINT, and puts the default back.
  assert after == before


def _unless(work, *, stop_after_turns):
  """The outcome of `work` where `stop` is set after so many turns of the event loop."""

  async def main():
    stop = asyncio.Event()

    async def stopper():
      for _ in range(stop_after_turns):
        await asyncio.sleep(0)
      stop.set()

    stopping_soon = asyncio.ensure_future(stopper())
    try:
      return await stopping.unless(stop, work())
    except stopping.Stopped:
      return 'stopped'
    finally:
      await stopping_soon

  return asyncio.run(main())


def test_a_result_that_is_there_is_taken():
  taken = []

  async def work():
    for _ in range(4):
      await asyncio.sleep(0)
    taken.append('batch')
    return 'batch'

  outcomes = []
  for turns in range(10):
    taken.clear()
    outcomes.append(_unless(work, stop_after_turns=turns))
    # Whatever the turn: what was handed out arrives, and what was stopped handed nothing out.
    assert (outcomes[-1] == 'batch') == (taken == ['batch'])
  assert set(outcomes) == {'batch', 'stopped'}


def test_what_ends_in_spite_of_its_cancellation_is_taken():
  async def work():
    try:
      await asyncio.sleep(3600)
    except asyncio.CancelledError:
      return 'batch'

  assert _unless(work, stop_after_turns=3) == 'batch'


def test_nothing_begins_once_it_is_stopped():
  begun = []

  async def work():
    begun.append(True)

  async def main():
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(stopping.Stopped):
      await stopping.unless(stop, work())

  asyncio.run(main())
  assert not begun


def test_an_error_is_raised_as_it_is():
  async def work():
    raise OSError('full')

  with pytest.raises(OSError, match='full'):
    _unless(work, stop_after_turns=0)
