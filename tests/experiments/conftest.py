"""A policy and a configuration small enough that a whole run takes seconds."""

import pathlib
import runpy
import subprocess

import jax
import pytest
from ml_collections import config_dict

from mimo.experiments import command
from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.tasks.repair import vocabulary
from mimo.weights.huggingface import write_model

ROOT = pathlib.Path(__file__).parents[2]

_MODEL = {
  'model_type': 'qwen3',
  'architectures': ['Qwen3ForCausalLM'],
  'vocab_size': 128,
  'hidden_size': 32,
  'intermediate_size': 64,
  'num_hidden_layers': 1,
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 16,
  'rms_norm_eps': 1e-6,
  'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
  'tie_word_embeddings': True,
  'max_position_embeddings': 128,
  'hidden_act': 'silu',
  'attention_bias': False,
}


@pytest.fixture(scope='session')
def tiny_policy(tmp_path_factory) -> str:
  """A Hugging Face directory of random weights for the repair vocabulary."""
  config = ModelConfig.from_hf(_MODEL)
  directory = tmp_path_factory.mktemp('policy') / 'tiny'
  params = decoder.init(config, jax.random.key(0))
  write_model(directory, config, params, vocabulary.tokenizer_files())
  return str(directory)


@pytest.fixture
def run_command(capsys):
  """Runs a command in this process: (command, its flags) -> exit code, stdout and stderr."""

  def run(ran: command.Command, *flags: str) -> subprocess.CompletedProcess[str]:
    code = ran.run(flags)
    return subprocess.CompletedProcess(flags, code, *capsys.readouterr())

  return run


def load_config(name: str, *argument: str) -> config_dict.ConfigDict:
  """Returns get_config() of a file of configs/."""
  return runpy.run_path(str(ROOT / 'configs' / name))['get_config'](*argument)


@pytest.fixture
def tiny_config(tiny_policy) -> config_dict.ConfigDict:
  """configs/mixed.py with everything made small, in lockstep."""
  config = load_config('mixed.py')
  config.policy = tiny_policy
  config.updates = 4
  config.rollouts.schedule = 'lockstep'
  config.rollouts.prompts_per_update = 2
  config.rollouts.group_size = 2
  config.trainer.rows = 2
  config.trainer.row_tokens = 256
  config.trainer.row_trained_tokens = 128
  config.evaluation.samples = 1
  config.evaluation.every_updates = 0
  config.checkpoints.every_updates = 2
  for pool in config.pools.values():
    pool.sessions = 4
  config.pools.h100_fp8.format = 'fp8_channel'
  return config.lock()
