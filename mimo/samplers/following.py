"""Follows a view: finds the newest version, loads it, and keeps what is served when that fails.

A version is tried again after a failure, since a disk or a network may heal, but ever less often:
the calls to wait double with each failure of the same version.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Callable
from typing import Protocol

import jax

from mimo.models.config import ModelConfig
from mimo.samplers.base import SamplerError
from mimo.samplers.decode import Weights, computed
from mimo.types import Version
from mimo.weights.views import View
from mimo.weights.views import read_view as read_view_directory

_MAX_WAIT_CALLS = 1024

_log = logging.getLogger(__name__)


class ViewFeed(Protocol):
  """Where the versions of one view come from."""

  def latest(self) -> Version | None:
    """Returns the newest published version; cheap. None before the first."""

  def open(self, version: Version) -> pathlib.Path:
    """Returns a verified view directory. Raises ValueError naming what is wrong with it."""


class Follower:
  """Turns a feed into weights, one version at a time.

  Attributes:
    version: what was last loaded, or None.
    failures: what went wrong and how often: 'poll' for the feed, 'load' for a view.
  """

  def __init__(
    self,
    feed: ViewFeed,
    read_view: Callable[[pathlib.Path], View] | None,
    *,
    pool: str,
    config: ModelConfig,
    format: str,
    emulate_activations: bool,
  ) -> None:
    # Emulating a server's activations is multiplying as its kernels do: weights are not rounded.
    own = functools.partial(read_view_directory, exact=emulate_activations)
    self._feed = feed
    self._read_view = read_view or own
    self._pool = pool
    self._config = config
    self._format = format
    self._emulate_activations = emulate_activations
    self._failed: tuple[Version, int] | None = None  # and how often
    self._wait_calls = 0
    self.version: Version | None = None
    self.failures: collections.Counter[str] = collections.Counter()

  def poll(self) -> Weights | None:
    """Returns the weights of a version newer than the one loaded; None when there is none.

    A failure is logged and counted, and leaves the version as it is.
    """
    try:
      newest = self._latest()
    except SamplerError:
      return None
    if newest is None or newest == self.version:
      return None
    failed, times = self._failed or (None, 0)
    if newest == failed and self._wait_calls > 0:
      self._wait_calls -= 1
      return None
    try:
      return self.load(newest)
    except SamplerError:
      times = times + 1 if newest == failed else 1
      self._failed, self._wait_calls = (newest, times), min(2**times, _MAX_WAIT_CALLS)
      return None

  def first(self) -> Weights | None:
    """Returns the weights of the newest version; None when there is none. Raises SamplerError."""
    newest = self._latest()
    return None if newest is None else self.load(newest)

  def load(self, version: Version) -> Weights:
    """Returns the weights of one version. Raises SamplerError, counted, naming what is wrong."""
    try:
      view = self._read_view(self._feed.open(version))
      self._check(view)
      quant = view.activation_quant if self._emulate_activations else None
      weights = jax.block_until_ready(jax.device_put(Weights(view.params, quant)))
    except Exception as error:  # whatever is wrong with it, what is served goes on
      raise self._fail('load', f'version {version.number} cannot be served: {error}') from error
    self.version = version
    return weights

  def _latest(self) -> Version | None:
    try:
      return self._feed.latest()
    except Exception as error:
      raise self._fail('poll', f'the newest version is unknown: {error}') from error

  def _check(self, view: View) -> None:
    if view.format != self._format:
      raise ValueError(f'the view is {view.format}; expected {self._format}')
    got, expected = computed(view.config), computed(self._config)
    if got != expected:
      differing = [
        f'{field.name} {getattr(got, field.name)}, expected {getattr(expected, field.name)}'
        for field in dataclasses.fields(got)
        if getattr(got, field.name) != getattr(expected, field.name)
      ]
      raise ValueError(f'the view holds another model: {"; ".join(differing)}')

  def _fail(self, kind: str, message: str) -> SamplerError:
    self.failures[kind] += 1
    _log.warning('pool %s: %s', self._pool, message)
    return SamplerError(f'pool {self._pool}: {message}')
