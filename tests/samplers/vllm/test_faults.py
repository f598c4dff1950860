"""A replica of a real vLLM server, and what goes wrong with servers and views.

The tests share one server where they can, in the order in which they stand.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping

import jax
import numpy as np
import pytest

from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.rollouts import contract as rules
from mimo.samplers.base import SamplerContract, SamplerError
from mimo.samplers.vllm.client import ClientLimits, VllmClient
from mimo.samplers.vllm.launch import ServerSettings, server_command, server_environment
from mimo.samplers.vllm.process import ServerProcess, free_port
from mimo.samplers.vllm.replica import Replica
from mimo.samplers.vllm.sampler import RetryLimits, VllmSampler, check_status
from mimo.samplers.vllm.watch import ReplicaLimits
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import SamplingParams, Source, TurnSample, Version
from mimo.weights.publication import Publisher, Snapshot, ViewFollower
from mimo.weights.store import Blob, FileStore
from mimo.weights.views import ViewSpec

pytestmark = pytest.mark.vllm

_ROOT = pathlib.Path(__file__).parents[3]
_MODEL = {
  'model_type': 'qwen3',
  'architectures': ['Qwen3ForCausalLM'],
  'vocab_size': 128,
  'hidden_size': 64,
  'intermediate_size': 128,
  'num_hidden_layers': 2,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 32,
  'rms_norm_eps': 1e-6,
  'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
  'tie_word_embeddings': True,
  'max_position_embeddings': 2048,
  'hidden_act': 'silu',
  'attention_bias': False,
}
_MAX_TOKENS = 2048
_PARAMS = SamplingParams(1.0, 0.97, 8, 16, 24, ())
_PROMPT = np.array([5, 6, 7, 8], np.int32)
_CLIENT = ClientLimits(keep_alive_secs=0.5, silence_secs=60.0, stall_secs=120.0)
_CONTRACT = SamplerContract(
  source=Source('cpu', 'CPU', 'bf16', 'bf16'),
  logprob_mode='processed',
  logits_dtype='float32',
  vocab_size=128,
  max_tokens=_MAX_TOKENS,
  prefix_cache='keep',
  max_sessions=8,
)


class _Feed:
  """A view whose pointer the tests move by hand, past what was damaged meanwhile."""

  def __init__(self, follower: ViewFollower) -> None:
    self._follower = follower
    self.newest: Version | None = None
    self.elsewhere: dict[Version, ViewFollower] = {}

  def latest(self) -> Version | None:
    return self.newest

  def locate(self, version: Version) -> tuple[pathlib.Path, Mapping[str, Blob]]:
    return self.elsewhere.get(version, self._follower).locate(version)


def _environment(settings: ServerSettings) -> dict[str, str]:
  # The devices that tests simulate are JAX's alone.
  base = {name: value for name, value in os.environ.items() if not name.startswith(('JAX', 'XLA'))}
  return server_environment(settings, base)


def _settings(model: pathlib.Path, port: int) -> ServerSettings:
  return ServerSettings(
    str(model), port, max_tokens=_MAX_TOKENS, max_sessions=8, max_candidates=16, cpu_threads=1
  )


class _Rig:
  """A store, a replica of a real server, and the loop that they run on."""

  def __init__(self, root: pathlib.Path, runner: asyncio.Runner) -> None:
    self.root = root
    self._runner = runner
    self.config = ModelConfig.from_hf(_MODEL)
    self.params = decoder.init(self.config, jax.random.key(0))
    self.store = FileStore(root / 'store')
    self._publisher = Publisher(self.store, self.config, {}, {'bf16': ViewSpec('bf16')}, 0)
    self._update = 0
    self.feed = _Feed(ViewFollower(self.store, 'bf16'))
    self.processes: list[ServerProcess] = []
    self.feed.newest = self.publish(1.0)
    self.replica = Replica(
      self.feed,
      self._launch,
      name='cpu',
      format='bf16',
      prefix_cache='keep',
      directory=root / 'replica',
      check=lambda status: check_status(status, _CONTRACT, candidates=16),
      new_client=lambda url: VllmClient(url, limits=_CLIENT, max_connections=8),
      # A first step may compile; what is hung here has stopped for good.
      limits=ReplicaLimits(stall_secs=15.0, unanswered_secs=60.0),
    )
    self.sampler = VllmSampler(
      self.replica, _CONTRACT, limits=_CLIENT, retry=RetryLimits(recovery_secs=300.0)
    )

  async def _launch(self, model: pathlib.Path) -> ServerProcess:
    settings = _settings(model, free_port('127.0.0.1'))
    process = await ServerProcess.start(
      server_command(settings),
      url=f'http://127.0.0.1:{settings.port}',
      log=self.root / 'server.log',
      environment=_environment(settings),
    )
    self.processes.append(process)
    return process

  def run(self, work):
    return self._runner.run(work)

  def publish(self, scale: float) -> Version:
    """Publishes the policy, its weights times a number; nobody is told."""
    params = jax.tree.map(lambda x: x * scale, self.params)
    self._update += 1
    return self._publisher.publish(self._update, Snapshot(self.config, params))

  def directory(self, version: Version) -> pathlib.Path:
    return self.feed.locate(version)[0]

  async def turn(self, name: str, **changes) -> TurnSample:
    """Draws one turn, always of the same prompt, parameters and key, and checks it."""
    params = SamplingParams(**{**_asdict(_PARAMS), **changes})
    try:
      sample = await self.sampler.sample(name, _PROMPT, params, np.array([3, 4], np.uint32))
    finally:
      await self.sampler.release(name)
    rules.check_turn(sample, params)
    rules.check_streams(
      sample.tokens,
      sample.logps,
      sample.candidates,
      sample.full_support,
      vocab_size=128,
      max_candidates=16,
    )
    return sample


def _asdict(params: SamplingParams) -> dict:
  return {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}


@pytest.fixture(scope='module')
def rig(tmp_path_factory) -> Iterator[_Rig]:
  with asyncio.Runner() as runner:
    made = _Rig(tmp_path_factory.mktemp('rig'), runner)
    try:
      runner.run(made.sampler.start())
      yield made
    finally:
      runner.run(made.sampler.close())


def _tree(pid: int) -> dict[int, str]:
  """Returns process id -> command line of all that came of a process."""
  parents, commands = {}, {}
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit():
      with contextlib.suppress(OSError, IndexError):
        state, parent = (entry / 'stat').read_text().rpartition(')')[2].split()[:2]
        if state != 'Z':
          parents[int(entry.name)] = int(parent)
          commands[int(entry.name)] = (entry / 'cmdline').read_text().replace('\0', ' ')
  found, new = set(), {pid}
  while new:
    new = {child for child, parent in parents.items() if parent in new} - found
    found |= new
  return {child: commands[child] for child in sorted(found)}


def _same(one: TurnSample, two: TurnSample) -> bool:
  return np.array_equal(one.tokens, two.tokens) and np.array_equal(one.logps, two.logps)


def test_versions_are_followed_and_what_they_draw_differs(rig) -> None:
  first = rig.run(rig.turn('first'))
  assert first.spans[0].version == rig.replica.version.number == 1
  rig.feed.newest = rig.publish(1.5)
  second = rig.run(rig.turn('second'))
  assert second.spans[0].version == 2
  rig.feed.newest = rig.publish(1.0)
  third = rig.run(rig.turn('third'))
  assert third.spans[0].version == 3
  assert not _same(first, second)
  assert _same(first, third)  # bit for bit: these are the same weights again


def test_the_stock_route_draws_the_same_turn(rig) -> None:
  """The slow fallback, on the same server: ids, log-probs, candidates and versions."""

  async def both():
    client, number = await rig.replica.serving(60.0)
    request = GenerateRequest('packed', _PROMPT, _PARAMS, 99, number, 5.0)
    stock = VllmClient(rig.processes[-1].url, limits=_CLIENT, max_connections=1, packed=False)
    try:
      return await client.generate(request), await stock.generate(
        dataclasses.replace(request, request='stock')
      )
    finally:
      await stock.close()

  packed, stock = rig.run(both())
  assert _same(packed, stock)
  assert packed.spans == stock.spans
  assert np.array_equal(packed.full_support, stock.full_support)
  assert np.array_equal(packed.candidates.offsets, stock.candidates.offsets)
  for row in range(len(packed.tokens)):  # equally likely ones may come in another order
    ours, theirs = (
      dict(zip(*c.row(row), strict=True)) for c in (packed.candidates, stock.candidates)
    )
    assert ours.keys() == theirs.keys()
    assert max(abs(ours[token] - theirs[token]) for token in ours) < 1e-6


def _truncate(directory: pathlib.Path) -> None:
  _replace(directory / 'model.safetensors', lambda content: content[: len(content) // 2])


def _flip(directory: pathlib.Path) -> None:
  _replace(directory / 'model.safetensors', lambda content: content[:-1] + b'\x55')


def _delete(directory: pathlib.Path) -> None:
  (directory / 'model.safetensors').unlink()


def _replace(path: pathlib.Path, change) -> None:
  content = path.read_bytes()
  path.unlink()  # it may be linked elsewhere
  path.write_bytes(change(content))


@pytest.mark.parametrize(
  'damage', [_truncate, _flip, _delete], ids=['truncated', 'flipped', 'gone']
)
def test_a_damaged_view_is_never_served(rig, damage) -> None:
  before, served = rig.run(rig.turn('before')), rig.replica.version
  bad = rig.publish(2.0)
  damage(rig.directory(bad))
  refused = rig.replica.report().failures.get('activate', 0)
  rig.feed.newest = bad
  after = rig.run(rig.turn('after'))  # which waits for the version that it asks for, or its refusal
  assert rig.replica.report().failures['activate'] == refused + 1
  assert 'model.safetensors' in rig.replica.report().last_failure
  assert rig.replica.version == served
  assert after.spans[0].version == served.number
  assert _same(before, after)


def test_a_view_of_another_architecture_is_never_served(rig) -> None:
  before, served = rig.run(rig.turn('before')), rig.replica.version
  config = ModelConfig.from_hf({**_MODEL, 'intermediate_size': 192})
  params = decoder.init(config, jax.random.key(1))
  store = FileStore(rig.root / 'other')
  publisher = Publisher(store, config, {}, {'bf16': ViewSpec('bf16')}, 0)
  for update in range(20):  # until its number is a new one here
    other = publisher.publish(update, Snapshot(config, params))
  rig.feed.elsewhere[other] = ViewFollower(store, 'bf16')
  rig.feed.newest = other
  after = rig.run(rig.turn('after'))
  assert f'version {other.number} cannot be served' in rig.replica.report().last_failure
  assert rig.replica.version == served
  assert _same(before, after)
  with pytest.raises(SamplerError, match=f'version {other.number} cannot be served'):
    rig.run(rig.sampler.pin(other))
  rig.feed.newest = served


async def _in_mid_turn(rig, act) -> TurnSample:
  """Draws a long turn, and does something to the server once it has begun."""
  turn = asyncio.ensure_future(rig.turn('long', max_turn_tokens=_MAX_TOKENS - len(_PROMPT)))
  while rig.replica.report().in_flight == 0:
    await asyncio.sleep(0.01)
  await asyncio.sleep(0.2)
  act()
  return await turn


def _send(rig, part: str, number: int) -> None:
  tree = _tree(rig.processes[-1].pid)
  pids = [pid for pid, command in tree.items() if part in command]
  assert pids, tree
  os.kill(pids[0], number)


def test_a_killed_server_costs_a_session_nothing_but_time(rig) -> None:
  before, starts = rig.run(rig.turn('before')), rig.replica.report().starts
  old = rig.processes[-1]
  rig.feed.newest = rig.publish(1.0)
  sample = rig.run(_in_mid_turn(rig, lambda: _send(rig, 'api_server', signal.SIGKILL)))
  assert len(sample.tokens) == _MAX_TOKENS - len(_PROMPT)
  assert {span.version for span in sample.spans} == {rig.feed.newest.number}
  assert rig.replica.report().starts == starts + 1
  assert not _tree(old.pid)
  assert set(rig.sampler.failures) <= {'connection', 'truncated'}
  assert _same(before, rig.run(rig.turn('after')))


def test_a_server_that_hangs_is_replaced(rig) -> None:
  """Its engine stops; what answers HTTP goes on and keeps connections alive."""
  before, starts = rig.run(rig.turn('before')), rig.replica.report().starts
  sample = rig.run(_in_mid_turn(rig, lambda: _send(rig, 'EngineCore', signal.SIGSTOP)))
  assert len(sample.tokens) == _MAX_TOKENS - len(_PROMPT)
  report = rig.replica.report()
  assert report.starts == starts + 1
  assert 'the engine has taken no step' in report.last_failure
  assert _same(before, rig.run(rig.turn('after')))


_RUN = """
import asyncio, json, pathlib, sys
from mimo.samplers.vllm.process import ServerProcess

