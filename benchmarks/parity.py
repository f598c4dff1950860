"""How far the decoders are from transformers, on random tiny models of every family.

    python -m benchmarks.parity

needs the extra `reference`, and takes three minutes of CPU time. Both sides compute in float32.
Sequences of 1, 63, 64, 65 and 130 tokens, lengths around the delta net's chunk of 64, go through
ours in one batch, padded right and left and packed three to a row, and through transformers' one by
one. Figures are the largest over all of them:

    logits          max |ours - theirs|
    gradients       max over tensors of |ours - theirs| / |theirs|, of the mean log-likelihood
    cached          max |logits of chunked prefill and decoding - theirs|
    packed          max |logits of a segment - the same with other neighbours|
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.models.table import from_named_tensors, hf_params, named_tensors

VOCAB = 64
LENGTHS = (130, 63, 64, 65, 1)
# Rows of the batch: (segment, how many tokens) in order; segment 0 is padding.
_ROW = 130
LAYOUT: tuple[tuple[tuple[int, int], ...], ...] = (
  ((1, 130),),
  ((1, 63), (0, 67)),
  ((0, 66), (1, 64)),
  ((0, 1), (1, 65), (0, 64)),
  ((1, 1), (2, 64), (3, 65)),
  ((2, 65), (1, 1), (3, 63), (0, 1)),
)

_ATTENTION = {
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 512,
  'tie_word_embeddings': False,
}
_DENSE = _ATTENTION | {'intermediate_size': 48, 'num_hidden_layers': 2}
_MOE = _ATTENTION | {
  'head_dim': 16,
  'num_hidden_layers': 2,
  'num_experts': 8,
  'num_experts_per_tok': 3,
  'moe_intermediate_size': 16,
}
_HYBRID = _MOE | {
  'num_hidden_layers': 4,
  'shared_expert_intermediate_size': 24,
  'linear_num_key_heads': 2,
  'linear_num_value_heads': 4,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 12,
  'linear_conv_kernel_dim': 4,
}
_EVERY_OTHER = ['linear_attention', 'full_attention'] * 2
_VISION = {
  'depth': 1,
  'hidden_size': 16,
  'intermediate_size': 16,
  'num_heads': 2,
  'out_hidden_size': 32,
  'num_position_embeddings': 16,
}

# name -> (transformers' classes without 'Config' and 'For...', what the config says)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
  'llama': ('Llama', 'ForCausalLM', _DENSE),
  'qwen3': ('Qwen3', 'ForCausalLM', _DENSE | {'head_dim': 16}),
  'qwen3_moe': ('Qwen3Moe', 'ForCausalLM', _MOE | {'norm_topk_prob': True}),
  'qwen3_next': ('Qwen3Next', 'ForCausalLM', _HYBRID),
  'qwen3_5_moe_text': (
    'Qwen3_5MoeText',
    'ForCausalLM',
    _HYBRID | {'layer_types': _EVERY_OTHER},
  ),
  'qwen3_5_moe': (
    'Qwen3_5Moe',
    'ForConditionalGeneration',
    {
      'text_config': _HYBRID | {'layer_types': _EVERY_OTHER},
      'vision_config': _VISION,
      'tie_word_embeddings': False,
    },
  ),
}


@dataclasses.dataclass(frozen=True)
class Parity:
  """The figures of one family; see the module."""

  logits: float
  gradients: float
  cached: float
  packed: float


def make(name: str) -> Any:
  """Returns transformers' model, its parameters perturbed: at 1 or 0, one left out is not seen.

  Delta nets remember from a token to hundreds: as they are initialised most forget at once, and
  what is carried from chunk to chunk would not show.
  """
  import torch
  import transformers

  family, head, stated = MODELS[name]
  config = getattr(transformers, f'{family}Config')(**stated)
  torch.manual_seed(0)
  model = getattr(transformers, f'{family.removesuffix("Text")}{head}')(config)
  with torch.no_grad():
    for part, parameter in model.named_parameters():
      parameter.add_(0.1 * torch.randn_like(parameter))
      if part.endswith('A_log'):
        parameter.uniform_(-6.0, 1.0)
  return model.float().eval()


def singly(tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
  """Yields the decoder's tensors by our names: experts one by one, no prefix, no vision tower."""
  for name, x in tensors.items():
    name = name.replace('model.language_model.', 'model.')
    if name.startswith('model.visual.'):
      continue
    if name.endswith('experts.gate_up_proj'):
      for expert, both in enumerate(x):
        for part, half in zip(('gate_proj', 'up_proj'), np.split(both, 2), strict=True):
          yield name.replace('gate_up_proj', f'{expert}.{part}.weight'), half
    elif name.endswith('experts.down_proj'):
      for expert, down in enumerate(x):
        yield name.replace('down_proj', f'{expert}.down_proj.weight'), down
    else:
      yield name, x


def load(model: Any) -> tuple[ModelConfig, dict[str, Any]]:
  """Returns (config, parameters) of transformers' model."""
  config = ModelConfig.from_hf(model.config.to_dict())
  tensors = dict(singly({name: x.numpy() for name, x in model.state_dict().items()}))
  names = {name for name, _, _ in hf_params(config)}
  if set(tensors) != names:
    raise ValueError(f'tensors {sorted(set(tensors) ^ names)} are on one side only')
  return config, from_named_tensors(config, tensors.__getitem__)


