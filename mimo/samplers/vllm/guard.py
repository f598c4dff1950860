"""Stands between a run and one server, so that nothing of the server outlives either of them.

    python -I guard.py <read end of a pipe> <log> <most bytes of it> -- <command>

The command runs in a session of its own, and what it writes goes to a log of bounded size. It is
ended, with every process that came of it, when it exits, when the pipe's other end closes (the run
that holds it died, whatever way), or when the guard is told to by SIGTERM. Run by path and in
isolated mode, this file imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

GRACE_SECS = 2.0  # between asking and killing
TRACKER_SECS = 2.0  # more, for what frees shared memory

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHUNK_BYTES = 1 << 16


class BoundedLog:
  """A file of at most `max_bytes` / 2, and the same of what came before it in `<path>.1`."""

  def __init__(self, path: str, max_bytes: int) -> None:
    self._path = pathlib.Path(path)
    self._half = max(1, max_bytes // 2)
    self._file = open(self._path, 'ab', buffering=0)  # noqa: SIM115
    self._size = self._file.tell()

  def write(self, data: bytes) -> None:
    # A full disk must not end the server: what cannot be written is lost.
    with contextlib.suppress(OSError):
      if self._size and self._size + len(data) > self._half:
        self._file.close()
        self._path.replace(f'{self._path}.1')
        self._file = open(self._path, 'ab', buffering=0)  # noqa: SIM115
        self._size = 0
      self._size += self._file.write(data[-self._half :]) or 0


def _prctl(option: int, value: int) -> None:
  ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants() -> list[int]:
  """Process ids of everything that came of this process, the dead not yet waited for left out."""
  parents: dict[int, int] = {}
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit():
      with contextlib.suppress(OSError, ValueError, IndexError):
        # The name, in brackets, may hold anything: state and parent follow its last bracket.
        state, parent = (entry / 'stat').read_text().rpartition(')')[2].split()[:2]
        if state != 'Z':
          parents[int(entry.name)] = int(parent)
  found, new = set[int](), {os.getpid()}
  while new:
    new = {pid for pid, parent in parents.items() if parent in new} - found
    found |= new
  return sorted(found)


def _signal_all(pids: list[int], number: int) -> None:
  for pid in pids:
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.kill(pid, number)


def _reap() -> None:
  with contextlib.suppress(ChildProcessError):
    while os.waitpid(-1, os.WNOHANG) != (0, 0):
      pass


def end_descendants(grace_secs: float) -> None:
  """Asks all to end, then kills what is left, until there is none.

  Python's trackers of shared memory go last: they free what the others leave, and then end.
  """
  _signal_all(_descendants(), signal.SIGTERM)
  deadline = time.monotonic() + grace_secs
  while left := _descendants():
    _reap()
    late = time.monotonic() - deadline
    if late > 0:
      spared = [] if late > TRACKER_SECS else [pid for pid in left if _is_tracker(pid)]
      _signal_all([pid for pid in left if pid not in spared], signal.SIGKILL)
    time.sleep(0.02)
  _reap()


def _is_tracker(pid: int) -> bool:
  try:
    return b'multiprocessing.resource_tracker' in pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()
  except OSError:
    return False


def run(alive: int, log: BoundedLog, command: list[str]) -> int:
  """Runs a command until it exits or must be ended. Returns its exit status, 0 where ended."""
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans among its children become ours
  told, tell = os.pipe()
  os.set_blocking(tell, False)
  # Where the write cannot be done there is a byte to read already.
  signal.signal(signal.SIGTERM, lambda *_: None)
  signal.signal(signal.SIGINT, lambda *_: None)
  signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
  process = subprocess.Popen(
    command,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    start_new_session=True,
    preexec_fn=lambda: _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
  )
  assert process.stdout is not None
  output = process.stdout.fileno()
  watched = [output, alive, told]
  ended = False
  while process.poll() is None and not ended:
    ready = select.select(watched, [], [], 0.2)[0]
    if output in ready:
      data = os.read(output, _CHUNK_BYTES)
      log.write(data)
      if not data:
        watched.remove(output)
    ended = alive in ready or told in ready
  status = process.poll()
  end_descendants(GRACE_SECS if ended else 0.0)
  while select.select([output], [], [], 0)[0] and (data := os.read(output, _CHUNK_BYTES)):
    log.write(data)  # its last words
  log.write(f'-- {"ended" if ended else f"exited with status {status}"}\n'.encode())
  return 0 if status is None else status


def main() -> None:
  """Reads the arguments; exits with the command's status, or 128 + the signal that ended it."""
  alive, path, max_bytes, dashes, *command = sys.argv[1:]
  assert dashes == '--', sys.argv
  status = run(int(alive), BoundedLog(path, int(max_bytes)), command)
  sys.exit(128 - status if status < 0 else status)


if __name__ == '__main__':
  main()
