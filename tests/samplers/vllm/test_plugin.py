import subprocess
import sys

import pytest

from mimo.samplers.vllm import plugin
from mimo.samplers.vllm.launch import PATCHES_VARIABLE

_PROBE = """
import sys
from mimo.samplers.vllm import plugin
plugin.general()
print(sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'torch', 'jax', 'numpy'}))
"""


def _python(code: str) -> subprocess.CompletedProcess:
  command = [sys.executable, '-c', code]
  return subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)


def test_the_general_plugin_is_inert_and_imports_nothing():
  done = _python(_PROBE)
  assert done.stdout.strip() == '[]'


@pytest.mark.vllm
def test_a_server_without_the_variable_is_not_patched():
  probe = """
from mimo.samplers.vllm import plugin
plugin.general()
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum
print('listed', len(linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, [])))
"""
  done = _python(probe)
  assert 'listed 0' in done.stdout


@pytest.mark.vllm
def test_an_unknown_patch_stops_the_server(monkeypatch):
  monkeypatch.setenv(PATCHES_VARIABLE, 'magic')
  with pytest.raises(ValueError, match="names 'magic'"):
    plugin.general()
