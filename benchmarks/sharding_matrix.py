"""Every mesh against one device, on 8 simulated ones: loss, gradients, auxiliary sums.

    python -m benchmarks.sharding_matrix [--models dense moe hybrid] [--meshes fsdp=8 context=4]

Rows are packed with sequences of random lengths, so that they cross the borders between devices
that share a row. For each mesh: the relative error of the loss, the largest relative error of a
parameter's gradient (norm of the difference over the norm), and of the auxiliary sums.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from mimo import objectives
from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.trainer import packing, sharding
from mimo.trainer.state import TrainerConfig
from mimo.trainer.update import Trainer

VOCAB = 48
ROWS, TOKENS, TRAINED, CANDIDATES = 8, 64, 40, 5
LIMIT = 1e-5

MESHES = (
  'data=8',
  'fsdp=8',
  'tensor=8',
  'tensor=4',
  'tensor=2',
  'expert=2',
  'expert=4',
  'expert=8',
  'context=2',
  'context=4',
  'context=8',
  'data=2,fsdp=2,tensor=2',
  'fsdp=2,context=2,tensor=2',
  'fsdp=2,expert=2,context=2',
  'fsdp=2,expert=2,tensor=2',
  'expert=2,context=2,tensor=2',
  'expert=4,context=2',
  'data=2,context=4',
)

_DENSE: dict[str, Any] = {
  'model_type': 'qwen3',
  'architectures': ['Qwen3ForCausalLM'],
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'intermediate_size': 48,
  'num_hidden_layers': 2,
  'num_attention_heads': 8,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'rms_norm_eps': 1e-6,
  'rope_parameters': {'rope_type': 'default', 'rope_theta': 10000.0},
  'tie_word_embeddings': True,
  'max_position_embeddings': 256,
}
_MOE = {key: value for key, value in _DENSE.items() if key != 'intermediate_size'} | {
  'model_type': 'qwen3_moe',
  'architectures': ['Qwen3MoeForCausalLM'],
  'num_experts': 8,
  'num_experts_per_tok': 3,
  'moe_intermediate_size': 16,
  'norm_topk_prob': True,
  'tie_word_embeddings': False,
}
# Gated delta nets and gated attention in turn. Where a delta net's result is near zero its norm
# divides by eps: at 1e-6 float32's own rounding can move gradients by 1e-4, also between one device
# and rows apart on 8.
_HYBRID = _MOE | {
  'model_type': 'qwen3_5_moe_text',
  'architectures': ['Qwen3_5MoeForCausalLM'],
  'num_hidden_layers': 4,
  'layer_types': ['linear_attention', 'full_attention'] * 2,
  'rms_norm_eps': 1e-3,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 8,
  'linear_conv_kernel_dim': 4,
  'shared_expert_intermediate_size': 16,
  'rope_parameters': {
    'rope_type': 'default',
    'rope_theta': 10000.0,
    'partial_rotary_factor': 0.25,
  },
}
MODELS: dict[str, dict[str, Any]] = {'dense': _DENSE, 'moe': _MOE, 'hybrid': _HYBRID}


class Case(NamedTuple):
  """A model, its host parameters, and one packed micro-batch."""

  model: ModelConfig
  params: Any
  micro: packing.MicroBatch


def make_case(name: str) -> Case:
  """Returns the case of a model of `MODELS`.

  Its embedding is large, so that log-probs differ, and its delta nets remember for between a few
  and hundreds of tokens, so that what crosses devices matters: fresh ones forget within a token.
  """
  model = ModelConfig.from_hf(MODELS[name])
  params = jax.device_get(decoder.init(model, jax.random.key(0)))
  params['embed']['embedding'] = 20 * params['embed']['embedding']
  rng = np.random.default_rng(0)

  def slow(path: Any, x: Any) -> Any:
    remembers = rng.uniform(3, 300, np.shape(x)).astype(np.float32)
    return -np.log(remembers) if path[-1].key == 'A_log' else x

  params = jax.tree_util.tree_map_with_path(slow, params)
  return Case(model, params, _micro_batch(np.random.default_rng(0)))


def _micro_batch(rng: np.random.Generator) -> packing.MicroBatch:
  """Rows of sequences of 3 to 40 tokens, the last of them cut, some padding at the end of most."""
  bucket = packing.Bucket(tokens=TOKENS, trained=TRAINED, rows=ROWS)
  micro = packing.empty_micro_batch(bucket, CANDIDATES)
  for row in range(ROWS):
    used = TOKENS - int(rng.integers(0, 8))
    start, segment, trained = 0, 1, []
    while start < used:
      length = min(int(rng.integers(3, 41)), used - start)
      micro.segment_ids[row, start : start + length] = segment
      micro.positions[row, start : start + length] = np.arange(length)
      trained += [t for t in range(start + 1, start + length) if rng.random() < 0.7]
      start, segment = start + length, segment + 1
    micro.tokens[row, :used] = rng.integers(0, VOCAB, used)
    at = np.array(trained[:TRAINED])
    micro.predict[row, : len(at)] = at - 1
    micro.targets[row, : len(at)] = micro.tokens[row, at]
    micro.mask[row, : len(at)] = True
  masses = rng.dirichlet(np.ones(CANDIDATES + 2), (ROWS, TRAINED)).astype(np.float32)
  ids = np.argsort(rng.random((ROWS, TRAINED, VOCAB)))[..., :CANDIDATES].astype(np.int32)
  ids[..., 0] = np.where((ids[..., 1:] == micro.targets[..., None]).any(-1), -1, micro.targets)
  return micro._replace(
    candidate_ids=ids,
    candidate_logps=np.log(masses[..., :CANDIDATES]),
    logp_sampler=np.log(masses[..., 0]),
    adv=rng.normal(size=(ROWS, TRAINED)).astype(np.float32),
    source=rng.integers(0, 2, (ROWS, TRAINED)).astype(np.int32),
  )


def totals(case: Case, mesh: str, **changes: Any) -> Any:
  """Returns the sums over the micro-batch on a mesh, on the host: gradients, loss, aux."""
  trainer = Trainer(
    case.model,
    TrainerConfig(
      learning_rate=1e-3, max_grad_norm=0.0, warmup_updates=0, head_chunk_tokens=32, **changes
    ),
    correction=objectives.arm('sc_mis').correction,
    temperature=1.0,
    num_sources=2,
    mesh=sharding.make_mesh(**TrainerConfig(mesh=mesh).mesh_sizes()),
  )
  params = trainer.init_state(case.params).params
  denominator = jax.device_put(np.float32(case.micro.mask.sum()), sharding.replicated(trainer.mesh))
  micro = sharding.place(case.micro, trainer.mesh)
  total = trainer.micro_step(params, trainer.zero_total(params), micro, denominator)
  return jax.device_get(total)


class Errors(NamedTuple):
  """Relative errors, and the parameter whose gradient has the largest."""

  loss: float
  gradient: float
  aux: float
  worst: str


def compare(got: Any, want: Any) -> Errors:
  """Returns the errors of one mesh's totals."""
  errors = {}
  for (path, x), y in zip(
    jax.tree_util.tree_leaves_with_path(got.grads), jax.tree.leaves(want.grads), strict=True
  ):
    errors[jax.tree_util.keystr(path)] = _relative(x, y)
  worst = max(errors, key=lambda name: errors[name])
  aux = max(_relative(got.aux[name], want.aux[name]) for name in want.aux)
  return Errors(_relative(got.loss, want.loss), errors[worst], aux, worst)


