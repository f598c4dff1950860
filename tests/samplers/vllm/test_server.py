"""One real vLLM server with the plugin, over HTTP; slow to start, so all tests share it."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import time

import numpy as np
import pytest

from mimo.samplers.vllm import wire
from mimo.samplers.vllm.launch import ServerSettings, server_command, server_environment
from mimo.samplers.vllm.messages import (
  ACTIVATE_PATH,
  GENERATE_PATH,
  STATUS_PATH,
  Activation,
  Failure,
  Outcome,
  Status,
)
from mimo.types import FinishReason, SamplingParams, Version

pytestmark = pytest.mark.vllm

VOCAB, MAX_TOKENS, START_SECS = 512, 256, 600.0


def activation(directory, number, prefix_cache='keep'):
  contents = {path.name: path.read_bytes() for path in directory.iterdir()}
  files = {name: (hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}
  return Activation(Version(number, 0, number), str(directory), 'bf16', files, prefix_cache)


class Server:
  """Its address, and one call per route."""

  def __init__(self, port):
    self.url = f'http://127.0.0.1:{port}'
    self._count = 0

  @contextlib.asynccontextmanager
  async def client(self):
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
      yield client

  async def status(self, client):
    async with client.get(self.url + STATUS_PATH) as response:
      return Status.decode(await response.read())

  async def activate(self, client, request):
    async with client.post(self.url + ACTIVATE_PATH, data=request.encode()) as response:
      body = await response.read()
      return None if response.status == 200 else Failure.decode(body)

  async def turn(
    self, client, tokens, *, min_version=None, keep_alive_secs=30.0, seed=7, **changes
  ):
    """Returns the messages of the answer, or its failure."""
    values = {
      'temperature': 1.0,
      'top_p': 1.0,
      'top_k': 0,
      'candidates': 128,
      'max_turn_tokens': 16,
      'stop_ids': (),
    }
    self._count += 1
    request = wire.GenerateRequest(
      f'test-{self._count}',
      np.asarray(tokens, np.int32),
      SamplingParams(**(values | changes)),
      7,
      min_version,
      keep_alive_secs,
    )
    reader, messages = wire.FrameReader(), []
    async with client.post(self.url + GENERATE_PATH, data=request.encode()) as response:
      if response.status != 200:
        return Failure.decode(await response.read())
      async for chunk in response.content.iter_any():
        messages += reader.feed(chunk)
    reader.finish()
    return messages


@pytest.fixture(scope='module')
def server(views, tmp_path_factory):
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  settings = ServerSettings(
    model=str(views['bf16', 0]), port=port, max_tokens=MAX_TOKENS, max_sessions=16, cpu_threads=2
  )
  log = tmp_path_factory.mktemp('server') / 'log'
  environment = server_environment(settings, os.environ)
  environment.pop('XLA_FLAGS', None)
  with open(log, 'wb') as file:
    process = subprocess.Popen(
      server_command(settings),
      env=environment,
      stdout=file,
      stderr=file,
      start_new_session=True,
    )
  found = Server(port)

  async def wait():
    import aiohttp

    deadline = time.monotonic() + START_SECS
    async with found.client() as client:
      while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientError):
          assert (await found.status(client)).version is None
          failure = await found.turn(client, [1, 2])
          assert (failure.outcome, failure.served) == (Outcome.NOT_READY, None)
          assert await found.activate(client, activation(views['bf16', 0], 1)) is None
          return
        await asyncio.sleep(0.3)
    pytest.fail(f'the server did not start: {log.read_text()[-4000:]}')

  try:
    asyncio.run(wait())
    yield found
  finally:
    os.killpg(process.pid, signal.SIGTERM)
    try:
      process.wait(30)
    except subprocess.TimeoutExpired:
      os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def _run(server, scenario):
  async def main():
    async with server.client() as client:
      await scenario(client)

  asyncio.run(main())


def test_status(server):
  async def scenario(client):
    status = await server.status(client)
    assert status.logprob_mode == 'processed_logprobs'
    assert (status.logits_dtype, status.kv_cache_dtype) == ('float32', 'bf16')
    assert (status.vocab_size, status.max_tokens, status.max_candidates) == (VOCAB, 256, 128)
    assert status.tested and status.patches == () and status.max_running == 16

  _run(server, scenario)


def test_a_turn(server):
  async def scenario(client):
    (sample,) = await server.turn(client, [1, 2, 3])
    assert len(sample.tokens) == 16 and sample.finish == FinishReason.LENGTH
    assert np.diff(sample.candidates.offsets).tolist() == [128] * 16
    assert not sample.full_support.any()
    for s in range(16):
      ids, logps = sample.candidates.row(s)
      assert len(set(ids.tolist())) == 128
      assert (np.diff(logps) <= 0).all() and np.exp(logps).sum() < 1.0
      at = np.flatnonzero(ids == sample.tokens[s])
      assert len(at) <= 1 and (sample.logps[s] == logps[at]).all()

    stop = int(sample.tokens[4])
    (stopped,) = await server.turn(client, [1, 2, 3], stop_ids=(stop,))
    first = sample.tokens.tolist().index(stop)
    assert stopped.tokens.tolist() == sample.tokens[: first + 1].tolist()
    assert stopped.finish == FinishReason.STOP

  _run(server, scenario)


def test_a_nucleus_is_a_whole_support_unless_the_cap_cuts_it(server):
  async def scenario(client):
    nucleus = {'top_p': 0.9, 'top_k': 64, 'max_turn_tokens': 8}
    (sample,) = await server.turn(client, [4, 5], **nucleus)
    assert sample.full_support.all()
    sizes = np.diff(sample.candidates.offsets)
    assert sizes.max() <= 64
    for s in range(8):
      ids, logps = sample.candidates.row(s)
      np.testing.assert_allclose(np.exp(logps).sum(), 1.0, atol=1e-5)
      assert sample.tokens[s] in ids
    cut = int(sizes.max()) - 1
    (cut_sample,) = await server.turn(client, [4, 5], **nucleus, candidates=cut)
    assert cut_sample.tokens.tolist() == sample.tokens.tolist()
    np.testing.assert_array_equal(cut_sample.full_support, sizes <= cut)

  _run(server, scenario)


def test_greedy_log_probs_are_those_at_temperature_1(server):
  async def scenario(client):
    (sample,) = await server.turn(client, [6, 7], temperature=0.0, max_turn_tokens=1)
    (drawn,) = await server.turn(client, [6, 7], max_turn_tokens=1)
    np.testing.assert_allclose(sample.candidates.row(0)[1], drawn.candidates.row(0)[1], atol=1e-5)
    assert sample.tokens[0] == sample.candidates.row(0)[0][0]

  _run(server, scenario)


def test_a_version_gate(server):
  async def scenario(client):
    served = (await server.status(client)).version.number
    failure = await server.turn(client, [1], min_version=served + 1)
    assert (failure.outcome, failure.served) == (Outcome.STALE, served)
    failure = await server.turn(client, list(range(MAX_TOKENS)))
    assert failure.outcome == Outcome.TOO_LONG

  _run(server, scenario)


def test_a_turn_that_spans_activations_says_so_and_is_kept_alive(server, views):
  async def scenario(client):
    served = (await server.status(client)).version.number
    turns = [
      asyncio.create_task(
        server.turn(client, [i, 1], max_turn_tokens=240, keep_alive_secs=0.05, candidates=8)
      )
      for i in range(8)
    ]
    while (await server.status(client)).running < 8 and not all(turn.done() for turn in turns):
      await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert await server.activate(client, activation(views['bf16', 1], served + 1)) is None
    for messages in await asyncio.gather(*turns):
      sample = messages[-1]
      assert all(isinstance(message, wire.KeepAlive) for message in messages[:-1])
      assert len(messages) > 1
      assert [span.version for span in sample.spans] == [served, served + 1]
      assert sample.spans[0].end == sample.spans[1].start and sample.spans[1].end == 240
    # The first seed's weights again, under a new number: as before, to the bit.
    (other,) = await server.turn(client, [9, 9, 9])
    assert await server.activate(client, activation(views['bf16', 0], served + 2, 'drop')) is None
    (back,) = await server.turn(client, [9, 9, 9], min_version=served + 2)
    assert await server.activate(client, activation(views['bf16', 0], served + 3, 'drop')) is None
    (again,) = await server.turn(client, [9, 9, 9], min_version=served + 3)
    np.testing.assert_array_equal(back.tokens, again.tokens)
    np.testing.assert_array_equal(back.candidates.logps, again.candidates.logps)
    assert (other.candidates.logps != back.candidates.logps).any()

  _run(server, scenario)


@pytest.mark.parametrize('what', ['cut short', 'altered', 'another model'])
def test_a_bad_view_leaves_the_old_version_serving(server, views, tmp_path, what):
  directory = tmp_path / 'view'
  shutil.copytree(views['bf16', 1], directory)
  request = activation(directory, 90)
  shard = directory / 'model.safetensors'
  shard.chmod(0o644)
  if what == 'cut short':
    shard.write_bytes(shard.read_bytes()[:-100])
  elif what == 'altered':
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
  else:
    config = directory / 'config.json'
    config.write_text(
      config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    request = activation(directory, 90)

  async def scenario(client):
    served = (await server.status(client)).version
    (before,) = await server.turn(client, [8, 8])
    failure = await server.activate(client, request)
    assert (failure.outcome, failure.served) == (Outcome.NOT_ACTIVATED, served.number)
    assert (await server.status(client)).version == served
    (after,) = await server.turn(client, [8, 8])
    np.testing.assert_array_equal(before.tokens, after.tokens)

  _run(server, scenario)


def test_a_client_that_hangs_up_has_its_request_aborted(server):
  async def scenario(client):
    turn = asyncio.create_task(server.turn(client, [3, 3], max_turn_tokens=250, candidates=1))
    while (await server.status(client)).running < 1:
      await asyncio.sleep(0.01)
    tokens = (await server.status(client)).tokens
    turn.cancel()
    await asyncio.sleep(1.0)
    status = await server.status(client)
    assert (status.tokens < tokens + 240 and not turn.done()) or turn.cancelled()
    later = await server.status(client)
    assert later.tokens == status.tokens

  _run(server, scenario)
