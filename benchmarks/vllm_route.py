"""The plugin's route beside vLLM's own routes, on one server in one run.

    python benchmarks/vllm_route.py [--requests=64] [--tokens=64] [--candidates=128] [--repeats=3]
        [--short] [--unpatched]

Starts one bf16 server of a tiny Qwen3 (2 layers, hidden 64, vocabulary 512) with a tokenizer and
the patch `fast_topk`, as `mimo` starts those on CPU; `--unpatched` leaves vLLM its own topk. Sends
`requests` concurrent turns of `tokens` tokens through each route, round by round, and prints a
Markdown table: the best of all rounds in tokens per second, the bytes of an answer per token, and
the CPU time per token of the client, decoding into arrays included, and of the server. The ratios
below it are those of the best rounds, and the median of those within each round, which says more
where other work shares the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from mimo.models.config import ModelConfig
from mimo.models.decoder import init
from mimo.models.table import named_tensors
from mimo.samplers.vllm import launch, wire
from mimo.samplers.vllm.messages import ACTIVATE_PATH, GENERATE_PATH, STATUS_PATH, Activation
from mimo.types import SamplingParams, Version
from mimo.weights.views import ViewSpec, write_view

VOCAB, PROMPT = 512, 16
START_SECS = 600.0

# A route sends one request and returns (tokens, bytes of the answer).
Route = Callable[[aiohttp.ClientSession, int], Awaitable[tuple[int, int]]]


def make_view(directory: pathlib.Path) -> Activation:
  """Writes the view and returns what activates it."""
  config = ModelConfig.from_hf(
    {
      'model_type': 'qwen3',
      'architectures': ['Qwen3ForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 64,
      'intermediate_size': 128,
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 32,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1e4,
      'tie_word_embeddings': True,
      'max_position_embeddings': 512,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )
  words = {f'w{i}': i for i in range(VOCAB)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='w0'))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'unk_token': 'w0', 'eos_token': 'w1'}
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(config, jax.random.key(0)))
  write_view(
    directory,
    config,
    named_tensors(config, params),
    ViewSpec('bf16'),
    tokenizer_files={
      'tokenizer.json': tokenizer.to_str().encode(),
      'tokenizer_config.json': json.dumps(settings).encode(),
    },
  )
  contents = {path.name: path.read_bytes() for path in directory.iterdir()}
  files = {name: (hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}
  return Activation(Version(1, 0, 0), str(directory), 'bf16', files, 'keep')


def packed(url: str, sampling: SamplingParams) -> Route:
  """The plugin's route."""

  async def send(client: aiohttp.ClientSession, index: int) -> tuple[int, int]:
    name = f'{time.monotonic_ns()}-{index}'
    request = wire.GenerateRequest(name, _prompt(index), sampling, None, 1, 30.0)
    async with client.post(url + GENERATE_PATH, data=request.encode()) as response:
      body = await response.read()
      assert response.status == 200, body
    reader = wire.FrameReader()
    sample = reader.feed(body)[-1]
    reader.finish()
    assert not isinstance(sample, wire.KeepAlive) and hasattr(sample, 'tokens'), sample
    return len(sample.tokens), len(body)

  return send


def completions(url: str, tokens: int, logprobs: int | None) -> Route:
  """vLLM's completions route, which takes ids; candidates are read into arrays."""

  async def send(client: aiohttp.ClientSession, index: int) -> tuple[int, int]:
    body: dict[str, object] = {
      'prompt': _prompt(index).tolist(),
      'max_tokens': tokens,
      'temperature': 1.0,
      'ignore_eos': True,
      'return_token_ids': True,
    }
    if logprobs is not None:
      body |= {'logprobs': logprobs, 'return_tokens_as_token_ids': True}
    async with client.post(url + '/v1/completions', json=body) as response:
      raw = await response.read()
      assert response.status == 200, raw[:500]
    choice = json.loads(raw)['choices'][0]
    if logprobs:
      for row in choice['logprobs']['top_logprobs']:
        np.fromiter((int(name.rsplit(':', 1)[1]) for name in row), np.int32, len(row))
        np.fromiter(row.values(), np.float32, len(row))
    return len(choice['token_ids']), len(raw)

  return send


def generate(url: str, tokens: int, logprobs: int | None) -> Route:
  """vLLM's token-in, token-out route; candidates are read into arrays."""

  async def send(client: aiohttp.ClientSession, index: int) -> tuple[int, int]:
    sampling: dict[str, object] = {'max_tokens': tokens, 'temperature': 1.0, 'ignore_eos': True}
    if logprobs is not None:
      sampling['logprobs'] = logprobs
    body = {'token_ids': _prompt(index).tolist(), 'sampling_params': sampling}
    async with client.post(url + '/inference/v1/generate', json=body) as response:
      raw = await response.read()
      assert response.status == 200, raw[:500]
    choice = json.loads(raw)['choices'][0]
    if logprobs:
      for entry in choice['logprobs']['content']:
        np.fromiter((top['logprob'] for top in entry['top_logprobs']), np.float32)
    return len(choice['token_ids']), len(raw)

  return send