def _relative(x: np.ndarray, y: np.ndarray) -> float:
  x, y = np.float64(x), np.float64(y)
  norm = np.linalg.norm(y)
  return float(np.linalg.norm(x - y) / norm) if norm else float(np.linalg.norm(x))


def main() -> None:
  """Prints one Markdown table row per model and mesh."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--models', nargs='+', default=list(MODELS), choices=list(MODELS))
  parser.add_argument('--meshes', nargs='+', default=list(MESHES))
  parser.add_argument('--remat', action='store_true')
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 8)
  jax.config.update('jax_disable_most_optimizations', True)  # compiling takes the time here
  print(f'{ROWS} rows of {TOKENS} tokens, float32; relative errors against one device')
  print('| model | mesh | loss | gradient | aux | secs |')
  print('|---|---|---|---|---|---|')
  bad = []
  for name in args.models:
    case = make_case(name)
    want = totals(case, '', remat=args.remat)
    for mesh in args.meshes:
      begin = time.perf_counter()
      errors = compare(totals(case, mesh, remat=args.remat), want)
      secs = time.perf_counter() - begin
      print(
        f'| {name} | {mesh} | {errors.loss:.1e} | {errors.gradient:.1e} | {errors.aux:.1e} '
        f'| {secs:.0f} |',
        flush=True,
      )
      if max(errors.loss, errors.gradient) > LIMIT:
        bad.append(f'{name} {mesh}: {errors}')
  for line in bad:
    print(line)
  raise SystemExit(1 if bad else 0)


if __name__ == '__main__':
  main()
