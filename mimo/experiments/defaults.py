"""What an experiment states where its file of configs/ states nothing else.

A file of configs/ takes `base(arm)`, adds its pools and changes what it is about. Defaults are
those of the sections that `mimo.experiments.schema` composes: what the `repair` runs use.
"""

from __future__ import annotations

import pathlib

from ml_collections import config_dict

from mimo import fleet
from mimo.experiments import schema


def base(arm: str) -> config_dict.ConfigDict:
  """Returns the defaults, unlocked and without pools."""
  return schema.defaults(schema.Experiment, arm=arm)


def pool(
  accelerator: str,
  weight_format: str,
  *,
  sessions: int,
  turns_per_hour: float | None,
  server: str = fleet.Pool.server,
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
  stated = {'accelerator': accelerator, 'format': weight_format, 'server': server}
  config = schema.defaults(fleet.Pool, sessions=sessions, **stated)
  if turns_per_hour is not None:
    config.turns_per_hour = turns_per_hour
  return config


def default_workdir(config_file: pathlib.Path) -> str:
  """Returns runs/<name of the config>: where a run goes when --workdir is not given."""
  return str(pathlib.Path('runs') / config_file.stem)
