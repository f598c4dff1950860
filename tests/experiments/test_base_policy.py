"""The study's base policy is made once, and named by what it is made from."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo.experiments import base_policy, pretrain
from mimo.models import decoder
from mimo.models.table import named_tensors
from mimo.weights.checkpoints import load_policy
from mimo.weights.formats import FORMATS
from mimo.weights.views import ViewSpec, check_format, read_view, write_view


def test_every_format_holds_it():
  for name in FORMATS:
    check_format(base_policy.MODEL, name)


def test_it_is_made_once(tmp_path, monkeypatch):
  taught = decoder.init(base_policy.MODEL, jax.random.key(0))
  calls = []

  def teach(recipe, seed, on_step, model):
    calls.append((recipe, model))
    return taught

  monkeypatch.setattr(pretrain, 'teach', teach)
  path = base_policy.make(tmp_path / 'work')
  assert base_policy.make(tmp_path / 'work') == path
  assert calls == [(base_policy.RECIPE, base_policy.MODEL)]
  model, params, _ = load_policy(str(path))
  assert model.hidden_size == base_policy.MODEL.hidden_size
  expected = base_policy.with_unlike_channels(model, taught, base_policy.OCTAVES, 0)
  jax.tree.map(
    lambda got, x: np.testing.assert_allclose(got, x, rtol=1e-2, atol=1e-3), params, expected
  )
  # Another recipe is another policy, beside it.
  recipe = dataclasses.replace(base_policy.RECIPE, rows=1)
  monkeypatch.setattr(base_policy, 'RECIPE', recipe)
  assert base_policy.make(tmp_path / 'work') != path


def _logits(params):
  tokens = jax.random.randint(jax.random.key(1), (4, 24), 0, base_policy.MODEL.vocab_size)
  segment_ids = jnp.ones_like(tokens)
  positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
  hidden = decoder.forward(base_policy.MODEL, params, tokens, segment_ids, positions)
  return np.asarray(hidden @ decoder.head_matrix(base_policy.MODEL, params))


def test_unlike_channels_are_the_same_function_and_quantise_worse(tmp_path):
  params = decoder.init(base_policy.MODEL, jax.random.key(0))
  rounded = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16), np.float32), params)
  unlike = base_policy.with_unlike_channels(base_policy.MODEL, rounded, 1.75, 0)
  np.testing.assert_array_equal(_logits(unlike), _logits(rounded))
  for module in ('q_proj', 'v_proj', 'o_proj'):
    ours, theirs = (p['layers']['attention'][module]['kernel'] for p in (unlike, rounded))
    assert not np.array_equal(ours, theirs)

  def error(name, params):
    tensors = ((n, x.astype(jnp.bfloat16)) for n, x in named_tensors(base_policy.MODEL, params))
    write_view(
      tmp_path / name, base_policy.MODEL, tensors, ViewSpec('nvfp4_w4a16'), tokenizer_files={}
    )
    return np.abs(_logits(read_view(tmp_path / name).params) - _logits(params)).mean()

  assert error('unlike', unlike) > 2 * error('as_learned', rounded)
  same = base_policy.with_unlike_channels(base_policy.MODEL, rounded, 0.0, 0)
  jax.tree.map(np.testing.assert_array_equal, same, rounded)


def test_unlike_channels_are_of_a_model_that_can_have_them():
  experts = types.SimpleNamespace(family='qwen3_moe', num_heads=4, num_kv_heads=4)
  with pytest.raises(ValueError, match="the family is 'qwen3_moe'; expected llama or qwen3"):
    base_policy.with_unlike_channels(experts, {}, 1.0, 0)
  config = dataclasses.replace(base_policy.MODEL, num_kv_heads=2)
  with pytest.raises(ValueError, match='2 key heads for 4 heads'):
    base_policy.with_unlike_channels(config, {}, 1.0, 0)


def test_the_command_refuses_what_it_cannot_mean(tmp_path, run_command):
  def say(*flags):
    done = run_command(base_policy.COMMAND, *flags)
    assert done.returncode == 1
    return done.stderr

  assert f'--out={tmp_path} exists' in say(f'--out={tmp_path}')
  assert '--octaves is -1.0; expected 0 to 8' in say(f'--out={tmp_path}/new', '--octaves=-1')
