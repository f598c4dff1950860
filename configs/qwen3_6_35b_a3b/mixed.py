"""Qwen3.6-35B-A3B with sequences of 262,144 tokens: the reference study's settings, 8 unlike pools.

Runs:      32 trainer devices of 180 GiB on 4 hosts; 500 updates of 128 prompts x 8 samples, a save
           every 10. Micro-batches of 4 rows of 262,144 tokens, each row over the 8 devices of a
           host. One replica of each of the study's pools: fp8 on H100 and H200, nvfp4 with BF16
           activations on B200 and B300, bf16 on A100, RTX PRO 6000, H200 and pairs of H100, all
           with their cache in fp8. The task stands in for the study's agentic coding, which is not
           here yet.
Before:    a Hugging Face directory of the model at runs/qwen3_6_35b_a3b-hf; config.json beside this
           file holds the sizes of its text model, for the memory plan.
Memory:    mimo plan --config=qwen3_6_35b_a3b/mixed
           (docs/models.md has its tables: what mesh, remat and offload were chosen from)
Command:   on each of the 4 hosts, with a work directory that all of them see:
           MIMO_COORDINATOR=HOST:PORT MIMO_PROCESS=I \\
           mimo train --config=qwen3_6_35b_a3b/mixed --workdir=DIR
           It has never been run at this size.
"""

from ml_collections import config_dict

from mimo.experiments import defaults


def get_config(arm: str = 'sc_mis_topp') -> config_dict.ConfigDict:
  config = defaults.base(arm)
  config.task = 'arithmetic'
  config.policy = 'runs/qwen3_6_35b_a3b-hf'
  config.updates = 500
  config.sampling.top_k = 64
  config.sampling.candidates = 128
  config.rollouts.prompts_per_update = 128
  config.rollouts.group_size = 8
  config.rollouts.episode_timeout_secs = 14_400.0
  config.trainer.learning_rate = 1e-6
  config.trainer.warmup_updates = 0
  config.trainer.compute_dtype = 'bfloat16'
  config.trainer.remat = True
  config.trainer.mesh = 'expert=4,context=8'
  config.trainer.rows = 4
  config.trainer.row_tokens = 262_144
  config.trainer.row_trained_tokens = 131_072
  config.trainer.head_chunk_tokens = 1024
  config.evaluation.every_updates = 10
  config.checkpoints.every_updates = 10
  # Which process this is, and where the first one is, each host says in its environment.
  config.distributed = {'coordinator': 'localhost:8476', 'processes': 4, 'process': 0}
  for name, accelerator, weight_format, sessions in (
    ('a100_bf16', 'A100', 'bf16', 12),
    ('b200_nvfp4', 'B200', 'nvfp4_w4a16', 32),
    ('b300_nvfp4', 'B300', 'nvfp4_w4a16', 48),
    ('h100_bf16', '2xH100', 'bf16', 32),
    ('h100_fp8', 'H100', 'fp8_block', 16),
    ('h200_bf16', 'H200', 'bf16', 16),
    ('h200_fp8', 'H200', 'fp8_block', 32),
    ('rtx_pro_6000_bf16', 'RTX_PRO_6000', 'bf16', 12),
  ):
    config.pools[name] = defaults.pool(
      accelerator, weight_format, sessions=sessions, turns_per_hour=None, server='vllm'
    )
  return config