class Tally:
  """A route's rounds."""

  def __init__(self, route: Route):
    self.route = route
    self.rates: list[float] = []
    self.size, self.cpu, self.server_cpu = 0.0, float('inf'), float('inf')

  @property
  def rate(self) -> float:
    return max(self.rates)

  async def round(self, client: aiohttp.ClientSession, requests: int, group: int) -> None:
    """Sends the requests at the same time."""
    start, start_cpu, start_server = time.perf_counter(), time.process_time(), _group_cpu(group)
    answers = await asyncio.gather(*(self.route(client, index) for index in range(requests)))
    secs, cpu_secs = time.perf_counter() - start, time.process_time() - start_cpu
    tokens = sum(count for count, _ in answers)
    self.rates.append(tokens / secs)
    self.cpu = min(self.cpu, cpu_secs / tokens)
    self.server_cpu = min(self.server_cpu, (_group_cpu(group) - start_server) / tokens)
    self.size = sum(count for _, count in answers) / tokens


def _group_cpu(group: int) -> float:
  """Returns the CPU seconds that a process group has used so far."""
  ticks = 0
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rsplit(')', 1)[1].split()
    except OSError:
      continue  # it ended meanwhile
    if int(fields[2]) == group:
      ticks += int(fields[11]) + int(fields[12])
  return ticks / os.sysconf('SC_CLK_TCK')


def _prompt(index: int) -> np.ndarray:
  return np.random.default_rng(index).integers(2, VOCAB, PROMPT, dtype=np.int32)


async def run(url: str, activation: Activation, options: argparse.Namespace, group: int) -> None:
  """Waits for the server, activates the view, measures each route and prints the table."""
  await start(url, activation)
  k, tokens = options.candidates, options.tokens
  sampling = lambda candidates: SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    candidates=candidates,
    max_turn_tokens=tokens,
    stop_ids=(),
  )
  routes = {
    'completions, no log-probs': completions(url, tokens, None),
    f'plugin, K = {k}': packed(url, sampling(k)),
    'plugin, K = 1': packed(url, sampling(1)),
    'completions, logprobs = 1': completions(url, tokens, 1),
    f'completions, logprobs = {k}': completions(url, tokens, k),
    'generate, no log-probs': generate(url, tokens, None),
    f'generate, logprobs = {k}': generate(url, tokens, k),
  }
  if options.short:
    routes = dict(list(routes.items())[:3])
  found = {name: Tally(route) for name, route in routes.items()}
  async with aiohttp.ClientSession(
    connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(600)
  ) as client:
    for _ in range(options.repeats + 1):  # all routes in each: a busy machine is so to all
      for tally in found.values():
        await tally.round(client, options.requests, group)
  print('| route | tokens/s | bytes/token | client CPU, us/token | server CPU, us/token |')
  print('|---|---|---|---|---|')
  for name, tally in found.items():
    cpu = f'{1e6 * tally.cpu:,.0f} | {1e6 * tally.server_cpu:,.0f}'
    print(f'| {name} | {tally.rate:,.0f} | {tally.size:,.0f} | {cpu} |')
  names = list(routes)
  plugin = found[names[1]]
  print(f'plugin / no log-probs: {_ratio(plugin, found[names[0]])} (at least 0.75)')
  if not options.short:
    print(f'plugin / completions with {k}: {_ratio(plugin, found[names[4]])} (at least 5)')


def _ratio(one: Tally, other: Tally) -> str:
  pairs = zip(one.rates[1:], other.rates[1:], strict=True)  # the first round warms up
  middle = statistics.median(first / second for first, second in pairs)
  return f'{one.rate / other.rate:.2f}, median of rounds {middle:.2f}'


async def start(url: str, activation: Activation) -> None:
  """Returns once the server serves the view."""
  deadline = time.monotonic() + START_SECS
  async with aiohttp.ClientSession() as client:
    while True:
      try:
        async with client.get(url + STATUS_PATH) as response:
          if response.status == 200:
            break
      except aiohttp.ClientError:
        pass
      assert time.monotonic() < deadline, 'the server did not start'
      await asyncio.sleep(0.5)
    async with client.post(url + ACTIVATE_PATH, data=activation.encode()) as response:
      assert response.status == 200, await response.read()


def main() -> None:
  """Starts a server, measures and stops it."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--requests', type=int, default=64)
  parser.add_argument('--tokens', type=int, default=64)
  parser.add_argument('--candidates', type=int, default=128)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--short', action='store_true', help='only the plugin and no log-probs')
  parser.add_argument('--unpatched', action='store_true', help='vLLM with its own topk')
  options = parser.parse_args()
  with socket.socket() as probe:
    probe.bind(('127.0.0.1', 0))
    port = probe.getsockname()[1]
  with tempfile.TemporaryDirectory() as root:
    view = pathlib.Path(root, 'view')
    activation = make_view(view)
    settings = launch.ServerSettings(
      model=str(view),
      port=port,
      max_tokens=256,
      max_sessions=options.requests,
      max_candidates=options.candidates,
      patches=() if options.unpatched else (launch.FAST_TOPK,),
      tokenizer=True,
    )
    with open(pathlib.Path(root, 'server.log'), 'wb') as log:
      server = subprocess.Popen(
        launch.server_command(settings),
        env=launch.server_environment(settings, os.environ),
        stdout=log,
        stderr=log,
        start_new_session=True,
      )
      try:
        asyncio.run(run(f'http://127.0.0.1:{port}', activation, options, server.pid))
      finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


if __name__ == '__main__':
  main()
