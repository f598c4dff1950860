"""Checks a configuration before anything starts: every value that only a person can have chosen.

What a room checks for itself (a `Correction`'s bounds, a weight format) is left to the room.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ml_collections import config_dict

from mimo.models.parallel import MESH_AXES

SCHEDULES = ('async', 'lockstep', 'simulated')

_POSITIVE = (
  'rollouts.prompts_per_update',
  'rollouts.group_size',
  'rollouts.in_flight_batches',
  'rollouts.buffered_batches',
  'rollouts.episode_timeout_secs',
  'rollouts.virtual.session_tokens_per_sec',
  'rollouts.virtual.turn_tokens',
  'trainer.learning_rate',
  'trainer.rows',
  'trainer.row_tokens',
  'trainer.row_trained_tokens',
  'trainer.head_chunk_tokens',
  'sampling.temperature',
  'sampling.candidates',
  'evaluation.samples',
)
_NOT_NEGATIVE = (
  'seed',
  'updates',
  'rollouts.lag_updates',
  'rollouts.max_staleness_updates',
  'rollouts.virtual.update_secs',
  'rollouts.virtual.publication_secs',
  'rollouts.virtual.answer_secs',
  'drift_every_updates',
  'trainer.warmup_updates',
  'trainer.weight_decay',
  'trainer.max_grad_norm',
  'evaluation.every_updates',
  'checkpoints.every_updates',
  'sampling.top_k',
)


def one_of(name: str, value: str, known: Iterable[str]) -> str:
  """Returns `value` if it is known. Raises ValueError naming the nearest that is."""
  known = sorted(known)
  if value in known:
    return value
  near = difflib.get_close_matches(value, known, n=1, cutoff=0.5)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  raise ValueError(f'{name} is {value!r}; expected one of {", ".join(known)}{hint}')


def mesh_sizes(text: str) -> dict[str, int]:
  """Returns the sizes of mesh axes that a text such as 'fsdp=4,context=2' states.

  Raises ValueError naming an axis that there is not, or that has no size.
  """
  sizes = {}
  for part in filter(None, text.split(',')):
    axis, _, size = (piece.strip() for piece in part.partition('='))
    one_of('trainer.mesh', axis, MESH_AXES)
    if not size.isdecimal() or axis in sizes:
      raise ValueError(f'trainer.mesh is {text!r}; expected one size of {axis}, a whole number')
    sizes[axis] = int(size)
  return sizes


def check(config: config_dict.ConfigDict) -> None:
  """Raises ValueError naming the first key whose value cannot be meant."""
  for key in _POSITIVE:
    value = _leaf(config, key)
    if value is None or not value > 0:
      raise ValueError(f'{key} is {value}; expected a number > 0')
  for key in _NOT_NEGATIVE:
    value = _leaf(config, key)
    if value is not None and not value >= 0:
      raise ValueError(f'{key} is {value}; expected a number >= 0')
  one_of('rollouts.schedule', config.rollouts.schedule, SCHEDULES)
  if config.rollouts.group_size < 2:
    raise ValueError(
      f'rollouts.group_size is {config.rollouts.group_size}; expected at least 2: a group of one '
      'has no mean to compare with'
    )
  if not config.pools:
    raise ValueError('pools is empty; expected at least one pool')
  for name, pool in config.pools.items():
    one_of(f'pools.{name}.prefix_cache', pool.prefix_cache, ('keep', 'drop'))
    one_of(f'pools.{name}.kv_cache_dtype', pool.kv_cache_dtype, ('bf16', 'fp8'))
    one_of(f'pools.{name}.server', pool.server, ('native', 'vllm'))
    if not pool.sessions > 0:
      raise ValueError(f'pools.{name}.sessions is {pool.sessions}; expected a number > 0')
    if pool.turns_per_hour is not None and not pool.turns_per_hour > 0:
      raise ValueError(
        f'pools.{name}.turns_per_hour is {pool.turns_per_hour}; expected a number > 0'
      )
    if config.rollouts.schedule == 'simulated':
      if pool.server != 'native':
        raise ValueError(
          f"pools.{name}.server is {pool.server!r}; expected 'native', which alone can be simulated"
        )
      if pool.turns_per_hour is None:
        raise ValueError(
          f'pools.{name}.turns_per_hour is not stated; expected how fast the simulated pool is'
        )


def _leaf(config: config_dict.ConfigDict, key: str) -> float | None:
  for part in key.split('.'):
    config = config[part]
  return config
