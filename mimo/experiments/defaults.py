"""Every key of an experiment, with the value the `repair` runs use.

A file of configs/ takes `base(arm)`, adds its pools and changes what it is about. At most 60
leaves: what no experiment varies is a constant of its room.
"""

from __future__ import annotations

import pathlib

from ml_collections import config_dict


def base(arm: str) -> config_dict.ConfigDict:
  """Returns the defaults, unlocked and without pools."""
  return config_dict.ConfigDict(
    {
      'arm': arm,  # grpo, tis, mis, sc, sc_tis, sc_mis, each also with _topp
      'seed': 0,
      'updates': 60,
      'policy': '',  # a Hugging Face directory or an Orbax checkpoint; '' is the task's own
      'task': 'repair',
      'objective': {
        'low': 0.5,  # the masked range of the ratio; `high` also truncates
        'high': 5.0,
      },
      'sampling': {
        'temperature': 1.0,
        'top_p': 0.97,  # these two in the arms with _topp only; the others draw from everything
        'top_k': 8,
        'candidates': 16,  # recorded per token: twice the cap, so that ties at the cutoff fit
      },
      'rollouts': {
        # or lockstep: no threads, a pure function of the seed; or simulated: that too, on a fleet
        # whose time is virtual, so that sessions overlap updates as in async
        'schedule': 'async',
        'prompts_per_update': 16,
        'group_size': 8,
        'in_flight_batches': 1.3,
        'buffered_batches': 2,
        'max_staleness_updates': config_dict.placeholder(int),  # no bound
        'lag_updates': 1,  # lockstep only
        'episode_timeout_secs': 600.0,  # of the run's clock; the first ones wait for compilation
        'virtual': {  # simulated only; a pool's speed is its turns_per_hour
          'update_secs': 60.0,
          'publication_secs': 30.0,  # from the end of an update until replicas serve its weights
          'answer_secs': 2.0,  # an environment's, to one turn
          'session_tokens_per_sec': 4.0,  # of one session, however few there are
          'turn_tokens': 6.0,  # drawn in a turn: what turns_per_hour is in tokens
        },
      },
      'trainer': {
        'learning_rate': 2e-4,
        'b2': 0.98,
        'weight_decay': 0.1,
        'max_grad_norm': 1.0,
        'warmup_updates': 2,
        'compute_dtype': 'float32',  # weights are rounded to bf16 all the same
        'remat': False,
        'offload': '',  # to the host: 'moments', 'residuals' (of remat), or both with a comma
        'freeze_router': False,  # of experts: no gradient and no decay
        'replay_routes': False,  # sends tokens to the experts that their sampler sent them to
        'rows': 8,
        'row_tokens': 160,
        'row_trained_tokens': 80,
        'head_chunk_tokens': 512,
        'mesh': '',  # one device; else sizes of axes, such as 'fsdp=4,context=2'
      },
      'pools': {},
      'drift_every_updates': 0,  # measures the drift of a batch, two more backward passes; 0: never
      'emulate_activations': True,  # native samplers round what their format has a server round
      'block_scale': 'amax',  # or four_over_six: how nvfp4 block scales are chosen
      'evaluation': {'every_updates': 20, 'samples': 4},
      'checkpoints': {'every_updates': 20},
      'wandb_project': '',  # '' logs nowhere but the work directory
    }
  )


def pool(
  accelerator: str,
  weight_format: str,
  *,
  sessions: int,
  turns_per_hour: float | None,
  server: str = 'native',
) -> config_dict.ConfigDict:
  """Returns one pool: replicas of one server configuration.

  Args:
    accelerator: a key of the price table, such as 'H100', '2xH100' where one replica takes two; or
      'CPU', which costs nothing.
    weight_format: a format of the converter.
    sessions: how many a replica decodes at a time.
    turns_per_hour: what one replica serves, stated by whoever measured it; None prices nothing.
    server: 'native', which samples in this process and stands for the accelerator, or 'vllm', which
      starts a vLLM server on it.
  """
  throughput = config_dict.placeholder(float)
  config = config_dict.ConfigDict(
    {
      'accelerator': accelerator,
      'server': server,
      'format': weight_format,
      'kv_cache_dtype': 'fp8',
      'prefix_cache': 'keep',
      'sessions': sessions,
      'turns_per_hour': throughput,
    }
  )
  if turns_per_hour is not None:
    config.turns_per_hour = turns_per_hour
  return config


def default_workdir(config_file: pathlib.Path) -> str:
  """Returns runs/<name of the config>: where a run goes when --workdir is not given."""
  return str(pathlib.Path('runs') / config_file.stem)
