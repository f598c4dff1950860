"""One real vLLM server with the plugin, over HTTP; slow to start, so all tests share it."""

import asyncio
import contextlib
import hashlib
import os
import shutil

import numpy as np
import pytest

from mimo.samplers.vllm import wire
from mimo.samplers.vllm.launch import FAST_TOPK, ServerSettings, server_command, server_environment
from mimo.samplers.vllm.messages import (
  ACTIVATE_PATH,
  GENERATE_PATH,
  STATUS_PATH,
  Activation,
  Failure,
  Outcome,
  Status,
)
from mimo.samplers.vllm.process import ServerProcess, free_port
from mimo.types import FinishReason, SamplingParams, Version

pytestmark = pytest.mark.vllm

VOCAB, MAX_TOKENS, START_SECS, TEST_SECS = 512, 2048, 300.0, 240.0
LONG = 1000  # tokens of a turn that something happens in
# Where this process is slow, a turn may end before what is to happen in it: then it is tried again.
TRIES = 8


def activation(directory, number, prefix_cache='keep'):
  contents = {path.name: path.read_bytes() for path in directory.iterdir()}
  files = {name: (hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}
  return Activation(Version(number, 0, number), str(directory), 'bf16', files, prefix_cache)


class Server:
  """Its address, and one call per route."""

  def __init__(self, url, runner):
    self.url = url
    self._runner = runner
    self._count = 0

  def run(self, scenario, secs=TEST_SECS):
    """Runs `scenario(client)`, which fails by name where it would wait for ever."""

    async def main():
      async with asyncio.timeout(secs), self.client() as client:
        return await scenario(client)

    return self._runner.run(main())

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
    self, client, tokens, *, min_version=None, keep_alive_secs=30.0, on_message=None, **changes
  ):
    """Returns the messages of the answer, or its failure. Each goes to `on_message` as it comes."""
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
        for message in reader.feed(chunk):
          messages.append(message)
          if on_message is not None:
            on_message(message)
    reader.finish()
    return messages

  def begin(self, client, tokens, **changes):
    """Returns a task that draws a long turn, and an event: some of it is drawn, or it ended."""
    begun = asyncio.Event()

    def on_message(message):
      if not isinstance(message, wire.KeepAlive) or message.tokens > 0:
        begun.set()

    turn = self.turn(
      client,
      tokens,
      max_turn_tokens=LONG,
      keep_alive_secs=0.02,
      candidates=8,
      on_message=on_message,
      **changes,
    )
    task = asyncio.ensure_future(turn)
    task.add_done_callback(lambda _: begun.set())  # one that failed is not waited for
    return task, begun


@pytest.fixture(scope='module')
def server(views, tmp_path_factory):
  settings = ServerSettings(
    model=str(views['bf16', 0]),
    port=free_port('127.0.0.1'),
    max_tokens=MAX_TOKENS,
    max_sessions=16,
    patches=(FAST_TOPK,),
    cpu_threads=1,  # two would wait for each other where other processes want the cores
  )
  environment = server_environment(settings, os.environ)
  environment.pop('XLA_FLAGS', None)
  with asyncio.Runner() as runner:
    found = Server(f'http://127.0.0.1:{settings.port}', runner)
    process = runner.run(
      ServerProcess.start(
        server_command(settings),
        url=found.url,
        log=tmp_path_factory.mktemp('server') / 'log',
        environment=environment,
      )
    )

    async def until_up(client):
      import aiohttp

      gone = asyncio.ensure_future(process.wait())
      while not gone.done():
        with contextlib.suppress(aiohttp.ClientError):
          return await found.status(client)
        await asyncio.sleep(0.3)
      pytest.fail(f'the server did not start: {process.tail()}')

    async def first(client):
      assert (await until_up(client)).version is None
      failure = await found.turn(client, [1, 2])
      assert (failure.outcome, failure.served) == (Outcome.NOT_READY, None)
      assert await found.activate(client, activation(views['bf16', 0], 1)) is None

    try:
      try:
        found.run(first, START_SECS)
      except TimeoutError:
        pytest.fail(f'the server did not start within {START_SECS} s: {process.tail()}')
      yield found
    finally:
      runner.run(process.stop())


