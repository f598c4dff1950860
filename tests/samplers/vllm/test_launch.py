import importlib

import pytest

from mimo.samplers.vllm.launch import (
  PATCHES_VARIABLE,
  ServerSettings,
  server_command,
  server_environment,
)


def _settings(**changes):
  return ServerSettings(**({'model': '/view', 'port': 8000} | changes))


def _value(command, flag):
  return command[command.index(flag) + 1]


def test_command_says_what_log_probs_need():
  command = server_command(_settings(max_candidates=128), python='python')
  assert command[:3] == ['python', '-m', 'vllm.entrypoints.openai.api_server']
  assert _value(command, '--logprobs-mode') == 'processed_logprobs'
  assert _value(command, '--max-logprobs') == '129'
  assert _value(command, '--worker-extension-cls').startswith('mimo.samplers.vllm.internals.')
  assert '--hf-overrides' not in command


@pytest.mark.parametrize('flag', ['--worker-extension-cls', '--scheduler-cls'])
def test_what_the_command_names_is_there(flag):
  module, _, name = _value(server_command(_settings()), flag).rpartition('.')
  assert callable(getattr(importlib.import_module(module), name))


def test_a_float32_head_on_bfloat16_activations():
  command = server_command(_settings(dtype='bfloat16'))
  assert _value(command, '--hf-overrides') == '{"head_dtype": "float32"}'


def test_options():
  command = server_command(
    _settings(
      device='gpu',
      kv_cache_dtype='fp8',
      prefix_caching=False,
      tokenizer=True,
      sampling_mask=True,
      extra=('--tensor-parallel-size', '2'),
    )
  )
  assert _value(command, '--kv-cache-dtype') == 'fp8'
  assert '--no-enable-prefix-caching' in command
  assert '--return-sampling-mask' in command
  assert '--skip-tokenizer-init' not in command
  assert '--enforce-eager' not in command
  assert command[-2:] == ['--tensor-parallel-size', '2']


def test_environment_adds_the_plugin_to_those_that_are_there():
  base = {'VLLM_PLUGINS': 'other', 'PATH': '/bin'}
  environment = server_environment(_settings(patches=('moe_reload',), cpu_threads=1), base)
  assert environment['VLLM_PLUGINS'] == 'other,mimo'
  assert environment[PATCHES_VARIABLE] == 'moe_reload'
  assert environment['PATH'] == '/bin'
  assert environment['OMP_NUM_THREADS'] == '1'
  assert server_environment(_settings(), {})['VLLM_PLUGINS'] == 'mimo'
  assert 'VLLM_CPU_KVCACHE_SPACE' not in server_environment(_settings(device='gpu'), {})


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'dtype': 'fp8'}, "dtype is 'fp8'; expected one of"),
    ({'kv_cache_dtype': 'int8'}, "kv_cache_dtype is 'int8'"),
    ({'device': 'tpu'}, "device is 'tpu'"),
    ({'patches': ('magic',)}, "unknown patch 'magic'"),
    ({'sampling_mask': True}, "device='gpu' only"),
  ],
)
def test_refusals(changes, message):
  with pytest.raises(ValueError, match=message):
    _settings(**changes)


def test_routes_need_vllms_second_model_runner_and_a_prefix_cache():
  settings = _settings(routes=True)
  assert '--enable-return-routed-experts' in server_command(settings)
  assert server_environment(settings, {})['VLLM_USE_V2_MODEL_RUNNER'] == '1'
  assert '--enable-return-routed-experts' not in server_command(_settings())
  assert 'VLLM_USE_V2_MODEL_RUNNER' not in server_environment(_settings(), {})
  with pytest.raises(ValueError, match='routes is True and prefix_caching is False; expected True'):
    _settings(routes=True, prefix_caching=False)
