"""Routes that a real vLLM server tells, against the router's choice in a full forward of mimo's.

vLLM has them in a model runner whose kernels are Triton's. On CPU these run in Triton's
interpreter, which computes the same with numpy.
"""

import asyncio
import contextlib
import hashlib
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import chosen_experts, init
from mimo.models.moe import route_shape
from mimo.models.table import named_tensors
from mimo.rollouts.contract import check_routes
from mimo.samplers.vllm.client import ClientLimits, TurnError, VllmClient
from mimo.samplers.vllm.internals.scheduler import BLOCK_TOKENS
from mimo.samplers.vllm.launch import MOE_RELOAD, ServerSettings, server_command, server_environment
from mimo.samplers.vllm.messages import Activation
from mimo.samplers.vllm.process import ServerProcess, free_port
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import SamplingParams, Version
from mimo.weights.views import ViewSpec, write_view

pytestmark = pytest.mark.vllm

VOCAB, MAX_TOKENS, SECS = 128, 512, 300.0
# vLLM takes Triton to be usable on CPU where it has a backend of that name; the interpreter needs
# no backend. Every process of the server must find it so before it imports vLLM.
SITE = """
import types
import triton.backends

driver = types.SimpleNamespace(is_active=lambda: False)
triton.backends.backends['cpu'] = types.SimpleNamespace(driver=driver, compiler=None)
"""


@pytest.fixture(scope='module')
def model():
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3_moe',
      'architectures': ['Qwen3MoeForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 64,
      'intermediate_size': 128,
      'moe_intermediate_size': 64,
      'num_experts': 8,
      'num_experts_per_tok': 2,
      'norm_topk_prob': True,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
      'num_hidden_layers': 3,
      'num_attention_heads': 2,
      'num_key_value_heads': 1,
      'head_dim': 32,
      'rms_norm_eps': 1e-6,
      'rope_theta': 1e4,
      'tie_word_embeddings': True,
      'max_position_embeddings': 1024,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


@pytest.fixture(scope='module')
def policies(model, tmp_path_factory):
  """(view directory, the weights in it) of two seeds."""
  made = []
  for seed in range(2):
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), init(model, jax.random.key(seed)))
    view = tmp_path_factory.mktemp(f'view{seed}')
    write_view(view, model, named_tensors(model, params), ViewSpec('bf16'), tokenizer_files={})
    made.append((view, jax.tree.map(lambda x: x.astype(jnp.float32), params)))
  return made


@pytest.fixture(scope='module')
def chosen(model):
  """(params, ids [T]) -> [T, L, k], each layer's in rising order."""
  run = jax.jit(lambda *args: chosen_experts(model, *args))

  def choose(params, ids):
    row = np.zeros((1, MAX_TOKENS), np.int32)
    row[0, : len(ids)] = ids
    segments = (np.arange(MAX_TOKENS) < len(ids)).astype(np.int32)[None]
    found = run(params, row, segments, np.arange(MAX_TOKENS)[None])
    return np.sort(np.asarray(found)[0, : len(ids)])

  return choose


@pytest.fixture(scope='module')
def server(policies, tmp_path_factory):
  """(a runner, the address of a server of the first policy)."""
  root = tmp_path_factory.mktemp('server')
  (root / 'sitecustomize.py').write_text(SITE)
  settings = ServerSettings(
    str(policies[0][0]),
    free_port('127.0.0.1'),
    max_tokens=MAX_TOKENS,
    max_sessions=4,
    max_candidates=8,
    cpu_threads=1,
    patches=(MOE_RELOAD,),
    routes=True,
  )
  base = {name: value for name, value in os.environ.items() if not name.startswith(('JAX', 'XLA'))}
  environment = server_environment(settings, base)
  environment |= {'TRITON_INTERPRET': '1', 'PYTHONPATH': str(root)}
  url = f'http://127.0.0.1:{settings.port}'
  with asyncio.Runner() as runner:
    process = runner.run(
      ServerProcess.start(
        server_command(settings), url=url, log=root / 'server.log', environment=environment
      )
    )
    try:
      runner.run(_until_up(url, process))
      yield runner, url
    finally:
      runner.run(process.stop())


