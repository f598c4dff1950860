"""The parts of the guard that a process of its own does not show; see also test_process.py."""

import os
import subprocess
import sys
import time

from mimo.samplers.vllm import guard


def test_a_log_keeps_the_newest_in_bounded_room(tmp_path) -> None:
  log = guard.BoundedLog(str(tmp_path / 'log'), 100)
  for number in range(100):
    log.write(f'line {number:02d}\n'.encode())
  older, newer = (tmp_path / 'log.1').read_text(), (tmp_path / 'log').read_text()
  assert len(older) <= 50 and len(newer) <= 50
  lines = (older + newer).splitlines()
  assert lines == [f'line {number:02d}' for number in range(100 - len(lines), 100)]


def test_a_line_longer_than_the_log_is_cut(tmp_path) -> None:
  log = guard.BoundedLog(str(tmp_path / 'log'), 100)
  log.write(b'x' * 1000)
  assert (tmp_path / 'log').stat().st_size == 50


def test_a_log_goes_on_where_it_was(tmp_path) -> None:
  (tmp_path / 'log').write_text('before\n')
  guard.BoundedLog(str(tmp_path / 'log'), 100).write(b'after\n')
  assert (tmp_path / 'log').read_text() == 'before\nafter\n'


def test_a_full_disk_costs_the_log_and_not_the_server() -> None:
  log = guard.BoundedLog('/dev/full', 100)
  log.write(b'lost')
  log.write(b'lost too')


def test_descendants_are_found_through_their_parents() -> None:
  code = 'import subprocess, sys; subprocess.run([sys.executable, "-c", "input()"])'
  child = subprocess.Popen(
    [sys.executable, '-c', f'{code}'], stdin=subprocess.PIPE, start_new_session=True
  )
  try:
    found: list[int] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
      found = guard._descendants()
      if child.pid in found and len(found) >= 2:
        break
    assert child.pid in found
    assert os.getpid() not in found
  finally:
    child.communicate(b'\n')
  assert child.pid not in guard._descendants()
