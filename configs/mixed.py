"""Three pools of unlike precision, one BF16 trainer, on program repair in miniature.

Runs:      a 0.75M-parameter policy on `repair`, 60 updates of 16 prompts x 8 samples, sampled by
           pools that serve bf16, fp8 and nvfp4 weights, each with its own prefix cache in fp8,
           while the trainer goes on. Prices are list prices of the accelerators that the pools
           are named after; their throughputs are stated, not measured: a modelled cost.
Expected:  held-out pass@1 from 0.49 to about 0.68 (5 seeds: gains of 0.16 to 0.22); sampler-trainer
           KL of about 2e-3 nats a token, most of it staleness of 3 updates, largest for nvfp4.
Takes:     1.5 minutes on 2 cores, 1.3 GiB of memory, 30 MB of disk in the work directory.
Command:   mimo train --config=mixed
Arms:      mixed:grpo (tis, mis, sc, sc_tis, sc_mis, each also with _topp)
"""

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis_topp') -> config_dict.ConfigDict:
  config = defaults.base(arm)
  config.pools.a100_bf16 = defaults.pool('A100', 'bf16', sessions=44, turns_per_hour=9000.0)
  config.pools.h100_fp8 = defaults.pool('H100', 'fp8_block', sessions=44, turns_per_hour=16000.0)
  config.pools.b200_nvfp4 = defaults.pool(
    'B200', 'nvfp4_w4a16', sessions=80, turns_per_hour=30000.0
  )
  return config