def test_status(server):
  async def scenario(client):
    status = await server.status(client)
    assert status.logprob_mode == 'processed_logprobs'
    assert (status.logits_dtype, status.kv_cache_dtype) == ('float32', 'bf16')
    assert (status.vocab_size, status.max_tokens, status.max_candidates) == (VOCAB, MAX_TOKENS, 128)
    assert status.tested and status.patches == (FAST_TOPK,) and status.max_running == 16

  server.run(scenario)


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

  server.run(scenario)


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

  server.run(scenario)


def test_greedy_log_probs_are_those_at_temperature_1(server):
  async def scenario(client):
    (sample,) = await server.turn(client, [6, 7], temperature=0.0, max_turn_tokens=1)
    (drawn,) = await server.turn(client, [6, 7], max_turn_tokens=1)
    np.testing.assert_allclose(sample.candidates.row(0)[1], drawn.candidates.row(0)[1], atol=1e-5)
    assert sample.tokens[0] == sample.candidates.row(0)[0][0]

  server.run(scenario)


def test_a_version_gate(server):
  async def scenario(client):
    served = (await server.status(client)).version.number
    failure = await server.turn(client, [1], min_version=served + 1)
    assert (failure.outcome, failure.served) == (Outcome.STALE, served)
    failure = await server.turn(client, [1] * MAX_TOKENS)
    assert failure.outcome == Outcome.TOO_LONG

  server.run(scenario)


def test_turns_that_span_an_activation_say_so_and_are_kept_alive(server, views):
  async def attempt(client, number):
    """Activates a version once every turn has begun. Returns whether all ended after that."""
    turns, begun = zip(*(server.begin(client, [i, 1]) for i in range(4)), strict=True)
    for event in begun:
      await event.wait()
    failure = await server.activate(client, activation(views['bf16', number % 2], number))
    assert failure is None
    spanned = 0
    for messages in await asyncio.gather(*turns):
      assert not isinstance(messages, Failure), messages
      *before, sample = messages
      assert all(isinstance(message, wire.KeepAlive) for message in before)
      drawn = [message.tokens for message in before]
      assert drawn == sorted(drawn) and all(tokens <= LONG for tokens in drawn)
      spans = sample.spans
      assert len(sample.tokens) == LONG
      assert (spans[0].start, spans[-1].end) == (0, LONG)
      assert [span.version for span in spans] in ([number - 1], [number - 1, number])
      if len(spans) == 2:
        # What was drawn when the activation was asked for is of the version before.
        assert next(tokens for tokens in drawn if tokens) <= spans[0].end == spans[1].start < LONG
        spanned += 1
    return spanned == len(turns)

  async def scenario(client):
    served = (await server.status(client)).version.number
    for number in range(served + 1, served + 1 + TRIES):
      if await attempt(client, number):
        return
    pytest.fail(f'turns of {LONG} tokens ended before an activation, {TRIES} times')

  server.run(scenario)


def test_the_same_weights_again_draw_the_same_to_the_bit(server, views):
  async def scenario(client):
    number = (await server.status(client)).version.number
    drawn = []
    for seed in (0, 1, 0, 0):
      number += 1
      assert await server.activate(client, activation(views['bf16', seed], number, 'drop')) is None
      (sample,) = await server.turn(client, [9, 9, 9], min_version=number)
      drawn.append(sample)
    first, other, *again = drawn
    for sample in again:
      np.testing.assert_array_equal(sample.tokens, first.tokens)
      np.testing.assert_array_equal(sample.candidates.logps, first.candidates.logps)
    assert (other.candidates.logps != first.candidates.logps).any()

  server.run(scenario)


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

  server.run(scenario)


def test_a_client_that_hangs_up_has_its_request_aborted(server):
  async def attempt(client):
    """Returns how many tokens of a turn were drawn in all, where its client hung up."""
    before = (await server.status(client)).tokens
    turn, begun = server.begin(client, [3, 3])
    await begun.wait()
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    others, idle = 0, False
    while not idle:  # until nothing but a turn of 200 tokens is drawn meanwhile
      tokens = (await server.status(client)).tokens
      await server.turn(client, [4, 4], max_turn_tokens=200)
      others += 200
      idle = (await server.status(client)).tokens == tokens + 200
    return (await server.status(client)).tokens - before - others

  async def scenario(client):
    for _ in range(TRIES):
      drawn = await attempt(client)
      assert 0 < drawn <= LONG
      if drawn < LONG:
        return
    pytest.fail(f'all {LONG} tokens were drawn of turns whose client had hung up, {TRIES} times')

  server.run(scenario)
