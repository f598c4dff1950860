"""Tiny models that vLLM serves on CPU: as views of two seeds in each format that it runs there, and
behind a sampler whose server the tests break."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.config import ModelConfig
from mimo.models.decoder import init
from mimo.models.table import named_tensors
from mimo.rollouts import contract as rules
from mimo.samplers.base import SamplerContract
from mimo.samplers.vllm.client import ClientLimits, VllmClient
from mimo.samplers.vllm.launch import ServerSettings, server_command, server_environment
from mimo.samplers.vllm.messages import Status
from mimo.samplers.vllm.process import ServerProcess, free_port
from mimo.samplers.vllm.replica import Replica
from mimo.samplers.vllm.sampler import RetryLimits, VllmSampler, check_status
from mimo.samplers.vllm.watch import ReplicaLimits
from mimo.types import SamplingParams, Source, TurnSample, Version
from mimo.weights.calibration import calibrate
from mimo.weights.publication import Publisher, Snapshot, ViewFollower
from mimo.weights.store import Blob, FileStore
from mimo.weights.views import ViewSpec, write_view

VOCAB = 512
MAX_POSITIONS = 2048


@pytest.fixture(scope='session')
def config():
  return ModelConfig.from_hf(
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
      'max_position_embeddings': MAX_POSITIONS,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


def _params(config, seed):
  """Norm weights as a trained model's: all ones leave many values exactly between two codes."""
  leaves, structure = jax.tree.flatten_with_path(init(config, jax.random.key(seed)))
  keys = jax.random.split(jax.random.key(100 + seed), len(leaves))
  out = []
  for key, (path, x) in zip(keys, leaves, strict=True):
    name = jax.tree_util.keystr(path)
    if 'norm' in name:
      x = x * jnp.exp(0.3 * jax.random.normal(key, x.shape))
    elif 'embed' in name:
      x = x * 8.0  # neither a flat distribution nor a point
    out.append(x)
  return jax.tree.unflatten(structure, out)


@pytest.fixture(scope='session')
def views(config, tmp_path_factory):
  """(format, seed) -> view directory, for seeds 0 and 1."""
  root = tmp_path_factory.mktemp('views')
  sequences = np.random.default_rng(1).integers(0, VOCAB, (8, 48), dtype=np.int32)
  scales = calibrate(config, _params(config, 0), list(sequences))
  found = {}
  for seed in (0, 1):
    snapshot = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params(config, seed))
    for name in ('bf16', 'fp8_channel', 'nvfp4_w4a4'):
      found[name, seed] = root / f'{name}_{seed}'
      write_view(
        found[name, seed],
        config,
        named_tensors(config, snapshot),
        ViewSpec(name, input_scales=scales if name == 'nvfp4_w4a4' else None),
        tokenizer_files={},
      )
  return found


RIG_MODEL = {
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
  'max_position_embeddings': 4096,
  'hidden_act': 'silu',
  'attention_bias': False,
}
_CONTRACT = SamplerContract(
  source=Source('cpu', 'CPU', 'bf16', 'bf16'),
  logprob_mode='processed',
  logits_dtype='float32',
  vocab_size=128,
  max_tokens=4096,
  prefix_cache='keep',
  max_sessions=8,
)
_CANDIDATES = 16


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