async def main():
  stated = json.load(sys.stdin)
  server = await ServerProcess.start(
    stated['command'], url='', log=pathlib.Path(stated['log']), environment=stated['environment']
  )
  print(server.pid, flush=True)
  await server.wait()

asyncio.run(main())
"""


def test_a_server_does_not_outlive_the_run(rig, tmp_path) -> None:
  settings = _settings(shutil.copytree(rig.directory(rig.feed.newest), tmp_path / 'view'), 0)
  stated = {
    'command': server_command(settings),
    'log': str(tmp_path / 'log'),
    'environment': _environment(settings),
  }
  run = subprocess.Popen(
    [sys.executable, '-c', _RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT
  )
  assert run.stdin is not None and run.stdout is not None
  run.stdin.write(json.dumps(stated).encode())
  run.stdin.close()
  guard = int(run.stdout.readline())
  deadline = time.monotonic() + 300
  while not any('EngineCore' in command for command in _tree(guard).values()):
    assert time.monotonic() < deadline and run.poll() is None, (tmp_path / 'log').read_text()
    time.sleep(0.1)
  pids = [guard, *_tree(guard)]
  assert len(pids) >= 3
  run.kill()
  run.wait()
  deadline = time.monotonic() + 30
  while left := [pid for pid in pids if pathlib.Path(f'/proc/{pid}/cmdline').exists()]:
    assert time.monotonic() < deadline, left
    time.sleep(0.1)
