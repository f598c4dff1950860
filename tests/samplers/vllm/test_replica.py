"""A replica over scripted servers: what it serves, and when it starts another one."""

import asyncio
import dataclasses
import hashlib
import pathlib
import time

import numpy as np
import pytest

pytest.importorskip('aiohttp', reason="needs aiohttp: install the extra 'vllm-cpu'")

from mimo.samplers.base import SamplerError
from mimo.samplers.vllm import scripted, wire
from mimo.samplers.vllm.client import ClientLimits, TurnError, VllmClient
from mimo.samplers.vllm.messages import Failure, Outcome
from mimo.samplers.vllm.replica import Replica
from mimo.samplers.vllm.watch import ReplicaLimits
from mimo.types import SamplingParams, Version
from mimo.weights.store import Blob

_LIMITS = ReplicaLimits(
  start_secs=30.0, unanswered_secs=0.4, stall_secs=0.6, poll_secs=0.01, status_secs=0.05
)
_CLIENT = ClientLimits(
  keep_alive_secs=0.1, silence_secs=20.0, stall_secs=20.0, wait_secs=20.0, activate_secs=20.0
)
_PARAMS = SamplingParams(1.0, 1.0, 0, 16, 8, (1,))


class _Feed:
  """Views on disk, and a pointer in memory."""

  def __init__(self, root: pathlib.Path) -> None:
    self.root = root
    self.newest: Version | None = None
    self.broken: set[Version] = set()

  def publish(self, number: int) -> Version:
    version = Version(number, 0, number)
    directory = self.root / str(number)
    directory.mkdir()
    (directory / 'config.json').write_text(f'{{"number": {number}}}')
    self.newest = version
    return version

  def latest(self) -> Version | None:
    return self.newest

  def locate(self, version: Version):
    if version in self.broken:
      raise ValueError(f'the store does not hold version {version.number}')
    directory = self.root / str(version.number)
    files = {
      path.name: Blob(hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size)
      for path in directory.iterdir()
    }
    return directory, files


class _Fleet:
  """Launches scripted servers, and remembers them."""

  def __init__(self, script=scripted.at_once) -> None:
    self.script = script
    self.servers: list[scripted.ScriptedServer] = []
    self.models: list[str] = []
    self.prepare = lambda server: None

  async def launch(self, model: pathlib.Path) -> scripted.ScriptedServer:
    self.models.append((model / 'config.json').read_text())
    server = scripted.ScriptedServer(self.script)
    self.prepare(server)
    await server.start()
    self.servers.append(server)
    return server


def _run(tmp_path, use, *, fleet=None, check=lambda status: None, published=(1,), **limits):
  """Runs `use(replica, feed, fleet)` on a replica that nobody has started."""
  fleet = fleet or _Fleet()
  (tmp_path / 'store').mkdir()
  feed = _Feed(tmp_path / 'store')
  for number in published:
    feed.publish(number)

  async def main():
    replica = Replica(
      feed,
      fleet.launch,
      name='pool',
      format='bf16',
      prefix_cache='keep',
      directory=tmp_path / 'replica',
      check=check,
      new_client=lambda url: VllmClient(url, limits=_CLIENT, max_connections=8),
      limits=dataclasses.replace(_LIMITS, **limits),
    )
    try:
      return await asyncio.wait_for(use(replica, feed, fleet), 90)
    finally:
      await replica.close()

  result = asyncio.run(main())
  assert not (tmp_path / 'replica').exists()
  return result


async def _until(condition, secs: float = 30.0) -> None:
  async with asyncio.timeout(secs):
    while not condition():
      await asyncio.sleep(0.01)


def _turn(name: str = 'a') -> wire.GenerateRequest:
  return wire.GenerateRequest(name, np.array([5], np.int32), _PARAMS, 1, None, 0.1)


def test_no_traffic_before_the_first_activation(tmp_path) -> None:
  async def use(replica, feed, fleet):
    starting = asyncio.ensure_future(replica.start())
    await asyncio.sleep(0.1)
    with pytest.raises(SamplerError, match='no server served'):
      await replica.serving(0.1)
    before = replica.report()
    feed.publish(4)
    await starting
    client, number = await replica.serving(30.0)
    await client.generate(_turn())
    return before, number, replica.report(), fleet.servers[0].activations

  before, number, after, (activation,) = _run(tmp_path, use, published=())
  assert (before.state, before.version, before.starts) == ('starting', None, 0)
  assert (after.state, after.version, after.starts) == ('serving', Version(4, 0, 4), 1)
  assert number == 4
  assert activation.format == 'bf16'
  assert pathlib.Path(activation.directory).is_absolute()
  content = b'{"number": 4}'
  assert activation.files == {'config.json': (hashlib.sha256(content).hexdigest(), len(content))}


