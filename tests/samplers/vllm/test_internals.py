"""Real vLLM engines against the native sampler's arithmetic, and across reloads."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.models.decoder import forward, head_matrix
from mimo.samplers.vllm import internals
from mimo.samplers.vllm.launch import (
  PATCHES_VARIABLE,
  ServerSettings,
  server_environment,
)
from mimo.weights.huggingface import TensorReader, write_tensors
from mimo.weights.views import read_view

VOCAB = 512
FORMATS = {'bf16': (), 'fp8_channel': (), 'nvfp4_w4a4': ('nvfp4_emulation',)}
CHILD = pathlib.Path(__file__).with_name('engine_child.py')


@pytest.mark.parametrize(
  ('version', 'tested'),
  [('0.30.0', False), ('0.31.2', False), ('0.32.0', True), ('0.32.0+cpu', True), ('0.32.9', False)],
)
def test_supported_versions(version, tested):
  assert internals.check_version(version) is tested


@pytest.mark.parametrize('version', ['0.29.3', '0.33.0', '1.0.0', 'dev'])
def test_other_versions_are_a_clear_error(version):
  with pytest.raises(ValueError, match=rf'vLLM {version} is not supported; expected 0\.30 to 0\.'):
    internals.check_version(version)


def test_unknown_patches_are_refused(monkeypatch):
  monkeypatch.setenv(PATCHES_VARIABLE, 'moe_reload,magic')
  with pytest.raises(ValueError, match="names 'magic'; expected some of"):
    internals.requested_patches()


def test_progress_counts_steps_and_tokens():
  class Scheduler:
    num_running_reqs, num_waiting_reqs, num_skipped_waiting_reqs = 3, 2, 1

  class Iteration:
    num_generation_tokens = 5

  progress = internals.Progress()
  progress.record(Scheduler, Iteration, mm_cache_stats=None, engine_idx=0)
  progress.record(None, None)
  found = (progress.steps, progress.tokens, progress.running, progress.waiting)
  assert found == (2, 5, 3, 3)


@pytest.mark.vllm
def test_contract():
  """All that mimo relies on is there; and a name that is not there would be found out."""
  internals.check_version(internals.vllm_version())
  internals.check_internals()
  assert not internals.resolves('vllm.sampling_params:SamplingParams.no_such_field')
  assert not internals.resolves('vllm.no_such_module:Thing')


def _bad_views(view, root):
  """Views whose files are whole, and that a running server must not take."""
  (shard,) = view.glob('*.safetensors')
  reader = TensorReader(view)
  tensors = {name: reader.read(name) for name in reader.names()}
  name = next(name for name in tensors if 'k_proj' in name)
  without = {key: value for key, value in tensors.items() if key != name}
  more = {**tensors, 'model.layers.0.self_attn.x_proj.weight': np.zeros((1, 1), np.float32)}
  found = []
  for label, content in {'missing': without, 'more': more}.items():
    directory = root / label
    shutil.copytree(view, directory)
    (directory / shard.name).unlink()
    write_tensors(directory, content.items())
    found.append(str(directory))
  return found


def _run_child(first, second, bad, patches, tmp_path, vocab=VOCAB):
  job = {
    'first': str(first),
    'second': str(second),
    'bad': bad,
    'vocab': vocab,
    'out': str(tmp_path / 'out.npz'),
  }
  (tmp_path / 'job.json').write_text(json.dumps(job))
  settings = ServerSettings(model=str(first), port=1, patches=patches, cpu_threads=2)
  environment = server_environment(settings, os.environ) | {'VLLM_ENABLE_V1_MULTIPROCESSING': '0'}
  environment.pop('XLA_FLAGS', None)
  done = subprocess.run(
    [sys.executable, str(CHILD), str(tmp_path / 'job.json')],
    env=environment,
    capture_output=True,
    text=True,
    timeout=400,
    check=False,
  )
  assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
  for patch in patches:
    assert f'vLLM is patched in this process: {patch}' in done.stdout + done.stderr
  out = np.load(tmp_path / 'out.npz')
  return {key: out[key] for key in out.files}, json.loads(str(out['facts']))


def _logps(view, prompts, found):
  """Own log-probs [P, S, 1 + n] of the ids that vLLM recorded, from one full forward."""
  tokens = np.concatenate([prompts, found['tokens']], axis=1)
  positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  hidden = jax.jit(forward, static_argnums=0)(
    view.config,
    view.params,
    tokens,
    np.ones_like(tokens),
    positions,
    activation_quant=view.activation_quant,
  )
  logits = hidden.astype(jnp.float32) @ head_matrix(view.config, view.params)
  logps = np.asarray(jax.nn.log_softmax(logits, axis=-1))[:, prompts.shape[1] - 1 : -1]
  return np.take_along_axis(logps, found['ids'], axis=2)


def _select(out, name):
  return {key: out[f'{name}.{key}'] for key in ('tokens', 'ids', 'logps')}


def _assert_same(one, other):
  for key, value in one.items():
    np.testing.assert_array_equal(value, other[key], err_msg=key)


@pytest.mark.vllm
@pytest.mark.parametrize('name', list(FORMATS))
def test_format_against_the_native_arithmetic_and_across_reloads(name, views, tmp_path):
  bad = _bad_views(views[name, 0], tmp_path)
  out, facts = _run_child(views[name, 0], views[name, 1], bad, FORMATS[name], tmp_path)

  cold = _select(out, 'cold_first')
  own = _logps(read_view(views[name, 0], exact=True), out['prompts'], cold)
  error = np.abs(own - cold['logps']).mean()
  plain = _logps(read_view(views['bf16', 0]), out['prompts'], cold)
  distance = np.abs(plain - own).mean()
  print(f'{name}: mean |difference| {error:.2e} nats; to bf16 {distance:.2e}')
  if name == 'bf16':
    assert error <= 1e-4
  else:
    assert error <= 0.02
    assert error < distance / 5

  _assert_same(_select(out, 'reloaded'), cold)
  _assert_same(_select(out, 'back'), cold)
  _assert_same(_select(out, 'healed'), cold)
  _assert_same(_select(out, 'swapped'), _select(out, 'cold_second'))
  assert (_select(out, 'swapped')['logps'] != cold['logps']).any()
  assert facts['differ'] and facts['same_first'] and all(facts['same_second'])
  assert facts['tensors'] == len(TensorReader(views[name, 0]).names())
  missing, more = facts['failures']
  assert 'LoadError' in missing and 'qkv_proj' in missing
  assert 'x_proj' in more


def _write_moe(directory, seed):
  """A mixture of experts by another writer: the models of mimo are dense."""
  import torch
  import transformers

  torch.manual_seed(seed)
  config = transformers.Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    max_position_embeddings=256,
    initializer_range=0.2,
  )
  transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


@pytest.mark.vllm
def test_a_mixture_of_experts_reloads_as_a_cold_start(tmp_path):
  for seed in (0, 1):
    _write_moe(tmp_path / f'moe{seed}', seed)
  patches = ('moe_reload',)
  out, facts = _run_child(tmp_path / 'moe0', tmp_path / 'moe1', [], patches, tmp_path)
  _assert_same(_select(out, 'reloaded'), _select(out, 'cold_first'))
  _assert_same(_select(out, 'swapped'), _select(out, 'cold_second'))
  _assert_same(_select(out, 'back'), _select(out, 'cold_first'))
  assert facts['differ']
