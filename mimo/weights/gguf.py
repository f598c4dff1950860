"""Llama checkpoints out of GGUF files: weights, configuration, tokenizer and chat template.

A GGUF file holds quantised tensors under llama.cpp's names, and the tokenizer's vocabulary and
merges as metadata. What is read here is dequantised to float32 and named as Hugging Face names it.
llama.cpp stores the rows of each query and key head as pairs of neighbours, the two halves of a
head interleaved, because its RoPE rotates neighbours; ours, and Hugging Face's, rotates halves.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mimo.models.config import ModelConfig

# Hugging Face's name of each tensor of a layer, by llama.cpp's.
_LAYER = {
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}
_HEAD = 'output.weight'
_TOP = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
  _HEAD: 'lm_head.weight',
}

# Kinds of vocabulary entries, of the GGUF specification.
_CONTROL, _USER_DEFINED = 3, 4


@dataclasses.dataclass(frozen=True)
class GgufFile:
  """A GGUF file, opened: its metadata, and its tensors by Hugging Face name.

  Attributes:
    path: the file.
    fields: metadata by key.
    config: the model.
  """

  path: pathlib.Path
  fields: Mapping[str, Any]
  config: ModelConfig
  _tensors: Mapping[str, Any]

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor under its Hugging Face name, dequantised to float32. KeyError for others."""
    import gguf

    tensor = self._tensors[name]
    x = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    # The file lists dimensions from the fastest to the slowest.
    x = x.reshape([int(size) for size in reversed(tensor.shape)])
    if name.endswith('q_proj.weight'):
      return halves_from_pairs(x, self.config.num_heads)
    if name.endswith('k_proj.weight'):
      return halves_from_pairs(x, self.config.num_kv_heads)
    return x

  def tokenizer_files(self) -> dict[str, bytes]:
    """Returns tokenizer.json and tokenizer_config.json. Raises ValueError for an unknown kind."""
    try:
      tokenizer = _tokenizer(self.fields)
    except KeyError as error:
      raise ValueError(f'{self.path} lacks the metadata {error}') from None
    files = {
      'tokenizer.json': json.loads(tokenizer.to_str()),
      'tokenizer_config.json': _tokenizer_config(self.fields),
    }
    return {
      name: f'{json.dumps(content, indent=1, ensure_ascii=False)}\n'.encode()
      for name, content in files.items()
    }


def open_gguf(path: str | os.PathLike[str]) -> GgufFile:
  """Opens a GGUF file of the Llama architecture.

  Raises ValueError when the package `gguf` isn't installed, the file is missing or corrupt, or it
  holds another architecture or tensors that a Llama checkpoint has no name for.
  """
  path = pathlib.Path(path)
  try:
    import gguf
  except ImportError as error:
    raise ValueError(
      "reading GGUF needs the package gguf, which isn't installed; expected "
      "`pip install 'mimo[smollm2]'`"
    ) from error
  if not path.is_file():
    raise ValueError(f'{path} is not a file; expected a GGUF file')
  try:
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
  except (ValueError, IndexError, KeyError, OverflowError) as error:
    raise ValueError(f'{path} is not a complete GGUF file: {error}') from error
  tensors = {}
  unknown = []
  for tensor in reader.tensors:
    name = hf_name(tensor.name)
    if name is None:
      unknown.append(tensor.name)
    else:
      tensors[name] = tensor
  try:
    config = _config(fields, tied=_TOP[_HEAD] not in tensors)
  except (KeyError, ValueError) as error:
    reason = f'it lacks the metadata {error}' if isinstance(error, KeyError) else str(error)
    raise ValueError(f'{path}: {reason}') from None
  if unknown:
    raise ValueError(f'{path} holds {len(unknown)} tensors such as {unknown[0]}; expected Llama')
  return GgufFile(path, fields, config, tensors)


def hf_name(name: str) -> str | None:
  """Returns the Hugging Face name of a tensor that llama.cpp calls `name`, or None."""
  if name in _TOP:
    return _TOP[name]
  parts = name.split('.')
  known = len(parts) == 4 and parts[0] == 'blk' and parts[1].isdigit() and parts[3] == 'weight'
  if not known or parts[2] not in _LAYER:
    return None
  return f'model.layers.{parts[1]}.{_LAYER[parts[2]]}.weight'


