"""A server as a process: started under a guard, ended with all that came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from mimo.samplers.vllm import guard

LOG_BYTES = 2 << 20
_TAIL_LINES = 12


class Server(Protocol):
  """A server that somebody started.

  Attributes:
    url: where it answers, such as 'http://127.0.0.1:8000'.
  """

  url: str

  async def wait(self) -> int:
    """Returns its exit status once it is gone."""

  async def stop(self) -> None:
    """Ends it and waits until nothing of it is left. May be called more than once."""

  def tail(self) -> str:
    """Returns the last of what it wrote."""


class ServerProcess:
  """Implements `Server`. It ends with this process, also where this one is killed."""

  def __init__(
    self, process: asyncio.subprocess.Process, alive: int, url: str, log: pathlib.Path
  ) -> None:
    self._process = process
    self._alive: int | None = alive
    self._log = log
    self.url = url

  @staticmethod
  async def start(
    command: Sequence[str],
    *,
    url: str,
    log: pathlib.Path,
    environment: Mapping[str, str],
    log_bytes: int = LOG_BYTES,
  ) -> ServerProcess:
    """Starts a command.

    Args:
      command: what to run.
      url: where it will answer.
      log: gets what it writes, after what is there; `<log>.1` what is too much for it.
      environment: all of its environment.
      log_bytes: the most that both hold.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    held, alive = os.pipe()
    try:
      process = await asyncio.create_subprocess_exec(
        sys.executable,
        *('-I', str(pathlib.Path(guard.__file__).resolve())),
        *(str(held), str(log), str(log_bytes), '--', *command),
        pass_fds=[held],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C in a terminal is for the run, which ends its servers
      )
    except BaseException:
      os.close(alive)
      raise
    finally:
      os.close(held)
    return ServerProcess(process, alive, url, log)

  @property
  def pid(self) -> int:
    """The guard's process id; the server is its child."""
    return self._process.pid

  async def wait(self) -> int:
    return await self._process.wait()

  async def stop(self) -> None:
    if self._alive is not None:
      os.close(self._alive)
      self._alive = None
    try:
      async with asyncio.timeout(2 * (guard.GRACE_SECS + guard.TRACKER_SECS)):
        await self._process.wait()
    except TimeoutError:
      with contextlib.suppress(ProcessLookupError):
        self._process.kill()
      await self._process.wait()

  def tail(self) -> str:
    lines: list[str] = []
    for path in (self._log.with_name(f'{self._log.name}.1'), self._log):
      with contextlib.suppress(OSError):
        lines += path.read_text('utf-8', 'replace').splitlines()
    return '\n'.join(lines[-_TAIL_LINES:])


def free_port(host: str) -> int:
  """Returns a port that nothing listened on a moment ago."""
  with socket.socket() as probe:
    probe.bind((host, 0))
    return probe.getsockname()[1]
