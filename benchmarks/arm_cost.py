"""What the corrections cost: the trainer's whole update, one arm against another.

    python -m benchmarks.arm_cost [--size repair|wide] [--arms grpo_topp sc_mis_topp ...]

Same model, same batch, same compiled shapes; the arms take turns in one run, and a round's times
are divided by each other. The batch is random: each trained token has a full support of K
candidates, so that every arm replays.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import common
from mimo.models.config import ModelConfig
from mimo.models.decoder import init
from mimo.objectives import arm
from mimo.trainer.packing import Batch, Bucket, MicroBatch, empty_micro_batch
from mimo.trainer.sharding import make_mesh
from mimo.trainer.state import TrainerConfig
from mimo.trainer.update import Trainer

_QWEN3 = {'model_type': 'qwen3', 'architectures': ['Qwen3ForCausalLM'], 'rms_norm_eps': 1e-6}

# name -> (vocabulary, width, feed-forward width, layers, candidates, bucket)
SIZES = {
  'repair': (128, 128, 384, 3, 16, Bucket(rows=16, tokens=256, trained=128)),
  'wide': (8192, 256, 768, 4, 128, Bucket(rows=8, tokens=256, trained=128)),
}


def model_config(vocab: int, width: int, mlp: int, layers: int) -> ModelConfig:
  """A small Qwen3 with a tied head."""
  return ModelConfig.from_hf(
    {
      **_QWEN3,
      'vocab_size': vocab,
      'hidden_size': width,
      'intermediate_size': mlp,
      'num_hidden_layers': layers,
      'num_attention_heads': width // 32,
      'num_key_value_heads': width // 64,
      'head_dim': 32,
      'max_position_embeddings': 1024,
      'rope_theta': 10000.0,
      'tie_word_embeddings': True,
    }
  )


def random_batch(bucket: Bucket, vocab: int, candidates: int) -> Batch:
  """One full micro-batch, each row one segment whose last `trained` tokens are trained on."""
  rng = np.random.default_rng(0)
  rows, length, trained = bucket.rows, bucket.tokens, bucket.trained
  empty = empty_micro_batch(bucket, candidates)
  shape = empty.candidate_ids.shape
  ids = np.argsort(rng.random((*shape[:2], vocab)), axis=-1)[..., :candidates].astype(np.int32)
  logits = rng.normal(size=shape)
  logq = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
  predict = np.arange(length - trained - 1, length - 1, dtype=np.int32)
  micro = MicroBatch(
    tokens=rng.integers(0, vocab, (rows, length)).astype(np.int32),
    segment_ids=np.ones((rows, length), np.int32),
    positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
    predict=np.broadcast_to(predict, (rows, trained)).copy(),
    targets=ids[..., 0],
    mask=np.ones((rows, trained), bool),
    logp_sampler=logq[..., 0],
    candidate_ids=ids,
    candidate_logps=logq,
    full_support=np.ones((rows, trained), bool),
    adv=rng.normal(size=(rows, trained)).astype(np.float32),
    source=rng.integers(0, 3, (rows, trained)).astype(np.int32),
  )
  return Batch(
    micro=(micro,),
    placements=(),
    trained=rows * trained,
    tokens=rows * length,
    capacity=rows * length,
  )


def updater(name: str, model: ModelConfig, batch: Batch) -> Callable[[], Any]:
  """Returns a function that makes one update of this arm and returns its metrics."""
  trainer = Trainer(
    model,
    TrainerConfig(learning_rate=1e-6, max_grad_norm=0.0, warmup_updates=0),
    correction=arm(name).correction,
    temperature=1.0,
    num_sources=3,
    mesh=make_mesh(),
  )
  state = trainer.init_state(init(model, jax.random.key(0)))

  def update() -> Any:
    nonlocal state
    state, metrics = trainer.update(state, batch)
    return jax.block_until_ready(metrics['loss'])

  return update


def main() -> None:
  """Prints one Markdown table row per arm, with ratios to the first."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--size', choices=sorted(SIZES), default='repair')
  parser.add_argument(
    '--arms', nargs='+', default=['grpo_topp', 'mis_topp', 'sc_topp', 'sc_mis_topp']
  )
  parser.add_argument('--rounds', type=int, default=20)
  args = parser.parse_args()

  vocab, width, mlp, layers, candidates, bucket = SIZES[args.size]
  model = model_config(vocab, width, mlp, layers)
  batch = random_batch(bucket, vocab, candidates)
  programs = {name: updater(name, model, batch) for name in args.arms}
  timings = common.interleaved(programs, args.rounds)
  print(common.machine())
  print(
    f'V={vocab} D={width} {layers} layers, {bucket.rows} rows of {bucket.tokens} tokens, '
    f'{bucket.trained} trained in each, K={candidates}; {args.rounds} rounds'
  )
  common.print_timings(timings, args.arms[0])


if __name__ == '__main__':
  main()
