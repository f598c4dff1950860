"""Replayed routes from the sampler to the trainer's log-probs.

The sampler holds weights rounded to 16 levels, so that its router chooses other experts here and
there. The references are the model of transformers, whose router is made to return the sampler's
choice by hand.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mimo import objectives
from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.models.moe import route_shape
from mimo.models.table import named_tensors
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.samplers.engine import EngineSettings
from mimo.samplers.native import NativeSampler
from mimo.tasks.base import StepResult
from mimo.trainer import packing, sharding, update
from mimo.trainer.rounding import policy_params
from mimo.trainer.state import TrainerConfig
from mimo.types import EpisodeEnd, PromptRef, SamplingParams, Source, Version
from mimo.weights.views import View, ViewSpec, write_view

VOCAB, K, TURNS = 40, 3, 2
TEMPERATURE = 0.8
CONFIG = TrainerConfig(
  learning_rate=1e-3, max_grad_norm=0.0, warmup_updates=0, head_chunk_tokens=16
)
SAMPLING = SamplingParams(TEMPERATURE, 1.0, 0, K, 7, ())
BUCKET = packing.Bucket(tokens=64, trained=48, rows=2)


@pytest.fixture(scope='module')
def model() -> ModelConfig:
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3_moe',
      'architectures': ['Qwen3MoeForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 32,
      'intermediate_size': 48,
      'moe_intermediate_size': 16,
      'num_experts': 6,
      'num_experts_per_tok': 2,
      'norm_topk_prob': True,
      'decoder_sparse_step': 1,
      'mlp_only_layers': [],
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 8,
      'rms_norm_eps': 1e-6,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
      'tie_word_embeddings': False,
      'max_position_embeddings': 64,
      'hidden_act': 'silu',
      'attention_bias': False,
    }
  )


@pytest.fixture(scope='module')
def params(model):
  """Host arrays. The head is scaled up: log-probs then differ from token to token."""
  fresh = jax.device_get(decoder.init(model, jax.random.key(0)))
  fresh['embed']['embedding'] = 20 * fresh['embed']['embedding']
  fresh['head']['kernel'] = 20 * fresh['head']['kernel']
  return fresh


def _rounded(x):
  scale = np.abs(x).max() / 8
  return np.round(x / scale) * scale if x.ndim > 1 else x


class _Feed:
  def latest(self):
    return Version(0, 0, 0)

  def open(self, version):
    return pathlib.Path('0')


class _Episode:
  """Answers three ids to each turn but the last."""

  def __init__(self, index):
    self._left = TURNS
    self.prompt = np.random.default_rng(index).integers(0, VOCAB, 3 + 6 * index).astype(np.int32)

  async def step(self, tokens, finish):
    self._left -= 1
    if not self._left:
      return StepResult(np.zeros(0, np.int32), EpisodeEnd.SUBMITTED, 1.0)
    return StepResult(np.array([1, 2, 3], np.int32), None, 0.0)

  async def close(self): ...


class _Task:
  max_tokens = 48

  def start(self, split, index):
    return _Episode(index)


@pytest.fixture(scope='module')
def trajectories(model, params):
  """Three episodes of two turns, from the rounded weights."""
  view = View(model, jax.tree.map(_rounded, params), 'bf16', None)
  settings = EngineSettings(
    slots=2, max_tokens=48, kv_cache_dtype='bf16', prefill_tokens=8, routes=True
  )
  sampler = NativeSampler(
    _Feed(),
    source=Source('p', 'H100', 'bf16', 'bf16'),
    config=model,
    settings=settings,
    read_view=lambda path: view,
  )
  assert sampler.contract.routes == route_shape(model)

  async def play():
    await sampler.start()
    try:
      specs = [
        EpisodeSpec(str(i), PromptRef(0, 'train', i), i, 0, SAMPLING, key, None)
        for i, key in enumerate(np.arange(6, dtype=np.uint32).reshape(3, 2))
      ]
      return await asyncio.gather(*(run_episode(_Task(), sampler, spec) for spec in specs))
    finally:
      await sampler.close()

  attempts = asyncio.run(play())
  assert [attempt.error for attempt in attempts] == [None] * 3
  return [attempt.trajectory for attempt in attempts]


def _pack(trajectories, model):
  return packing.pack(
    trajectories,
    np.array([1.0, -0.5, 2.0]),
    buckets=[BUCKET],
    num_candidates=K,
    sources=['p'],
    temperature=TEMPERATURE,
    routes=route_shape(model),
  )


@pytest.fixture(scope='module')
def spec(model):
  mesh = sharding.make_mesh()
  config = dataclasses.replace(CONFIG, replay_routes=True)
  return update.Spec(model, config, objectives.arm('sc_mis').correction, TEMPERATURE, 1, mesh)


@pytest.fixture(scope='module')
def logps(spec, params, trajectories):
  """(change of the batch's routes) -> the log-probs of each trajectory's sampled tokens."""
  batch = _pack(trajectories, spec.model)
  (micro,) = batch.micro
  run = jax.jit(lambda p, m: update.token_logps(spec, policy_params(p), m)[0][..., 0])

  def find(change=lambda ids: ids):
    found = np.asarray(run(params, micro._replace(routes=change(micro.routes))))
    parts = zip(trajectories, batch.placements, strict=True)
    return [found[at.row, at.trained : at.trained + t.num_sampled] for t, at in parts]

  return find


def _reference(directory, trajectory, routes):
  """Log-probs of the sampled tokens by transformers in float64, the router's choice given.

  And whether its own would have been another, [L, S].
  """
  import torch
  import transformers
  from transformers.models.qwen3_moe import modeling_qwen3_moe

  class Given(modeling_qwen3_moe.Qwen3MoeTopKRouter):
    def forward(self, hidden_states):
      logits = torch.nn.functional.linear(hidden_states, self.weight)
      ids = torch.topk(logits, self.top_k, dim=-1)[1]
      own, ids = ids, torch.where(self.given >= 0, self.given, ids)
      self.differs = (own.sort(-1)[0] != ids.sort(-1)[0]).any(-1)
      weights = torch.softmax(logits, dim=-1).gather(-1, ids)
      return logits, weights / weights.sum(-1, keepdim=True), ids

  loaded = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float64, experts_implementation='eager'
  )
  for layer, block in enumerate(loaded.model.layers):
    block.mlp.gate.__class__ = Given
    block.mlp.gate.given = torch.tensor(routes[:, layer].astype(np.int64))
  with torch.no_grad():
    logits = loaded(torch.tensor(trajectory.tokens[None].astype(np.int64))).logits[0]
  found = torch.log_softmax(logits / TEMPERATURE, dim=-1).numpy()
  at = np.flatnonzero(trajectory.sampled)
  differs = np.stack([block.mlp.gate.differs.numpy() for block in loaded.model.layers])
  return found[at - 1, trajectory.tokens[at]], differs[:, at - 1]


@functools.cache
def _trainer(spec):
  return update.Trainer(
    spec.model,
    spec.config,
    correction=spec.correction,
    temperature=spec.temperature,
    num_sources=1,
    mesh=spec.mesh,
  )


def _update(spec, params, trajectories, **changes):
  batch = _pack(trajectories, spec.model)
  batch = dataclasses.replace(batch, micro=(batch.micro[0]._replace(**changes),))
  trainer = _trainer(spec)
  assert trainer.routes == route_shape(spec.model)
  return trainer.update(trainer.init_state(params), batch)


@pytest.mark.reference
def test_log_probs_are_those_of_the_samplers_choice(spec, params, trajectories, logps, tmp_path):
  """Packed behind one another; with routes shifted by a token, or without, they are others."""
  model, differs = spec.model, []
  policy = jax.tree.map(lambda x: jnp.asarray(x).astype(jnp.bfloat16), params)
  write_view(tmp_path, model, named_tensors(model, policy), ViewSpec('bf16'), tokenizer_files={})
  replayed, free = logps(), logps(lambda ids: np.full_like(ids, -1))
  apart = 0.0
  for trajectory, ours, own in zip(trajectories, replayed, free, strict=True):
    assert (trajectory.routes[:-1] >= 0).all() and (trajectory.routes[-1] == -1).all()
    expected, other = _reference(tmp_path, trajectory, trajectory.routes)
    differs += other.mean(axis=0).tolist()
    np.testing.assert_allclose(ours, expected, atol=2e-5)
    none, _ = _reference(tmp_path, trajectory, np.full_like(trajectory.routes, -1))
    np.testing.assert_allclose(own, none, atol=2e-5)
    apart = max(apart, np.abs(expected - none).max())
  assert apart > 0.01, 'the sampler chose as the trainer does: nothing was tested'
  _, metrics = _update(spec, params, trajectories)
  assert float(metrics['aux']['routed_sum'][0]) == len(differs)
  share = float(metrics['aux']['route_difference_sum'][0]) / len(differs)
  assert share == pytest.approx(np.mean(differs), abs=1e-6) and 0.0 < share < 0.9
  shifted = logps(lambda ids: np.roll(ids, 1, axis=1))
  assert max(np.abs(a - b).max() for a, b in zip(shifted, replayed, strict=True)) > 0.01


def test_what_differs_is_replayed_and_the_gradient_follows(spec, params, trajectories):
  """The router still learns: its weights of the chosen experts are this model's."""
  state, metrics = _update(spec, params, trajectories)
  assert float(metrics['grad_norm']) > 0 and float(metrics['skipped']) == 0
  router = state.params['layers']['moe']['router']['kernel']
  assert np.abs(np.asarray(router) - params['layers']['moe']['router']['kernel']).max() > 1e-4
  with pytest.raises(ValueError, match='replay_routes is True and the batch brings no routes'):
    _update(spec, params, trajectories, routes=None)


def test_every_mesh_replays_alike(spec, params, trajectories):
  batch = _pack(trajectories, spec.model)
  (micro,) = batch.micro
  denominator = np.float32(batch.trained)
  found = []
  for sizes in ({}, {'expert': 2, 'context': 2}):
    trainer = update.Trainer(
      spec.model,
      spec.config,
      correction=spec.correction,
      temperature=spec.temperature,
      num_sources=1,
      mesh=sharding.make_mesh(**sizes),
    )
    placed = sharding.place(micro, trainer.mesh)
    held = trainer.init_state(params).params
    count = jax.device_put(denominator, sharding.replicated(trainer.mesh))
    total = trainer.micro_step(held, trainer.zero_total(held), placed, count)
    found.append(jax.device_get(total))
  assert placed.routes.sharding.spec[1] in ('context', ('context',))
  np.testing.assert_allclose(found[1].loss, found[0].loss, rtol=1e-5)
  for one, other in zip(
    jax.tree.leaves(found[0].grads), jax.tree.leaves(found[1].grads), strict=True
  ):
    assert np.linalg.norm(one - other) <= 1e-4 * np.linalg.norm(one)


def test_a_model_without_experts_has_none_to_replay(spec, model):
  dense = dataclasses.replace(model, family='qwen3', moe=None, intermediate_size=48)
  with pytest.raises(ValueError, match='replay_routes is True of a qwen3 model; expected one with'):
    update.Trainer(
      dense,
      spec.config,
      correction=spec.correction,
      temperature=spec.temperature,
      num_sources=1,
      mesh=spec.mesh,
    )
