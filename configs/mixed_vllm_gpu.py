"""Three vLLM servers on the GPUs of one machine. It has never been run.

Runs:      configs/mixed.py with a vLLM server per pool: bf16, fp8 with 128 x 128 blocks and nvfp4
           with BF16 activations, each with its cache in fp8. Pools take GPUs in the order of their
           names. The accelerators named here are what prices and records go by; put those of the
           machine ('2xH100' is a replica on two). An nvfp4 view needs a GPU that has a kernel for
           it: CuTe-DSL on SM100 and SM103, Marlin elsewhere. The trainer of a policy this small
           stays on the cores, so that the servers have the GPUs to themselves.
Before:    pip install -e '.[vllm]'
Command:   JAX_PLATFORMS=cpu mimo train --config=mixed_vllm_gpu
Arms:      mixed_vllm_gpu:grpo and so on
"""

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis_topp') -> config_dict.ConfigDict:
  config = defaults.base(arm)
  for name, weight_format in (
    ('h100_bf16', 'bf16'),
    ('h100_fp8', 'fp8_block'),
    ('h100_nvfp4', 'nvfp4_w4a16'),
  ):
    config.pools[name] = defaults.pool(
      'H100', weight_format, sessions=56, turns_per_hour=None, server='vllm'
    )
  return config
