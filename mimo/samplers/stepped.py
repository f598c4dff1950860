"""The native engine under its owner's clock: a step when it is asked for, and nothing between."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mimo.models.config import ModelConfig
from mimo.samplers import snapshot
from mimo.samplers.base import SamplerContract, Step
from mimo.samplers.engine import Engine, EngineSettings
from mimo.samplers.following import Follower, ViewFeed
from mimo.samplers.native import native_contract
from mimo.samplers.turns import TurnRequest
from mimo.types import SamplingParams, Source, Version
from mimo.weights.views import View


class NativeSteppedSampler:
  """Implements `mimo.samplers.base.SteppedSampler`, on the caller's thread."""

  def __init__(
    self,
    feed: ViewFeed,
    *,
    source: Source,
    config: ModelConfig,
    settings: EngineSettings,
    emulate_activations: bool = False,
    read_view: Callable[[pathlib.Path], View] | None = None,
  ) -> None:
    """Opens nothing yet; the arguments are those of `NativeSampler`."""
    self._contract = native_contract(source, config, settings)
    self._follower = Follower(
      feed,
      read_view,
      pool=source.pool,
      config=config,
      format=source.format,
      emulate_activations=emulate_activations,
    )
    self._engine = Engine(config, settings)

  @property
  def contract(self) -> SamplerContract:
    return self._contract

  @property
  def busy(self) -> bool:
    return self._engine.busy

  def activate(self, version: Version) -> None:
    self._engine.activate(self._follower.load(version), version.number)

  def submit(
    self, session: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> None:
    ids = np.array(tokens, np.int32)
    self._engine.submit(TurnRequest(session, ids, params, np.asarray(key, np.uint32)))

  def release(self, session: str) -> None:
    self._engine.release(session)

  def step(self) -> Step:
    stats = self._engine.stats
    steps, idle, prefilled = stats.decode_steps, stats.idle_row_steps, stats.prefilled_tokens
    finished = self._engine.step()
    steps = stats.decode_steps - steps
    idle = stats.idle_row_steps - idle
    return Step(
      finished=tuple((request.session, result) for request, result in finished),
      decode_steps=steps,
      fed_tokens=steps * self._contract.max_sessions - idle,
      prefilled_tokens=stats.prefilled_tokens - prefilled,
    )

  def state(self) -> dict[str, Any]:
    return snapshot.save(self._engine)

  def restore(self, state: Mapping[str, Any]) -> None:
    snapshot.load(self._engine, state)
