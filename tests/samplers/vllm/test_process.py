"""A server's process group: nothing of it is left, whoever dies."""

import asyncio
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mimo.samplers.vllm.process import ServerProcess, free_port

_ROOT = pathlib.Path(__file__).parents[3]

# A server with a child in its own session, that both ignore SIGTERM, and one more child.
_STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = 'import time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'
children = [
  subprocess.Popen([sys.executable, '-c', code], start_new_session=True),
  subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']),
]
print('pids', os.getpid(), *(child.pid for child in children), flush=True)
time.sleep(float(sys.argv[1]))
"""

# Starts a server as a run does, says so, and lives on.
_RUN = """
import asyncio, os, pathlib, sys
from mimo.samplers.vllm.process import ServerProcess

async def main():
  log = pathlib.Path(sys.argv[1])
  command = [sys.executable, '-c', sys.argv[2], '600']
  server = await ServerProcess.start(command, url='', log=log, environment=dict(os.environ))
  print(server.pid, flush=True)
  await server.wait()

asyncio.run(main())
"""


async def _start(log: pathlib.Path, code: str, *arguments: str, **options) -> ServerProcess:
  command = [sys.executable, '-c', code, *arguments]
  return await ServerProcess.start(
    command, url='', log=log, environment=dict(os.environ), **options
  )


def _pids(log: pathlib.Path) -> list[int]:
  """Waits for the server's line, and returns the process ids in it."""
  for _ in range(1200):
    with contextlib.suppress(OSError):
      for line in log.read_text().splitlines():
        if line.startswith('pids '):
          return [int(pid) for pid in line.split()[1:]]
    time.sleep(0.05)
  raise AssertionError('the server never said its process ids')


def _alive(pid: int) -> bool:
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] != 'Z'
  except OSError:
    return False


def _left(pids: list[int], secs: float) -> list[int]:
  deadline = time.monotonic() + secs
  while (left := [pid for pid in pids if _alive(pid)]) and time.monotonic() < deadline:
    time.sleep(0.05)
  return left


def test_stopping_leaves_nothing(tmp_path) -> None:
  async def main():
    server = await _start(tmp_path / 'log', _STUBBORN, '600')
    pids = await asyncio.to_thread(_pids, tmp_path / 'log')
    await server.stop()
    await server.stop()
    return [server.pid, *pids]

  pids = asyncio.run(main())
  assert len(pids) == 4
  assert not _left(pids, 0.0)


def test_a_server_that_exits_takes_its_children_along(tmp_path) -> None:
  async def main():
    server = await _start(tmp_path / 'log', _STUBBORN + 'sys.exit(3)', '0.5')
    return await server.wait(), server.tail()

  status, tail = asyncio.run(main())
  assert status == 3
  assert 'exited with status 3' in tail
  assert not _left(_pids(tmp_path / 'log'), 0.0)


def test_a_server_that_is_killed_takes_its_children_along(tmp_path) -> None:
  async def main():
    server = await _start(tmp_path / 'log', _STUBBORN, '600')
    pids = await asyncio.to_thread(_pids, tmp_path / 'log')
    os.kill(pids[0], signal.SIGKILL)
    return await server.wait(), pids

  status, pids = asyncio.run(main())
  assert status == 128 + signal.SIGKILL
  assert not _left(pids, 0.0)


@pytest.mark.parametrize('name', ['SIGKILL', 'SIGTERM'])
def test_nothing_outlives_the_run(tmp_path, name: str) -> None:
  run = subprocess.Popen(
    [sys.executable, '-c', _RUN, str(tmp_path / 'log'), _STUBBORN],
    stdout=subprocess.PIPE,
    cwd=_ROOT,
  )
  assert run.stdout is not None
  pids = [int(run.stdout.readline()), *_pids(tmp_path / 'log')]
  assert all(map(_alive, pids))
  run.send_signal(getattr(signal, name))
  run.wait(60)
  assert not _left(pids, 20.0)


def test_shared_memory_of_a_killed_server_is_freed(tmp_path) -> None:
  code = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
from multiprocessing import shared_memory
shared = shared_memory.SharedMemory(create=True, size=4096)
print('pids', os.getpid(), flush=True)
print('shared', shared.name, flush=True)
time.sleep(600)
"""

  async def main():
    server = await _start(tmp_path / 'log', code)
    await asyncio.to_thread(_pids, tmp_path / 'log')
    async with asyncio.timeout(60):
      while 'shared ' not in (text := (tmp_path / 'log').read_text()):
        await asyncio.sleep(0.05)
    path = pathlib.Path('/dev/shm') / text.split('shared ')[1].split()[0]
    assert path.exists()
    await server.stop()
    return path

  assert not asyncio.run(main()).exists()


def test_a_killed_guard_takes_the_server_along(tmp_path) -> None:
  async def main():
    server = await _start(tmp_path / 'log', _STUBBORN, '600')
    pids = await asyncio.to_thread(_pids, tmp_path / 'log')
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    return pids

  server, *children = asyncio.run(main())
  assert not _left([server], 20.0)
  for pid in children:  # which nobody is left to end, where a server does not do it by itself
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, signal.SIGKILL)


def test_what_a_server_writes_is_kept_in_bounded_room(tmp_path) -> None:
  code = "import sys\nfor i in range(20000): print('line', i)\nprint('last words', flush=True)"

  async def main():
    server = await _start(tmp_path / 'logs' / 'log', code, log_bytes=20_000)
    await server.wait()
    return server.tail()

  tail = asyncio.run(main())
  assert 'last words' in tail
  assert sum(path.stat().st_size for path in (tmp_path / 'logs').iterdir()) <= 20_000 + 100


def test_a_full_disk_costs_the_log_and_not_the_server(tmp_path, small_disk, fill) -> None:
  code = 'for i in range(20000): print("line", i)\nopen(sys.argv[1], "w").write("done")'
  fill(small_disk)

  async def main():
    server = await _start(small_disk / 'log', 'import sys\n' + code, str(tmp_path / 'end'))
    return await server.wait()

  assert asyncio.run(main()) == 0
  assert (tmp_path / 'end').read_text() == 'done'
  assert (small_disk / 'log').stat().st_size == 0


def test_a_command_that_is_none_ends_with_a_status(tmp_path) -> None:
  async def main():
    server = await ServerProcess.start(
      ['/no/such/command'], url='', log=tmp_path / 'log', environment={}
    )
    return await server.wait()

  assert asyncio.run(main()) != 0


def test_a_free_port_can_be_listened_on() -> None:
  assert 1024 <= free_port('127.0.0.1') < 65536