def test_it_follows_the_pointer_and_turns_wait_for_it(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    fleet.servers[0].activate_secs = 0.3
    feed.publish(2)
    _, number = await replica.serving(30.0)  # asked for at once, answered when it is served
    feed.publish(3)
    return number, (await replica.serving(30.0))[1], replica.report().starts

  assert _run(tmp_path, use) == (2, 3, 1)


def test_a_version_that_is_refused_leaves_the_old_one_serving(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    (server,) = fleet.servers
    server.refuse = Failure(Outcome.NOT_ACTIVATED, 'shard 2 is truncated', 1)
    bad = feed.publish(2)
    await _until(lambda: replica.report().failures.get('activate'))
    during = (await replica.serving(30.0))[1], replica.report().last_failure
    since = time.monotonic()
    await asyncio.sleep(0.3)
    asked = len([a for a in server.activations if a.version == bad])
    again = (time.monotonic() - since) // 2.0  # where this process stands still for long
    server.refuse = None
    feed.publish(3)
    await _until(lambda: replica.version == Version(3, 0, 3))
    return during, asked - again, replica.report()

  during, asked, report = _run(tmp_path, use)
  assert during[0] == 1
  assert 'version 2 cannot be served' in during[1]
  assert 'shard 2 is truncated' in during[1]
  assert asked <= 1  # and not at every look
  assert (report.starts, report.activations) == (1, 2)


def test_a_version_that_the_store_lost_leaves_the_old_one_serving(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    feed.broken.add(feed.publish(2))
    await _until(lambda: replica.report().failures.get('activate'))
    return (await replica.serving(30.0))[1]

  assert _run(tmp_path, use) == 1


def test_what_is_served_outlives_its_publication(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    feed.publish(2)
    await _until(lambda: replica.version == Version(2, 0, 2))
    held = pathlib.Path(fleet.servers[0].activations[-1].directory)
    for path in (tmp_path / 'store' / '2').iterdir():
      path.unlink()
    kept = (held / 'config.json').read_text()
    feed.publish(3)
    await _until(lambda: replica.version == Version(3, 0, 3))
    await _until(lambda: not held.exists())
    return kept

  assert _run(tmp_path, use) == '{"number": 2}'


def test_a_server_that_dies_is_replaced_and_serves_the_newest_again(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    feed.publish(2)
    await _until(lambda: replica.version == Version(2, 0, 2))
    fleet.servers[0].crash()
    await _until(lambda: replica.report().starts == 2)
    _, number = await replica.serving(30.0)
    return number, replica.report(), fleet.models

  number, report, models = _run(tmp_path, use)
  assert number == 2
  assert (report.starts, report.failures['down']) == (2, 1)
  # Every server starts with the same view: what the others must look like.
  assert models == ['{"number": 1}'] * 2


def test_a_server_that_failed_a_turn_must_answer_before_it_gets_another(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    client, _ = await replica.serving(30.0)
    fleet.servers[0].answering = False
    replica.doubt(client)
    with pytest.raises(SamplerError, match='no server served'):
      await replica.serving(0.2)
    fleet.servers[0].answering = True
    assert await replica.serving(30.0) == (client, 1)
    # What the client of an earlier server says is not about this one.
    replica.doubt(VllmClient(client._url, limits=_CLIENT, max_connections=1))
    return await replica.serving(0.0) == (client, 1)

  assert _run(tmp_path, use, unanswered_secs=30.0)


def test_a_new_server_goes_back_to_the_last_good_version(tmp_path) -> None:
  """The newest version is refused, and its publication's predecessor is gone from the store."""

  async def use(replica, feed, fleet):
    await replica.start()
    good = feed.publish(2)
    await _until(lambda: replica.version == good)
    bad = feed.publish(3)
    feed.broken |= {good, bad}
    await _until(lambda: replica.report().failures.get('activate'))
    fleet.servers[0].crash()
    await _until(lambda: replica.report().starts == 2 and replica.version is not None)
    return replica.version

  assert _run(tmp_path, use) == Version(2, 0, 2)


def _progress(*, drawn: bool):
  """A script of a turn that is never answered, and keeps its connection alive."""

  async def script(turn):
    number = 0
    while True:
      number += drawn
      await turn.keep_alive(number)
      await asyncio.sleep(0.05)

  return script


def test_a_server_that_makes_no_progress_is_replaced(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    await asyncio.sleep(1.0)  # idle is not hung
    assert replica.report().starts == 1
    client, _ = await replica.serving(30.0)
    with pytest.raises(TurnError):
      await client.generate(_turn())
    await _until(lambda: replica.report().starts == 2)
    return replica.report().last_failure

  failure = _run(tmp_path, use, fleet=_Fleet(_progress(drawn=False)))
  assert '1 turns are in flight and the engine has taken no step' in failure


def test_a_server_that_is_slow_is_not_replaced(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    client, _ = await replica.serving(30.0)
    turn = asyncio.ensure_future(client.generate(_turn()))
    for step in range(12):  # each step far within the bound, all of them beyond it
      await asyncio.sleep(0.25)
      (server,) = fleet.servers
      server.state = dataclasses.replace(server.state, steps=step + 1)
    turn.cancel()
    return replica.report().starts

  assert _run(tmp_path, use, fleet=_Fleet(_progress(drawn=True)), stall_secs=2.5) == 1


def test_a_server_that_does_not_answer_is_replaced(tmp_path, monkeypatch) -> None:
  monkeypatch.setattr('mimo.samplers.vllm.client._STATUS_SECS', 0.2)

  async def use(replica, feed, fleet):
    await replica.start()
    fleet.servers[0].answering = False
    await _until(lambda: replica.report().starts == 2)
    return replica.report().last_failure

  assert 'its state has been unknown' in _run(tmp_path, use)


@pytest.mark.parametrize(
  ('change', 'words'),
  [({'broken': 'half loaded'}, 'it lost its weights'), ({'version': None}, 'it serves None')],
)
def test_a_server_that_lost_its_weights_is_replaced(tmp_path, change, words) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    fleet.servers[0].state = dataclasses.replace(fleet.servers[0].state, **change)
    await _until(lambda: replica.report().starts == 2)
    return replica.report().last_failure

  assert words in _run(tmp_path, use)


def test_an_activation_that_may_have_half_happened_costs_the_server(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    fleet.servers[0].refuse = Failure(Outcome.BROKEN, 'could not be loaded again', None)
    feed.publish(2)
    await _until(lambda: replica.version == Version(2, 0, 2))
    return replica.report().starts

  assert _run(tmp_path, use) == 2


def test_a_server_that_cannot_be_used_is_said_at_start(tmp_path) -> None:
  def check(status):
    raise ValueError("logprob_mode is 'raw_logprobs'")

  async def use(replica, feed, fleet):
    with pytest.raises(SamplerError, match="cannot be used: logprob_mode is 'raw_logprobs'"):
      await replica.start()

  _run(tmp_path, use, check=check)


def test_a_server_that_exits_is_said_at_start(tmp_path) -> None:
  fleet = _Fleet()
  fleet.prepare = lambda server: server._gone.set()

  async def use(replica, feed, fleet):
    with pytest.raises(SamplerError, match=r'exited with status 0; it wrote:\n\(scripted\)'):
      await replica.start()

  _run(tmp_path, use, fleet=fleet)


def test_a_first_version_that_is_refused_is_said_at_start(tmp_path) -> None:
  fleet = _Fleet()

  def prepare(server):
    server.refuse = Failure(Outcome.NOT_ACTIVATED, 'a tensor is missing', None)

  fleet.prepare = prepare

  async def use(replica, feed, fleet):
    with pytest.raises(SamplerError, match=r'version 1 cannot be served: .*a tensor is missing'):
      await replica.start()

  _run(tmp_path, use, fleet=fleet)


def test_pinning(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    old, new = Version(1, 0, 1), feed.publish(2)
    await _until(lambda: replica.version == new)
    await replica.pin(old)
    feed.publish(3)
    await asyncio.sleep(0.1)
    assert (await replica.serving(30.0))[1] == 1
    lost = Version(9, 0, 9)
    feed.broken.add(lost)
    with pytest.raises(SamplerError, match='version 9 cannot be served'):
      await replica.pin(lost)
    assert replica.version == old
    await replica.pin(None)
    await _until(lambda: replica.version == Version(3, 0, 3))

  _run(tmp_path, use)


def test_a_closed_replica_serves_nothing_and_its_server_is_gone(tmp_path) -> None:
  async def use(replica, feed, fleet):
    await replica.start()
    await replica.close()
    await replica.close()
    with pytest.raises(SamplerError, match='closed'):
      await replica.serving(30.0)
    with pytest.raises(SamplerError, match='closed'):
      await replica.start()
    assert fleet.servers[0]._runner is None
    return replica.report().state

  assert _run(tmp_path, use) == 'closed'
