r"""The study on one machine: which corrections keep mixed samplers stable.

Runs:      a grid of cells `fleet/arm/staleness`, each with several seeds, on `repair` with a policy
           of 0.12M parameters that the command makes first. Sampling is simulated: tokens are drawn
           by the native samplers at the version that a fleet of these speeds would serve, so that
           staleness is a result. Prices are list prices, throughputs are stated and not measured.
Takes:     2 to 3 minutes of one core a run, and 1.5 for the base policy; see docs/study.md.
Command:   mimo ablate --config=ablation --workdir=runs/ablation --grid=quick
Grids:     quick (a part of the main comparison, one seed), main (five seeds), more (further arms,
           staleness near 0 and 16, nvfp4 alone), all; search (see docs/study.md)
One cell:  mimo train --config=ablation:mixed/grpo/near16 \
               --config.policy=runs/ablation/policy-<digest>
"""

import itertools

from ml_collections import config_dict

from mimo.experiments import defaults

MAIN_ARMS = ('grpo', 'grpo_topp', 'mis', 'sc', 'sc_mis', 'sc_mis_topp')
SEEDS = (100, 101, 102, 103, 104)


def _pools(fleet: str) -> dict[str, config_dict.ConfigDict]:
  """Every fleet holds 168 sessions and serves 60,000 turns an hour: they are equally stale."""
  if fleet == 'homogeneous':
    pool = defaults.pool('3xB200', 'bf16', sessions=168, turns_per_hour=60000.0)
    pool.kv_cache_dtype = 'bf16'
    return {'b200_bf16': pool}
  if fleet == 'nvfp4':
    pool = defaults.pool('2xB200', 'nvfp4_w4a16', sessions=168, turns_per_hour=60000.0)
    return {'b200_nvfp4': pool}
  if fleet == 'mixed':  # 26% bf16, 28% fp8 and 46% nvfp4 of the sessions, as in the study
    return {
      'a100_bf16': defaults.pool('2xA100', 'bf16', sessions=44, turns_per_hour=16000.0),
      'b200_nvfp4': defaults.pool('B200', 'nvfp4_w4a16', sessions=77, turns_per_hour=27000.0),
      'h100_fp8': defaults.pool('H100', 'fp8_block', sessions=47, turns_per_hour=17000.0),
    }
  raise ValueError(f'fleet is {fleet!r}; expected homogeneous, mixed or nvfp4')


def _set_staleness(config: config_dict.ConfigDict, staleness: str) -> None:
  """Sets durations, and for `near0` also how far sampling may run ahead."""
  virtual = config.rollouts.virtual
  if staleness == 'usual':  # about 4 updates
    virtual.update_secs, virtual.publication_secs = 30.0, 15.0
  elif staleness == 'near16':
    virtual.update_secs, virtual.publication_secs = 30.0, 375.0
  elif staleness == 'near0':
    virtual.update_secs, virtual.publication_secs = 0.5, 0.0
    config.rollouts.in_flight_batches, config.rollouts.buffered_batches = 0.25, 1
  else:
    raise ValueError(f'staleness is {staleness!r}; expected usual, near0 or near16')


def get_config(cell: str = 'mixed/sc_mis_topp/usual') -> config_dict.ConfigDict:
  fleet, arm, staleness = cell.split('/')
  config = defaults.base(arm)
  config.updates = 120
  config.rollouts.schedule = 'simulated'
  config.trainer.learning_rate = 2e-4
  config.sampling.candidates, config.sampling.top_k = 8, 4  # of 128 tokens, so that tails are real
  config.evaluation.every_updates = 20
  config.checkpoints.every_updates = 40
  config.drift_every_updates = 10
  for name, pool in _pools(fleet).items():
    config.pools[name] = pool
  _set_staleness(config, staleness)
  return config


def _cells(fleets: str, arms: tuple[str, ...], staleness: str) -> list[str]:
  return ['/'.join(parts) for parts in itertools.product(fleets.split(), arms, staleness.split())]


_MAIN = [
  *_cells('mixed', MAIN_ARMS, 'usual'),
  *_cells('homogeneous', ('grpo', 'sc_mis_topp'), 'usual'),
]
_QUICK = [
  *_cells('mixed', ('grpo', 'mis', 'sc', 'sc_mis_topp'), 'usual'),
  *_cells('homogeneous', ('grpo', 'sc_mis_topp'), 'usual'),
]
_SEARCH = [
  *_cells('mixed', ('grpo', 'sc_mis_topp'), 'usual'),
  *_cells('homogeneous', ('grpo',), 'usual'),
]
_MORE = [
  *_cells('mixed', MAIN_ARMS, 'near16'),
  *_cells('nvfp4', MAIN_ARMS, 'usual'),
  *_cells('mixed', MAIN_ARMS, 'near0'),
  *_cells('mixed', ('tis', 'sc_tis', 'mis_mean'), 'usual'),
]

# name -> (cells, seeds)
GRIDS = {
  'quick': (_QUICK, (0,)),
  'main': (_MAIN, SEEDS),
  'more': (_MORE, SEEDS),
  'all': (_MAIN + _MORE, SEEDS),
  'search': (_SEARCH, (10,)),
}