def halves_from_pairs(x: np.ndarray, heads: int) -> np.ndarray:
  """Reorders the rows of each head, (0, h, 1, h + 1, ...) to (0, 1, ..., h, h + 1, ...).

  Args:
    x: [H * Dh, D].
    heads: H.
  """
  rows, columns = x.shape
  return x.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _config(fields: Mapping[str, Any], *, tied: bool) -> ModelConfig:
  """Returns the model's configuration; KeyError where the metadata lacks something."""
  architecture = fields['general.architecture']
  if architecture != 'llama':
    raise ValueError(f"the architecture is {architecture!r}; expected 'llama'")
  scaling = 'llama.rope.scaling.type'
  if scaling in fields and fields[scaling] != 'none':
    raise ValueError(f"{scaling} is {fields[scaling]!r}; expected 'none'")
  if fields.get('llama.expert_count'):
    raise ValueError(
      f'llama.expert_count is {fields["llama.expert_count"]}; expected a dense model'
    )
  stop = int(fields['tokenizer.ggml.eos_token_id'])
  # float32 in the file; the shortest decimal that gives it back is what its author wrote.
  eps = float(str(np.float32(fields['llama.attention.layer_norm_rms_epsilon'])))
  return ModelConfig.from_hf(
    {
      'model_type': 'llama',
      'vocab_size': len(fields['tokenizer.ggml.tokens']),
      'hidden_size': int(fields['llama.embedding_length']),
      'intermediate_size': int(fields['llama.feed_forward_length']),
      'num_hidden_layers': int(fields['llama.block_count']),
      'num_attention_heads': int(fields['llama.attention.head_count']),
      'num_key_value_heads': int(fields['llama.attention.head_count_kv']),
      'head_dim': int(fields['llama.rope.dimension_count']),
      'rms_norm_eps': eps,
      'rope_parameters': {
        'rope_type': 'default',
        'rope_theta': float(fields['llama.rope.freq_base']),
      },
      'tie_word_embeddings': tied,
      'max_position_embeddings': int(fields['llama.context_length']),
      'bos_token_id': int(fields['tokenizer.ggml.bos_token_id']),
      'eos_token_id': stop,
      'pad_token_id': int(fields['tokenizer.ggml.padding_token_id']),
    }
  )


def _tokenizer(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Builds the byte-level BPE tokenizer that the metadata describes."""
  kind = fields['tokenizer.ggml.model'], fields['tokenizer.ggml.pre']
  if kind != ('gpt2', 'smollm'):
    raise ValueError(f"the tokenizer's kind is {kind}; expected ('gpt2', 'smollm')")
  for switch in ('add_space_prefix', 'add_bos_token'):
    if fields[f'tokenizer.ggml.{switch}']:
      raise ValueError(f'tokenizer.ggml.{switch} is true; expected false')
  vocabulary = fields['tokenizer.ggml.tokens']
  merges = [tuple(merge.split(' ')) for merge in fields['tokenizer.ggml.merges']]
  tokenizer = tokenizers.Tokenizer(
    models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges)
  )
  # Each digit stands alone, then GPT-2's pattern cuts what lies between digits.
  digits = pre_tokenizers.Digits(individual_digits=True)
  words = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
  tokenizer.decoder = decoders.ByteLevel()
  for token, kind_id in zip(vocabulary, fields['tokenizer.ggml.token_type'], strict=True):
    if kind_id == _CONTROL:
      tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False, special=True)])
    elif kind_id == _USER_DEFINED:
      tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False)])
  return tokenizer


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
  vocabulary = fields['tokenizer.ggml.tokens']
  return {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': vocabulary[fields['tokenizer.ggml.bos_token_id']],
    'eos_token': vocabulary[fields['tokenizer.ggml.eos_token_id']],
    'pad_token': vocabulary[fields['tokenizer.ggml.padding_token_id']],
    'unk_token': vocabulary[fields['tokenizer.ggml.unknown_token_id']],
    'add_prefix_space': False,
    'clean_up_tokenization_spaces': False,
    'model_max_length': int(fields['llama.context_length']),
    'chat_template': fields['tokenizer.chat_template'],
  }
