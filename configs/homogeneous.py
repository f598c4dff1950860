"""One bf16 pool: what is left of the mismatch is staleness and rounding.

Runs:      configs/mixed.py with its three pools replaced by one of the same session count, which
           serves bf16 weights and keeps a bf16 cache.
Expected:  held-out pass@1 from 0.49 to 0.67 (seed 0), within the spread of configs/mixed.py:
           at this scale and rate the fleets do not separate, nor does the arm grpo (0.68).
Takes:     as configs/mixed.py.
Command:   mimo train --config=homogeneous
Arms:      homogeneous:grpo and so on
"""

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis_topp') -> config_dict.ConfigDict:
  config = defaults.base(arm)
  config.pools.b200_bf16 = defaults.pool('B200', 'bf16', sessions=168, turns_per_hour=20000.0)
  config.pools.b200_bf16.kv_cache_dtype = 'bf16'
  return config
