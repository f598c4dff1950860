"""The parts of a simulated run: stepped samplers, and how long things take on its virtual clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ml_collections import config_dict

from mimo import fleet
from mimo.experiments import factories
from mimo.models.config import ModelConfig
from mimo.rollouts.virtual import PoolSpeed, VirtualTimes
from mimo.samplers.stepped import NativeSteppedSampler
from mimo.weights.publication import ViewFollower
from mimo.weights.store import Store

# A replica takes up new weights, and turns that have come in, every so many tokens of a turn.
_STEP_TOKENS = 4

_SECS_PER_HOUR = 3600.0


def make_samplers(
  config: config_dict.ConfigDict,
  pools: Sequence[fleet.Pool],
  store: Store,
  model: ModelConfig,
  *,
  max_tokens: int,
) -> tuple[NativeSteppedSampler, ...]:
  """Returns one sampler per pool; they serve nothing yet."""
  return tuple(
    NativeSteppedSampler(
      ViewFollower(store, pool.format),
      source=pool.source,
      config=model,
      settings=dataclasses.replace(
        factories.make_engine_settings(config, pool, max_tokens), decode_steps=_STEP_TOKENS
      ),
      emulate_activations=config.emulate_activations,
    )
    for pool in pools
  )


def make_speeds(
  config: config_dict.ConfigDict, pools: Sequence[fleet.Pool]
) -> tuple[PoolSpeed, ...]:
  """Returns how fast each pool is: one replica serves the turns an hour that it is priced by."""
  virtual = config.rollouts.virtual
  speeds = []
  for pool in pools:
    assert pool.turns_per_hour is not None, 'settings.check lets no such pool pass'
    speeds.append(
      PoolSpeed(
        session_tokens_per_sec=virtual.session_tokens_per_sec,
        replica_tokens_per_sec=pool.turns_per_hour * virtual.turn_tokens / _SECS_PER_HOUR,
        # Known tokens are a part of what a turn costs, and turns_per_hour counts them in.
        prefill_tokens_per_sec=float('inf'),
        publication_secs=virtual.publication_secs,
      )
    )
  return tuple(speeds)


def make_times(config: config_dict.ConfigDict) -> VirtualTimes:
  """Returns how long all else takes."""
  virtual = config.rollouts.virtual
  return VirtualTimes(update_secs=virtual.update_secs, answer_secs=virtual.answer_secs)