@dataclasses.dataclass(frozen=True)
class Rows:
  """A batch laid out as `LAYOUT`: tokens, segment_ids and positions [B, T] int32."""

  tokens: np.ndarray
  segment_ids: np.ndarray
  positions: np.ndarray

  def sequences(self) -> Iterator[tuple[int, slice]]:
    """Yields (row, where in it) of each sequence."""
    for row, parts in enumerate(LAYOUT):
      start = 0
      for segment, length in parts:
        if segment:
          yield row, slice(start, start + length)
        start += length


def batch(seed: int) -> Rows:
  """Random tokens in the layout."""
  shape = (len(LAYOUT), _ROW)
  rows = Rows(*(np.zeros(shape, np.int32) for _ in range(3)))
  rows.tokens[:] = np.random.default_rng(seed).integers(0, VOCAB, shape)
  for row, parts in enumerate(LAYOUT):
    start = 0
    for segment, length in parts:
      rows.segment_ids[row, start : start + length] = segment
      rows.positions[row, start : start + length] = np.arange(length) if segment else 0
      start += length
  return rows


@functools.partial(jax.jit, static_argnums=0)
def ours(config: ModelConfig, params: Any, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
  """Logits [B, T, V], and gradients of the mean log-likelihood of every next token."""
  tokens, segment_ids, positions = rows

  def likelihood(params: Any) -> tuple[jax.Array, jax.Array]:
    hidden = decoder.forward(config, params, tokens, segment_ids, positions)
    logits = hidden @ decoder.head_matrix(config, params)
    logps = jax.nn.log_softmax(logits[:, :-1])
    chosen = jnp.take_along_axis(logps, tokens[:, 1:, None], axis=-1)[..., 0]
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
    return jnp.sum(jnp.where(inside, chosen, 0)) / jnp.sum(inside), logits

  (_, logits), grads = jax.value_and_grad(likelihood, has_aux=True)(params)
  return logits, grads


def theirs(model: Any, rows: Rows) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
  """The same of transformers: logits [T, V] of each sequence, gradients by our names."""
  import torch

  model.zero_grad()
  logits, total, count = [], torch.zeros(()), 0
  for row, where in rows.sequences():
    ids = torch.tensor(rows.tokens[row : row + 1, where], dtype=torch.long)
    out = model(input_ids=ids, use_cache=False).logits[0]
    logps = torch.log_softmax(out[:-1], dim=-1)
    total = total + logps.gather(1, ids[0, 1:, None]).sum()
    count += ids.shape[1] - 1
    logits.append(out.detach().numpy())
  (total / count).backward()
  grads = {
    name: np.zeros(x.shape, np.float32) if x.grad is None else x.grad.numpy()
    for name, x in model.named_parameters()
  }
  return logits, dict(singly(grads))


def cached_logits(
  config: ModelConfig, params: Any, tokens: np.ndarray, lengths: np.ndarray, chunk: int
) -> np.ndarray:
  """Logits of rows [B, T] run through a cache: all but 3 tokens in chunks, those one by one.

  Rows that have nothing left idle while the others go on.
  """
  extend = jax.jit(decoder.extend, static_argnums=0)
  head = decoder.head_matrix(config, params)
  cache = decoder.init_cache(config, len(tokens), tokens.shape[1], jnp.float32)
  logits = np.zeros((*tokens.shape, config.vocab_size), np.float32)
  done = np.zeros(len(tokens), np.int32)
  for size in [chunk] * -(-int(lengths.max()) // chunk) + [1] * 3:
    left = np.maximum(lengths - done - (3 if size > 1 else 0), 0)
    count = np.minimum(left, size).astype(np.int32)
    at = np.minimum(done[:, None] + np.arange(size), tokens.shape[1] - 1)
    fed = np.take_along_axis(tokens, at, axis=1)
    hidden, cache = extend(config, params, cache, fed, done, count)
    for row, taken in enumerate(count):
      logits[row, done[row] : done[row] + taken] = (hidden[row] @ head)[:taken]
    done += count
  return logits


def measure(name: str, seed: int = 0) -> Parity:
  """Runs one family."""
  model, rows = make(name), batch(seed)
  config, params = load(model)
  expected, gradients = theirs(model, rows)
  got, grads = ours(config, params, dataclasses.astuple(rows))
  logits = max(
    np.abs(np.asarray(got[row, where]) - wanted).max()
    for (row, where), wanted in zip(rows.sequences(), expected, strict=True)
  )
  relative = [
    np.linalg.norm(x - gradients[tensor]) / max(np.linalg.norm(gradients[tensor]), 1e-12)
    for tensor, x in named_tensors(config, grads)
  ]

  lengths = np.array([130, 65, 5])
  tokens = rows.tokens[: len(lengths)].copy()
  tokens[1, :65] = rows.tokens[3, 1:66]
  through = cached_logits(config, params, tokens, lengths, chunk=40)
  whole = {0: expected[0], 1: expected[3]}
  cached = max(np.abs(through[row, : len(x)] - x).max() for row, x in whole.items())

  # The middle segment of the fifth row stays; everything else is drawn anew.
  other = batch(seed + 1)
  other.tokens[4, 1:65] = rows.tokens[4, 1:65]
  moved, _ = ours(config, params, dataclasses.astuple(other))
  packed = np.abs(np.asarray(got - moved)[4, 1:65]).max()
  return Parity(float(logits), float(max(relative)), float(cached), float(packed))


def main() -> None:
  """Prints the table."""
  print('| family | logits | gradients | cached | packed |')
  print('|---|---|---|---|---|')
  for name in MODELS:
    figures = dataclasses.astuple(measure(name))
    print(f'| {name} | {" | ".join(f"{figure:.1e}" for figure in figures)} |', flush=True)


if __name__ == '__main__':
  main()
