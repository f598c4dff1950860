"""How many tokens per CPU-second the native sampler draws and feeds.

    python benchmarks/sampler_throughput.py [--slots=48] [--sessions=256] [--top_p=0.97 --top_k=8]

Random weights of the shape of the `repair` policy (0.75M parameters), served by one sampler inline
on the event loop, 16 candidates a token. Sessions have 20 ids to start with and at most 5 turns,
each of up to 8 tokens; a turn ends early at one of 16 stop ids, and 4 ids of observation follow it.
The first pass compiles and is not counted. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import pathlib
import time

import jax
import numpy as np

from mimo.models.config import ModelConfig
from mimo.models.decoder import init
from mimo.samplers.engine import EngineSettings
from mimo.samplers.native import NativeSampler
from mimo.types import SamplingParams, Source, Version
from mimo.weights.views import View

VOCAB = 128
MAX_TOKENS = 96
CONFIG = ModelConfig.from_hf(
  {
    'model_type': 'qwen3',
    'architectures': ['Qwen3ForCausalLM'],
    'vocab_size': VOCAB,
    'hidden_size': 128,
    'intermediate_size': 384,
    'num_hidden_layers': 3,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 32,
    'rms_norm_eps': 1e-6,
    'rope_theta': 1e4,
    'tie_word_embeddings': True,
    'max_position_embeddings': MAX_TOKENS,
  }
)


class OneVersion:
  """A feed of one version."""

  def latest(self) -> Version:
    return Version(0, 0, 0)

  def open(self, version: Version) -> pathlib.Path:
    return pathlib.Path()


async def episode(sampler: NativeSampler, params: SamplingParams, number: int, seed: int) -> None:
  """One session against an environment that answers at once."""
  rng = np.random.default_rng([seed, number])
  name, key = f'{seed}/{number}', np.array([seed, number], np.uint32)
  tokens = rng.integers(0, VOCAB, 20)
  for _ in range(5):
    sample = await sampler.sample(name, tokens, params, key)
    tokens = np.concatenate([tokens, sample.tokens, rng.integers(0, VOCAB, 4)])
    if len(tokens) >= MAX_TOKENS:
      break
  await sampler.release(name)


async def run(args: argparse.Namespace) -> dict[str, float]:
  """Serves a small pass to compile, then the one that is measured."""
  view = View(CONFIG, init(CONFIG, jax.random.key(0)), 'bf16', None)
  settings = EngineSettings(
    slots=args.slots,
    max_tokens=MAX_TOKENS,
    kv_cache_dtype='bf16',
    decode_steps=args.decode_steps,
    prefill_rows=args.prefill_rows,
    prefill_tokens=args.prefill_tokens,
  )
  sampler = NativeSampler(
    OneVersion(),
    source=Source('benchmark', 'cpu', 'bf16', 'bf16'),
    config=CONFIG,
    settings=settings,
    read_view=lambda path: view,
  )
  params = SamplingParams(
    temperature=1.0,
    top_p=args.top_p,
    top_k=args.top_k,
    candidates=16,
    max_turn_tokens=8,
    stop_ids=tuple(range(16)),
  )
  await sampler.start()
  await asyncio.gather(*(episode(sampler, params, n, 0) for n in range(args.slots + 4)))
  before, wall, cpu = sampler.stats.engine, time.perf_counter(), time.process_time()
  await asyncio.gather(*(episode(sampler, params, n, 1) for n in range(args.sessions)))
  wall, cpu, after = time.perf_counter() - wall, time.process_time() - cpu, sampler.stats.engine
  await sampler.close()
  counts = {
    field.name: getattr(after, field.name) - getattr(before, field.name)
    for field in dataclasses.fields(after)
  }
  fed = counts['sampled_tokens'] + counts['forced_tokens'] + counts['prefilled_tokens']
  return counts | {
    'wall_secs': round(wall, 3),
    'cpu_secs': round(cpu, 3),
    'tokens_per_cpu_sec': round(fed / cpu),
    'sampled_tokens_per_cpu_sec': round(counts['sampled_tokens'] / cpu),
  }


def main() -> None:
  """Reads the flags, measures and prints."""
  parser = argparse.ArgumentParser(description='Measures the native sampler.')
  parser.add_argument('--slots', type=int, default=48)
  parser.add_argument('--sessions', type=int, default=256)
  parser.add_argument('--top_p', type=float, default=1.0)
  parser.add_argument('--top_k', type=int, default=0)
  parser.add_argument('--decode_steps', type=int, default=8)
  parser.add_argument('--prefill_rows', type=int, default=16)
  parser.add_argument('--prefill_tokens', type=int, default=16)
  print(json.dumps(asyncio.run(run(parser.parse_args()))))


if __name__ == '__main__':
  main()
