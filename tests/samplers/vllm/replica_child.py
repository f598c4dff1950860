"""Serves one view through a replica of its own, and draws turns until it is killed.

    python replica_child.py JOB.json

The job holds `settings` (of the server) and `root`, a directory for all that it writes.
"""

import asyncio
import hashlib
import json
import os
import pathlib
import sys

import numpy as np

from mimo.samplers.vllm.client import ClientLimits, VllmClient
from mimo.samplers.vllm.launch import ServerSettings, server_command, server_environment
from mimo.samplers.vllm.process import ServerProcess
from mimo.samplers.vllm.replica import Replica
from mimo.samplers.vllm.watch import ReplicaLimits
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import SamplingParams, Version
from mimo.weights.store import Blob


class _Feed:
  """One version, for ever."""

  def __init__(self, directory: pathlib.Path) -> None:
    self._directory = directory

  def latest(self) -> Version:
    return Version(1, 0, 0)

  def locate(self, version: Version) -> tuple[pathlib.Path, dict[str, Blob]]:
    contents = {path.name: path.read_bytes() for path in self._directory.iterdir()}
    files = {name: Blob(hashlib.sha256(c).hexdigest(), len(c)) for name, c in contents.items()}
    return self._directory, files


async def main() -> None:
  job = json.loads(pathlib.Path(sys.argv[1]).read_text())
  root, settings = pathlib.Path(job['root']), ServerSettings(**job['settings'])
  base = {name: value for name, value in os.environ.items() if not name.startswith(('JAX', 'XLA'))}

  async def launch(model: pathlib.Path) -> ServerProcess:
    return await ServerProcess.start(
      server_command(settings),
      url=f'http://{settings.host}:{settings.port}',
      log=root / 'server.log',
      environment=server_environment(settings, base),
    )

  replica = Replica(
    _Feed(pathlib.Path(settings.model)),
    launch,
    name='cpu',
    format='bf16',
    prefix_cache='keep',
    directory=root / 'replica',
    check=lambda status: None,
    new_client=lambda url: VllmClient(url, limits=ClientLimits(), max_connections=2),
    limits=ReplicaLimits(start_secs=300.0),
  )
  await replica.start()
  params = SamplingParams(1.0, 1.0, 0, 8, 500, ())
  number = 0
  while True:
    client, version = await replica.serving(60.0)
    number += 1
    prompt = np.array([5, number % 100], np.int32)
    await client.generate(GenerateRequest(f'turn-{number}', prompt, params, 7, version, 5.0))
    print(f'turn {number}', flush=True)


if __name__ == '__main__':
  asyncio.run(main())