def _activation(view: pathlib.Path, number: int, prefix_cache: str = 'keep') -> Activation:
  contents = {path.name: path.read_bytes() for path in view.iterdir()}
  files = {name: (hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}
  return Activation(Version(number, 0, number), str(view), 'bf16', files, prefix_cache)


async def _until_up(url: str, process: ServerProcess) -> None:
  client = VllmClient(url, limits=ClientLimits(), max_connections=1)
  gone = asyncio.ensure_future(process.wait())
  try:
    async with asyncio.timeout(SECS):
      while not gone.done():
        with contextlib.suppress(TurnError):
          await client.status()
          return
        await asyncio.sleep(0.3)
  except TimeoutError:
    pass
  finally:
    gone.cancel()
    await client.close()
  pytest.fail(f'the server did not start: {process.tail()}')


def _run(server, scenario):
  """Runs `scenario(client)`, which fails by name where it would wait for ever."""
  runner, url = server

  async def bounded():
    client = VllmClient(url, limits=ClientLimits(keep_alive_secs=0.2), max_connections=4)
    try:
      async with asyncio.timeout(SECS):
        return await scenario(client)
    finally:
      await client.close()

  return runner.run(bounded())


def _request(name, tokens, turn_tokens, *, routes_from=None):
  sampling = SamplingParams(1.0, 1.0, 0, 8, turn_tokens, ())
  tokens = np.array(tokens, np.int32)
  return GenerateRequest(name, tokens, sampling, 11, None, 0.2, routes_from)


def test_turns_tell_the_routes_of_what_was_run(server, policies, model, chosen):
  """A turn in several blocks, then one that goes on from it, most of whose prompt is cached."""
  prompt = np.random.default_rng(0).integers(0, VOCAB, 40)

  async def scenario(client):
    assert (await client.status()).routes == route_shape(model)
    await client.activate(_activation(policies[0][0], 1))
    first = await client.generate(_request('a', prompt, 2 * BLOCK_TOKENS + 9, routes_from=0))
    tokens = np.concatenate([prompt, first.tokens, [5, 6, 7]])
    held = len(prompt) + len(first.tokens)
    second = await client.generate(_request('b', tokens, 12, routes_from=held - 1))
    silent = await client.generate(_request('c', tokens, 4))
    return first, held, second, np.concatenate([tokens, second.tokens]), silent

  first, held, second, tokens, silent = _run(server, scenario)
  check_routes(first.routes, route_shape(model), start=0, end=held - 1)
  check_routes(second.routes, route_shape(model), start=held - 1, end=len(tokens) - 1)
  assert silent.routes is None
  expected = chosen(policies[0][1], tokens)
  got = np.sort(np.concatenate([first.routes.ids, second.routes.ids]))
  np.testing.assert_array_equal(got, expected[:-1])
  assert (got != expected[1:]).mean() > 0.2  # a shift by one would be seen


@pytest.mark.parametrize('prefix_cache', ['keep', 'drop'])
def test_routes_of_a_turn_under_two_versions(server, policies, model, chosen, prefix_cache):
  """What was run under the first weights keeps its routes."""
  prompt = np.random.default_rng(1).integers(0, VOCAB, 20)

  async def scenario(client):
    await client.activate(_activation(policies[0][0], 10 if prefix_cache == 'keep' else 20))
    turn = asyncio.ensure_future(client.generate(_request('v', prompt, 300, routes_from=0)))
    while (await client.status()).running == 0:
      await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    number = 11 if prefix_cache == 'keep' else 21
    await client.activate(_activation(policies[1][0], number, prefix_cache))
    return await turn

  turn = _run(server, scenario)
  assert len(turn.spans) == 2
  tokens = np.concatenate([prompt, turn.tokens])
  check_routes(turn.routes, route_shape(model), start=0, end=len(tokens) - 1)
  got, ran = np.sort(turn.routes.ids), len(prompt) + turn.spans[0].end - 1
  np.testing.assert_array_equal(got[:ran], chosen(policies[0][1], tokens)[:ran])
  assert (got[:ran] != chosen(policies[1][1], tokens)[:ran]).any()
  if prefix_cache == 'drop':
    np.testing.assert_array_equal(got[ran:], chosen(policies[1][1], tokens)[ran:-1])


def test_a_cached_prompt_has_the_routes_of_the_pass_that_cached_it(server, policies, model, chosen):
  """Of its first block, which is 128 tokens on CPU; the rest is run again."""
  prompt = np.random.default_rng(3).integers(0, VOCAB, 150)

  async def scenario(client):
    await client.activate(_activation(policies[0][0], 30))
    await client.generate(_request('old', prompt, 3, routes_from=0))
    await client.activate(_activation(policies[1][0], 31))
    return await client.generate(_request('new', prompt, 3, routes_from=0))

  turn = _run(server, scenario)
  check_routes(turn.routes, route_shape(model), start=0, end=152)
  got = np.sort(turn.routes.ids)
  np.testing.assert_array_equal(got[:128], chosen(policies[0][1], prompt)[:128])
  assert (got[:128] != chosen(policies[1][1], prompt)[:128]).any()


def test_the_stock_route_tells_the_same(server, policies):
  prompt = np.random.default_rng(2).integers(0, VOCAB, 20)

  async def scenario(client):
    number = (await client.status()).version.number + 1
    await client.activate(_activation(policies[0][0], number))
    packed = await client.generate(_request('p', prompt, 12, routes_from=3))
    stock = VllmClient(server[1], limits=ClientLimits(), max_connections=1, packed=False)
    try:
      return packed, await stock.generate(_request('s', prompt, 12, routes_from=3))
    finally:
      await stock.close()

  packed, stock = _run(server, scenario)
  np.testing.assert_array_equal(packed.tokens, stock.tokens)
  assert packed.routes.start == stock.routes.start == 3
  np.testing.assert_array_equal(packed.routes.ids, stock.routes.ids)
