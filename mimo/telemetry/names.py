"""Names of the scalars that the progress line and the report read.

A name is a path: `train/...` is the objective and the optimizer over all tokens,
`source/<pool>/...` the same of one pool's tokens, `rollout/...` the episodes trained on,
`sampling/...` all sampling since the previous batch, what was lost included, `replica/<pool>/...`
how a pool's server is, `eval/<split>/...` an evaluation, `speed/...` throughput, `cost/...` the
ledger.
"""

from __future__ import annotations

from collections.abc import Iterable

REWARD = 'rollout/reward'
PASS_1 = 'rollout/pass@1'
STALENESS = 'rollout/staleness_mean_updates'
SAMPLER_SPEED = 'speed/sampler_tokens_per_sec'
TRAINER_SPEED = 'speed/trainer_tokens_per_sec'
MODELLED_USD = 'cost/modelled_usd'

# Of the objective, after `train/` or `source/<pool>/`.
TOKENS = 'tokens'
KL = 'kl'
MASKED_LOW = 'masked_low'
MASKED_HIGH = 'masked_high'
MASKED_SHARE = 'masked_share'  # the two together
TAIL_RATIO = 'rho'
TAIL_RATIO_MAX = 'rho_max'


def of_train(name: str) -> str:
  """Returns the name of an objective's scalar over all tokens."""
  return f'train/{name}'


def of_source(pool: str, name: str) -> str:
  """Returns the name of an objective's scalar over one pool's tokens."""
  return f'source/{pool}/{name}'


def of_eval(split: str, name: str) -> str:
  """Returns the name of an evaluation's scalar, such as `pass@1` or `pass@1_error`."""
  return f'eval/{split}/{name}'


def sources(names: Iterable[str]) -> list[str]:
  """Returns the pools that have scalars among `names`, sorted."""
  return sorted({name.split('/')[1] for name in names if name.startswith('source/')})
