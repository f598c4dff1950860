"""A signal at any turn of the event loop loses no batch: what is handed out is trained on.

The loop of `train`, the source and the signals are real; the learner and the store are stand-ins.
"""

import asyncio
import os
import signal
import types

import pytest

from mimo.experiments import stopping, train
from mimo.rollouts.clock import VirtualLoop
from mimo.types import Version

_UPDATES = 3


class _Loop(VirtualLoop):
  """Counts its turns, and sends SIGTERM to the process as turn `signalled` begins."""

  def __init__(self, signalled):
    super().__init__()
    self.turns = 0
    self._signalled = signalled

  def _run_once(self):
    if self.turns == self._signalled:
      os.kill(os.getpid(), signal.SIGTERM)
    self.turns += 1
    super()._run_once()


class _Run:
  """As `mimo.experiments.run.Run`, without weights. `saved` is what a checkpoint would hold."""

  def __init__(self, kit, schedule, saved=None):
    self.start, state = saved or (0, None)
    every = types.SimpleNamespace(every_updates=0)
    experiment = types.SimpleNamespace(updates=_UPDATES, evaluation=every, checkpoints=every)
    self.plan = types.SimpleNamespace(experiment=experiment)
    self.records = types.SimpleNamespace(evaluated={0, _UPDATES}, note=lambda text: None)
    self.trained = []
    self.saved = saved
    self._samplers = [
      kit.sampler(kit.after(secs), pool=pool, sessions=4) for pool, secs in (('a', 0.3), ('b', 0.7))
    ]
    self._versions = {update: Version(update, 0, update) for update in range(self.start + 1)}
    self._source = kit.source(
      self._samplers,
      task=kit.TinyTask(size=50),
      schedule=schedule,
      update_of={update: update for update in range(_UPDATES + 1)},
      version_of=self._versions,
      state=state,
    )

  async def open(self):
    await self.publish(self.start)

  async def batch(self, update):
    return await self._source.batch(update)

  async def update(self, batch):
    await asyncio.sleep(0.1)
    self.trained += [group.prompt.group for group in batch.groups]

  async def publish(self, update):
    self._versions[update] = Version(update, 0, update)
    for sampler in self._samplers:
      sampler.serve(update)
    await asyncio.sleep(0.1)

  async def evaluate(self, update):
    raise AssertionError('everything is evaluated')

  def save(self, update):
    self.saved = (update, self._source.state())

  async def close(self):
    await self._source.close()


def _play(run, signalled):
  """Runs the loop of `train`. Returns the turns of the event loop that it took."""

  async def main():
    with stopping.on_signals() as stop:
      await train.loop(run, stop)
      turns = asyncio.get_running_loop().turns
      await run.close()
      return turns

  with asyncio.Runner(loop_factory=lambda: _Loop(signalled)) as runner:
    return runner.run(main())


@pytest.fixture
def _unharmed():
  """A signal that no run heeds must not end the tests."""

  def fail(*_):
    raise AssertionError('a signal came where nothing heeds it')

  before = signal.signal(signal.SIGTERM, fail)
  yield
  signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures('_unharmed')
@pytest.mark.parametrize('schedule', ['async', 'lockstep'])
def test_a_signal_at_any_turn_loses_no_batch(kit, schedule):
  whole = _Run(kit, schedule)
  turns = _play(whole, signalled=None)
  assert len(whole.trained) == len(set(whole.trained)) == 2 * _UPDATES
  stopped_after = set()
  for signalled in range(1, turns):  # the first turn makes the handlers
    run = _Run(kit, schedule)
    _play(run, signalled)
    done, state = run.saved
    stopped_after.add(done)
    cursor = state['cursor']
    # Every prompt that was handed out is trained on, once, or is still out.
    assert len(run.trained) == 2 * done
    assert cursor['next'] == len(run.trained) + len(cursor['outstanding'])
    assert not set(run.trained) & set(cursor['outstanding'])
    rest = _Run(kit, schedule, run.saved)
    _play(rest, signalled=None)
    both = run.trained + rest.trained
    assert len(both) == len(set(both)) == 2 * _UPDATES
    if schedule == 'lockstep':
      assert both == whole.trained
  assert stopped_after == set(range(_UPDATES + 1))
