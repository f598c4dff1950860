"""Lines for the person at standard output, who may have gone away.

A reader that stops (`| head`), a closed descriptor, a terminal that hangs up or a character that an
encoding lacks must not end a run: what cannot be shown is replaced, or is not shown.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO


def say(text: str) -> None:
  """Prints a line to standard output. Never raises."""
  line(text, sys.stdout)


def line(text: str, stream: TextIO | None) -> None:
  """Prints a line to a stream. Never raises."""
  screen = Screen(stream)
  screen.write(f'{text}\n')
  screen.flush()


class Screen:
  """A text stream whose writes never raise: after the first that fails, nothing is shown."""

  def __init__(self, stream: TextIO | None) -> None:
    """Wraps a stream; None, as Python has it for a closed descriptor, shows nothing."""
    self._stream = stream

  @property
  def encoding(self) -> str:
    """The encoding of what is written."""
    return (self._stream.encoding if self._stream else None) or 'utf-8'

  def write(self, text: str) -> int:
    """Writes text; a character that the encoding lacks becomes a question mark."""
    if self._stream is not None:
      try:
        try:
          self._stream.write(text)
        except UnicodeEncodeError:
          self._stream.write(text.encode(self.encoding, 'replace').decode(self.encoding))
      except (OSError, ValueError):  # ValueError: Python's own object is closed
        self._silence(self._stream)
    return len(text)

  def flush(self) -> None:
    """Shows what was written so far."""
    if self._stream is not None:
      try:
        self._stream.flush()
      except (OSError, ValueError):
        self._silence(self._stream)

  def fileno(self) -> int:
    """Returns the descriptor. Raises OSError where there is none."""
    if self._stream is None:
      raise OSError('there is no stream')
    return self._stream.fileno()

  def isatty(self) -> bool:
    """Returns whether a terminal shows it."""
    try:
      return self._stream is not None and self._stream.isatty()
    except ValueError:
      return False

  def _silence(self, stream: TextIO) -> None:
    """Sends all that is written from here on to nowhere: what Python flushes as it exits, too."""
    self._stream = None
    with contextlib.suppress(OSError, ValueError):
      nowhere = os.open(os.devnull, os.O_WRONLY)
      os.dup2(nowhere, stream.fileno())
      os.close(nowhere)


def open_missing() -> None:
  """Opens each standard stream that the process was started without, to nowhere.

  A file that is opened later would take the descriptor, and what is printed would end up in it.
  """
  while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
    os.set_inheritable(descriptor, True)
  os.close(descriptor)
  for name in ('stdout', 'stderr'):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))  # noqa: SIM115 (for good)
