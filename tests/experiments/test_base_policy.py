"""The study's base policy is made once, and named by what it is made from."""

import dataclasses

import jax
import numpy as np

from mimo.experiments import base_policy, pretrain
from mimo.models import decoder
from mimo.weights.checkpoints import load_policy
from mimo.weights.formats import FORMATS
from mimo.weights.views import check_format


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
  np.testing.assert_allclose(
    params['embed']['embedding'], taught['embed']['embedding'], rtol=1e-2, atol=1e-3
  )
  # Another recipe is another policy, beside it.
  recipe = dataclasses.replace(base_policy.RECIPE, rows=1)
  monkeypatch.setattr(base_policy, 'RECIPE', recipe)
  assert base_policy.make(tmp_path / 'work') != path
