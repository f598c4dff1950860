"""Lines to a standard output that may be gone. Real processes, pipes and terminals."""

import io
import os
import pathlib
import pty
import subprocess
import sys

import pytest

from mimo.telemetry import console

_ROOT = pathlib.Path(__file__).parents[2]

# Says lines for as long as it is told to, then exits with 0 as a finished run does.
_TALKS = """
import sys
from mimo.telemetry import console, progress
console.open_missing()
bar = progress.Progress(9, done=0, stream=None)
for line in sys.stdin:
  console.say(line.rstrip())
  bar.note('noted')
  bar.update(1, {})
  print('beside', line.rstrip())
bar.close()
print('x' * 100_000)
console.Screen(sys.stdout).flush()
"""


def _start(**options):
  return subprocess.Popen(
    [sys.executable, '-c', _TALKS],
    stdin=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    cwd=_ROOT,
    **options,
  )


def _finish(process):
  _, err = process.communicate('two\nthree\n', timeout=60)
  assert (process.returncode, err) == (0, '')


def test_a_reader_that_goes_away():
  process = _start(stdout=subprocess.PIPE)
  process.stdin.write('one\n')
  process.stdin.flush()
  assert process.stdout.readline() == 'one\n'
  process.stdout.close()
  process.stdout = None
  _finish(process)


@pytest.mark.parametrize('descriptors', ['>&-', '<&0 >&- 2>&-'])
def test_a_descriptor_that_is_closed(descriptors, tmp_path):
  """What is printed must not end up in the next file that is opened."""
  script = (
    'import sys\n'
    'from mimo.telemetry import console\n'
    'console.open_missing()\n'
    f'with open({str(tmp_path / "file")!r}, "w") as file:\n'
    '  console.say("said")\n'
    '  print("printed", flush=True)\n'
    '  import os; os.system("echo from a child")\n'
    '  file.write("kept")\n'
    '  sys.stderr.write("wrong")\n'
    '  sys.stdout.write("as a library does")\n'
  )
  done = subprocess.run(
    ['/bin/sh', '-c', f'"$0" -c "$1" {descriptors}', sys.executable, script], cwd=_ROOT
  )
  assert done.returncode == 0
  assert (tmp_path / 'file').read_text() == 'kept'


def test_a_terminal_that_hangs_up():
  ours, theirs = pty.openpty()
  process = _start(stdout=theirs)
  os.close(theirs)
  process.stdin.write('one\n')
  process.stdin.flush()
  assert b'one' in os.read(ours, 100)
  os.close(ours)
  _finish(process)


def test_a_full_disk():
  if not os.path.exists('/dev/full'):
    pytest.skip('there is no /dev/full here')
  with open('/dev/full', 'w') as full:
    _finish(_start(stdout=full))


@pytest.mark.parametrize('encoding', ['ascii', 'latin-1', 'utf-8'])
def test_what_an_encoding_lacks_is_replaced(encoding):
  raw = io.BytesIO()
  stream = io.TextIOWrapper(raw, encoding=encoding)
  console.line('0.5 ± 0.1, π \udc80', stream)
  shown = {'ascii': '0.5 ? 0.1, ? ?', 'latin-1': '0.5 ± 0.1, ? ?', 'utf-8': '0.5 ± 0.1, π ?'}
  assert raw.getvalue().decode(encoding) == f'{shown[encoding]}\n'


def test_a_stream_that_is_none_or_closed_shows_nothing():
  console.line('x', None)
  closed = io.StringIO()
  closed.close()
  console.line('x', closed)
  for stream in (None, closed):
    screen = console.Screen(stream)
    assert not screen.isatty() and screen.encoding == 'utf-8'
  with pytest.raises(OSError, match='no stream'):
    console.Screen(None).fileno()


def test_one_screen_shows_nothing_after_its_first_failure():
  class Failing(io.StringIO):
    failures = 1

    def write(self, text):
      if self.failures:
        self.failures -= 1
        raise BlockingIOError
      return super().write(text)

  stream = Failing()
  screen = console.Screen(stream)
  screen.write('lost')
  screen.write('not shown')
  assert stream.getvalue() == ''
