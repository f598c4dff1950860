"""A tiny decoder and trajectories whose streams are drawn at random."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from mimo import types
from mimo.models import decoder
from mimo.models.config import ModelConfig

VOCAB = 24


@pytest.fixture(scope='session')
def model() -> ModelConfig:
  return ModelConfig.from_hf(
    {
      'model_type': 'qwen3',
      'architectures': ['Qwen3ForCausalLM'],
      'vocab_size': VOCAB,
      'hidden_size': 16,
      'intermediate_size': 24,
      'num_hidden_layers': 2,
      'num_attention_heads': 4,
      'num_key_value_heads': 2,
      'head_dim': 8,
      'rms_norm_eps': 1e-6,
      'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
      'tie_word_embeddings': True,
      'max_position_embeddings': 64,
    }
  )


@pytest.fixture(scope='session')
def params(model: ModelConfig) -> dict:
  """Host arrays. The embedding is scaled up: log-probs then differ from token to token."""
  fresh = jax.device_get(decoder.init(model, jax.random.key(0)))
  fresh['embed']['embedding'] = 20 * fresh['embed']['embedding']
  return fresh


def _trajectory(
  rng: np.random.Generator, length: int, *, candidates: int, pool: str, temperature: float
) -> types.Trajectory:
  """Half of the tokens after a prompt of two are sampled, the last included; heads are partial."""
  sampled = np.arange(length) >= 2
  sampled[2:-1] &= rng.random(length - 3) < 0.6
  size = int(sampled.sum())
  tokens = rng.integers(0, VOCAB, length).astype(np.int32)
  offsets, ids, logps, chosen = [0], [], [], []
  for token in tokens[sampled]:
    count = int(rng.integers(1, candidates + 1))
    others = rng.permutation(np.delete(np.arange(VOCAB), token))[: count - 1]
    mass = rng.dirichlet(np.ones(count + 1))
    ids += [token, *others]
    logps += list(np.log(mass[:count]))
    chosen.append(np.log(mass[0]))
    offsets.append(len(ids))
  return types.Trajectory(
    tokens=tokens,
    sampled=sampled,
    logps=np.array(chosen, np.float32),
    candidates=types.Candidates(
      np.array(offsets, np.int64), np.array(ids, np.int32), np.array(logps, np.float32)
    ),
    full_support=np.zeros(size, bool),
    turns=(),
    source=types.Source(pool, 'H100', 'bf16', 'bf16'),
    sampling=types.SamplingParams(temperature, 1.0, 0, candidates, 99, ()),
    logprob_mode='processed',
    prefix_cache='keep',
    end=types.EpisodeEnd.SUBMITTED,
    reward=1.0,
    prompt=types.PromptRef(0, 'train', 0),
    member=0,
    incarnation=0,
  )


@pytest.fixture(scope='session')
def make_trajectories() -> Callable[..., list[types.Trajectory]]:
  def make(
    lengths: list[int],
    *,
    seed: int = 0,
    candidates: int = 4,
    pools: tuple[str, ...] = ('a', 'b'),
    temperature: float = 1.0,
  ) -> list[types.Trajectory]:
    rng = np.random.default_rng(seed)
    return [
      _trajectory(
        rng, n, candidates=candidates, pool=pools[i % len(pools)], temperature=temperature
      )
      for i, n in enumerate(lengths)
    ]

  return make
