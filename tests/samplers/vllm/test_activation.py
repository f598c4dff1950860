import asyncio
import hashlib
import json
import pathlib

import numpy as np
import pytest
import safetensors.numpy

from mimo.samplers.vllm.activation import ActivationError, Activator
from mimo.samplers.vllm.messages import Activation, Outcome
from mimo.samplers.vllm.view_files import read_layout
from mimo.types import Version


class FakeEngine:
  """Remembers what it was told; `fails` names the loads to fail, by directory name."""

  def __init__(self):
    self.calls = []
    self.fails = []
    self.weights = None
    self.gate = None

  async def pause(self, *, drop_cache):
    self.calls.append('pause drop' if drop_cache else 'pause')

  async def load(self, directory):
    if self.gate is not None:
      await self.gate.wait()
    name = directory.rsplit('/', 1)[1]
    self.calls.append(f'load {name}')
    if name in self.fails:
      self.weights = None
      raise RuntimeError('the disk is gone')
    self.weights = name

  async def stamp(self, number):
    self.calls.append(f'stamp {number}')

  async def resume(self):
    self.calls.append('resume')

  async def abort_all(self):
    self.calls.append('abort')


def _view(root, number, hidden=4, tensors=('x',)):
  directory = root / f'v{number}'
  directory.mkdir()
  (directory / 'config.json').write_text(json.dumps({'hidden_size': hidden}))
  arrays = {name: np.full(3, number, np.float32) for name in tensors}
  safetensors.numpy.save_file(arrays, directory / 'model.safetensors')
  contents = {path.name: path.read_bytes() for path in directory.iterdir()}
  files = {name: (hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}
  return Activation(Version(number, 0, number), str(directory), 'bf16', files, 'keep')


@pytest.fixture
def views(tmp_path):
  return {number: _view(tmp_path, number) for number in (1, 2, 3)}


@pytest.fixture
def served(views):
  """An engine and its activator with version 1 served, and the calls of that forgotten."""
  engine = FakeEngine()
  activator = Activator(engine, layout=read_layout(views[1].directory))
  asyncio.run(activator.activate(views[1]))
  engine.calls.clear()
  return engine, activator


def test_nothing_is_served_before_the_first_activation(views):
  engine = FakeEngine()
  activator = Activator(engine, layout=read_layout(views[1].directory))
  assert activator.version is None
  assert activator.refuse(None).outcome == Outcome.NOT_READY
  asyncio.run(activator.activate(views[1]))
  # No key or value may stay that the first weights did not make.
  assert engine.calls == ['pause drop', 'load v1', 'stamp 1', 'resume']
  assert activator.version == Version(1, 0, 1)
  assert activator.refuse(1) is None


def test_a_version_is_stamped_once_it_is_loaded(served, views):
  engine, activator = served
  asyncio.run(activator.activate(views[2]))
  assert engine.calls == ['pause', 'load v2', 'stamp 2', 'resume']
  assert activator.number == 2
  asyncio.run(activator.activate(views[2]))
  assert len(engine.calls) == 4


def test_a_minimum_version_is_a_gate(served):
  _, activator = served
  failure = activator.refuse(2)
  assert (failure.outcome, failure.served) == (Outcome.STALE, 1)
  assert activator.refuse(None) is None


def _break(activation, what):
  directory = pathlib.Path(activation.directory)
  shard = directory / 'model.safetensors'
  if what == 'cut':
    shard.write_bytes(shard.read_bytes()[:-4])
  elif what == 'flip':
    shard.write_bytes(shard.read_bytes()[:-1] + b'\x77')
  elif what == 'missing':
    shard.unlink()
  else:
    (directory / 'more.safetensors').write_bytes(b'')


@pytest.mark.parametrize('what', ['cut', 'flip', 'missing', 'left over'])
def test_a_view_that_is_not_as_published_touches_nothing(served, views, what):
  engine, activator = served
  _break(views[2], what)
  with pytest.raises(ActivationError) as error:
    asyncio.run(activator.activate(views[2]))
  assert error.value.outcome == Outcome.NOT_ACTIVATED
  assert (engine.calls, engine.weights, activator.number) == ([], 'v1', 1)


@pytest.mark.parametrize(('hidden', 'tensors'), [(8, ('x',)), (4, ('x', 'y')), (4, ('y',))])
def test_another_model_touches_nothing(served, tmp_path, hidden, tensors):
  engine, activator = served
  with pytest.raises(ActivationError, match=r'hidden_size|tensor'):
    asyncio.run(activator.activate(_view(tmp_path, 9, hidden, tensors)))
  assert (engine.calls, activator.number) == ([], 1)


def test_a_load_that_fails_brings_the_old_weights_back(served, views):
  engine, activator = served
  engine.fails = ['v2']
  with pytest.raises(ActivationError, match='disk is gone') as error:
    asyncio.run(activator.activate(views[2]))
  assert error.value.outcome == Outcome.NOT_ACTIVATED
  assert engine.calls == ['pause', 'load v2', 'load v1', 'stamp 1', 'resume']
  assert (engine.weights, activator.number) == ('v1', 1)
  assert activator.refuse(None) is None


def test_nothing_is_served_where_the_old_weights_do_not_come_back(served, views):
  engine, activator = served
  engine.fails = ['v1', 'v2']
  with pytest.raises(ActivationError, match='could not be loaded again') as error:
    asyncio.run(activator.activate(views[2]))
  assert error.value.outcome == Outcome.BROKEN
  # Requests in flight are aborted, and nothing resumes.
  assert engine.calls == ['pause', 'load v2', 'load v1', 'abort']
  assert activator.version is None
  assert activator.refuse(None).outcome == Outcome.BROKEN
  engine.fails = []
  asyncio.run(activator.activate(views[1]))
  assert (activator.number, activator.broken) == (1, None)
  assert activator.refuse(None) is None


def test_a_first_load_that_fails_serves_nothing(views):
  engine = FakeEngine()
  engine.fails = ['v1']
  activator = Activator(engine, layout=read_layout(views[1].directory))
  with pytest.raises(ActivationError):
    asyncio.run(activator.activate(views[1]))
  assert 'resume' not in engine.calls
  assert activator.refuse(None).outcome == Outcome.NOT_READY
  asyncio.run(activator.activate(views[2]))
  assert activator.number == 2


def test_one_activation_at_a_time(served, views):
  engine, activator = served

  async def scenario():
    engine.gate = asyncio.Event()
    first = asyncio.create_task(activator.activate(views[2]))
    async with asyncio.timeout(60):
      while not activator.activating or 'pause' not in engine.calls:
        await asyncio.sleep(0)
    with pytest.raises(ActivationError, match='under way'):
      await activator.activate(views[3])
    assert activator.number == 1
    engine.gate.set()
    await first

  asyncio.run(scenario())
  assert activator.number == 2