class Rig:
  """A store, a sampler over one real server, and the loop that they run on.

  What waits here is bounded: a test fails by name where it would wait for ever.
  """

  client_limits = ClientLimits(keep_alive_secs=0.5, silence_secs=60.0, stall_secs=120.0)
  # A step takes milliseconds; what has taken none for so long has stopped for good.
  limits = ReplicaLimits(start_secs=300.0, stall_secs=15.0, unanswered_secs=10.0)
  prompt = np.array([5, 6, 7, 8], np.int32)
  params = SamplingParams(1.0, 0.97, 8, _CANDIDATES, 24, ())

  def __init__(self, root: pathlib.Path, runner: asyncio.Runner) -> None:
    self.root = root
    self._runner = runner
    self.config = ModelConfig.from_hf(RIG_MODEL)
    self._weights = init(self.config, jax.random.key(0))
    store = FileStore(root / 'store')
    self._publisher = Publisher(store, self.config, {}, {'bf16': ViewSpec('bf16')}, 0)
    self._update = 0
    self.feed = _Feed(ViewFollower(store, 'bf16'))
    self.processes: list[ServerProcess] = []
    self.feed.newest = self.publish(1.0)
    self.replica = Replica(
      self.feed,
      self._launch,
      name='cpu',
      format='bf16',
      prefix_cache='keep',
      directory=root / 'replica',
      check=lambda status: check_status(status, _CONTRACT, candidates=_CANDIDATES),
      new_client=lambda url: VllmClient(url, limits=self.client_limits, max_connections=8),
      limits=self.limits,
    )
    self.sampler = VllmSampler(
      self.replica,
      _CONTRACT,
      limits=self.client_limits,
      retry=RetryLimits(recovery_secs=300.0),
    )

  @staticmethod
  def settings(model: pathlib.Path) -> ServerSettings:
    return ServerSettings(
      str(model),
      free_port('127.0.0.1'),
      max_tokens=_CONTRACT.max_tokens,
      max_sessions=_CONTRACT.max_sessions,
      max_candidates=_CANDIDATES,
      cpu_threads=1,
    )

  async def _launch(self, model: pathlib.Path) -> ServerProcess:
    settings = self.settings(model)
    process = await ServerProcess.start(
      server_command(settings),
      url=f'http://127.0.0.1:{settings.port}',
      log=self.root / 'server.log',
      environment=server_environment(settings, server_base()),
    )
    self.processes.append(process)
    return process

  def run(self, work, secs: float = 400.0):
    async def bounded():
      async with asyncio.timeout(secs):
        return await work

    return self._runner.run(bounded())

  def snapshot(self, scale: float) -> Snapshot:
    """The policy, its weights times a number."""
    return Snapshot(self.config, jax.tree.map(lambda x: x * scale, self._weights))

  def publish(self, scale: float) -> Version:
    """Publishes that; nobody is told."""
    self._update += 1
    return self._publisher.publish(self._update, self.snapshot(scale))

  def publisher(self, store: FileStore, config: ModelConfig) -> Publisher:
    """Publishes elsewhere, in numbers that are new here."""
    assert self.feed.newest is not None
    store.swap('counter', None, str(100 + self.feed.newest.number))
    return Publisher(store, config, {}, {'bf16': ViewSpec('bf16')}, 0)

  def directory(self, version: Version) -> pathlib.Path:
    return self.feed.locate(version)[0]

  async def status(self) -> Status:
    """What the server says of itself, asked past the replica."""
    client = VllmClient(self.processes[-1].url, limits=self.client_limits, max_connections=1)
    try:
      return await client.status()
    finally:
      await client.close()

  async def turn(self, name: str, **changes) -> TurnSample:
    """Draws one turn, always of the same prompt, parameters and key, and checks it."""
    params = dataclasses.replace(self.params, **changes)
    try:
      sample = await self.sampler.sample(name, self.prompt, params, np.array([3, 4], np.uint32))
    finally:
      await self.sampler.release(name)
    rules.check_turn(sample, params)
    rules.check_streams(
      sample.tokens,
      sample.logps,
      sample.candidates,
      sample.full_support,
      vocab_size=_CONTRACT.vocab_size,
      max_candidates=_CANDIDATES,
    )
    return sample


def server_base() -> dict[str, str]:
  """Returns the environment without the devices that tests simulate, which are JAX's alone."""
  return {name: value for name, value in os.environ.items() if not name.startswith(('JAX', 'XLA'))}


@pytest.fixture(scope='session')
def rig(tmp_path_factory) -> Iterator[Rig]:
  with asyncio.Runner() as runner:
    made = Rig(tmp_path_factory.mktemp('rig'), runner)
    try:
      made.run(made.sampler.start(), 400.0)
      yield made
    finally:
      made.run(made.sampler.close())


@pytest.fixture
def small_disk(tmp_path) -> Iterator[pathlib.Path]:
  """A file system of 1 MiB and 200 files, which really fills up."""
  path = tmp_path / 'disk'
  path.mkdir()
  command = ['mount', '-t', 'tmpfs', '-o', 'size=1m,nr_inodes=200', 'tmpfs', str(path)]
  try:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
  except FileNotFoundError as error:
    pytest.skip(f'needs a file system that can be filled: {error}')
  if done.returncode:
    pytest.skip(f'needs a file system that can be filled: {done.stderr.strip()}')
  try:
    yield path
  finally:
    subprocess.run(['umount', '--lazy', str(path)], check=True)


@pytest.fixture
def fill():
  """Fills the file system of a directory to its last byte. Returns the file that takes the room."""

  def filled(directory: pathlib.Path) -> pathlib.Path:
    path = directory / 'filler'
    with open(path, 'wb', buffering=0) as file:
      for size in (4096, 1):
        with contextlib.suppress(OSError):
          while file.write(bytes(size)):
            pass
    return path

  return filled
