import pathlib

import jax
import numpy as np
import pytest

from mimo.models.activations import ActivationQuant
from mimo.models.config import ModelConfig
from mimo.samplers.base import SamplerError
from mimo.samplers.following import Follower
from mimo.types import Version
from mimo.weights.views import View

CONFIG = ModelConfig.from_hf(
  {
    'model_type': 'llama',
    'vocab_size': 8,
    'hidden_size': 4,
    'intermediate_size': 4,
    'num_hidden_layers': 1,
    'num_attention_heads': 1,
    'max_position_embeddings': 8,
    'torch_dtype': 'float32',
  }
)
QUANT = ActivationQuant('fp8_token')


class Feed:
  def __init__(self):
    self.newest = None
    self.broken = set()
    self.opened = []

  def latest(self):
    if isinstance(self.newest, Exception):
      raise self.newest
    return self.newest

  def open(self, version):
    self.opened.append(version.number)
    if version.number in self.broken:
      raise ValueError('shard is corrupt')
    return pathlib.Path(str(version.number))


def follower(feed, *, config=CONFIG, format='bf16', emulate=False, view=None):
  def read(path):
    return view or View(CONFIG, {'w': np.float32(str(path))}, 'bf16', QUANT)

  return Follower(feed, read, pool='p', config=config, format=format, emulate_activations=emulate)


def version(number):
  return Version(number, 0, number)


def test_newer_versions_are_loaded_once():
  feed = Feed()
  follow = follower(feed)
  assert follow.first() is None and follow.poll() is None and follow.version is None
  feed.newest = version(3)
  weights = follow.poll()
  assert float(weights.params['w']) == 3.0 and isinstance(weights.params['w'], jax.Array)
  assert weights.activation_quant is None and follow.version == version(3)
  assert follow.poll() is None and feed.opened == [3]
  feed.newest = version(5)
  assert float(follow.poll().params['w']) == 5.0


def test_activations_are_rounded_only_when_asked():
  feed = Feed()
  feed.newest = version(1)
  assert follower(feed, emulate=True).first().activation_quant.kind == 'fp8_token'
  assert follower(feed, emulate=False).first().activation_quant is None


def test_a_broken_version_is_retried_ever_less_often():
  feed = Feed()
  feed.newest = version(1)
  follow = follower(feed)
  follow.poll()
  feed.newest, feed.broken = version(2), {2}
  tries = []
  for call in range(40):
    before = len(feed.opened)
    assert follow.poll() is None
    tries += [call] * (len(feed.opened) - before)
  # After n failures the next 2^n calls wait.
  assert tries == [0, 3, 8, 17, 34]
  assert follow.version == version(1) and follow.failures == {'load': 5}
  feed.newest = version(3)  # a sound one is not held up by it
  assert follow.poll() is not None


def test_a_broken_version_that_heals_is_served():
  feed = Feed()
  feed.newest, feed.broken = version(2), {2}
  follow = follower(feed)
  assert follow.poll() is None
  feed.broken = set()
  assert [follow.poll() is not None for _ in range(3)] == [False, False, True]


def test_a_feed_that_fails_is_counted():
  feed = Feed()
  feed.newest = OSError('stale file handle')
  follow = follower(feed)
  assert follow.poll() is None and follow.failures == {'poll': 1}
  with pytest.raises(SamplerError, match='pool p: the newest version is unknown: stale file'):
    follow.first()


def test_a_view_of_another_kind_is_refused_by_name():
  feed = Feed()
  feed.newest = version(1)
  other = ModelConfig.from_hf(CONFIG.to_hf() | {'vocab_size': 9})
  with pytest.raises(SamplerError, match='another model: vocab_size 8, expected 9'):
    follower(feed, config=other).first()
  with pytest.raises(SamplerError, match='the view is bf16; expected fp8_block'):
    follower(feed, format='fp8_block').first()


def test_what_config_json_says_beside_the_model_does_not_matter():
  feed = Feed()
  feed.newest = version(1)
  view = View(ModelConfig.from_hf(CONFIG.to_hf() | {'torch_dtype': 'bfloat16'}), {}, 'bf16', None)
  assert view.config != CONFIG
  assert follower(feed, view=view).first() is not None
