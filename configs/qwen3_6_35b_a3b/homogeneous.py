"""Qwen3.6-35B-A3B sampled by B200s in BF16: what is left of the mismatch is staleness and rounding.

Runs:      configs/qwen3_6_35b_a3b/mixed.py with its pools replaced by one of B200, bf16 weights and
           a bf16 cache.
Memory:    mimo plan --config=qwen3_6_35b_a3b/homogeneous
Command:   as configs/qwen3_6_35b_a3b/mixed.py. It has never been run at this size.
"""

import pathlib
import runpy

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis_topp') -> config_dict.ConfigDict:
  mixed = pathlib.Path(__file__).with_name('mixed.py')
  config = runpy.run_path(str(mixed))['get_config'](arm)
  config.pools = {}
  config.pools.b200_bf16 = defaults.pool(
    'B200', 'bf16', sessions=21, turns_per_hour=None, server='vllm'
  )
  config.pools.b200_bf16.kv_cache_dtype = 'bf16'
  return config
