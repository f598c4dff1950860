import json
import sys

import numpy as np
import pytest
import tokenizers

from mimo.models.table import from_named_tensors, named_tensors
from mimo.weights import gguf

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, MLP = 2, 16, 4, 2, 6, 24
MERGES = ['Ġ Ġ', 'a b', 'Ġ ab']


def _pairs_from_halves(x, heads):
  """What llama.cpp does to queries and keys as it converts a Hugging Face checkpoint."""
  return x.reshape(heads, 2, len(x) // heads // 2, -1).swapaxes(1, 2).reshape(x.shape)


def _vocabulary():
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  return ['<|endoftext|>', '<|im_start|>', '<|im_end|>', *alphabet, 'ĠĠ', 'ab', 'Ġab']


def _tensors(rng):
  def make(*shape):
    return rng.normal(size=shape).astype(np.float32)

  out = {
    'token_embd': ('model.embed_tokens', make(len(_vocabulary()), HIDDEN)),
    'output_norm': ('model.norm', make(HIDDEN)),
  }
  for i in range(LAYERS):
    layer = f'model.layers.{i}'
    for name, hf, shape in (
      ('attn_norm', 'input_layernorm', (HIDDEN,)),
      ('ffn_norm', 'post_attention_layernorm', (HIDDEN,)),
      ('attn_q', 'self_attn.q_proj', (HEADS * DIM, HIDDEN)),
      ('attn_k', 'self_attn.k_proj', (KV_HEADS * DIM, HIDDEN)),
      ('attn_v', 'self_attn.v_proj', (KV_HEADS * DIM, HIDDEN)),
      ('attn_output', 'self_attn.o_proj', (HIDDEN, HEADS * DIM)),
      ('ffn_gate', 'mlp.gate_proj', (MLP, HIDDEN)),
      ('ffn_up', 'mlp.up_proj', (MLP, HIDDEN)),
      ('ffn_down', 'mlp.down_proj', (HIDDEN, MLP)),
    ):
      out[f'blk.{i}.{name}'] = (f'{layer}.{hf}', make(*shape))
  return out


def _write(path, tensors, *, architecture='llama', pre='smollm', extra=()):
  import gguf as package

  writer = package.GGUFWriter(path, architecture)
  writer.add_block_count(LAYERS)
  writer.add_context_length(64)
  writer.add_embedding_length(HIDDEN)
  writer.add_feed_forward_length(MLP)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_rope_dimension_count(DIM)
  writer.add_rope_freq_base(100000.0)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  vocabulary = _vocabulary()
  writer.add_token_list(vocabulary)
  writer.add_token_types([3] * 3 + [1] * (len(vocabulary) - 3))
  writer.add_token_merges(MERGES)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_unk_token_id(0)
  writer.add_pad_token_id(2)
  writer.add_add_space_prefix(False)
  writer.add_add_bos_token(False)
  writer.add_chat_template('{{ messages[0].content }}')
  for name, (hf, x) in tensors.items():
    if hf.endswith('q_proj'):
      x = _pairs_from_halves(x, HEADS)
    if hf.endswith('k_proj'):
      x = _pairs_from_halves(x, KV_HEADS)
    writer.add_tensor(f'{name}.weight', x)
  for name in extra:
    writer.add_tensor(name, np.zeros((len(vocabulary), HIDDEN), np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def test_names():
  assert gguf.hf_name('blk.11.ffn_down.weight') == 'model.layers.11.mlp.down_proj.weight'
  assert gguf.hf_name('output.weight') == 'lm_head.weight'
  for name in ('blk.1.ffn_down.bias', 'blk.x.ffn_up.weight', 'blk.1.attn_qkv.weight', 'v.weight'):
    assert gguf.hf_name(name) is None


def test_halves_from_pairs_by_hand():
  # Two heads of four rows: the file's rows hold 0, 2, 1, 3 of each head.
  rows = np.array([[0], [2], [1], [3], [4], [6], [5], [7]])
  np.testing.assert_array_equal(gguf.halves_from_pairs(rows, 2)[:, 0], np.arange(8))


@pytest.mark.reference
def test_every_tensor_and_the_config_come_back(tmp_path):
  tensors = _tensors(np.random.default_rng(0))
  file = gguf.open_gguf(_write(tmp_path / 'm.gguf', tensors))
  config = file.config
  assert (config.family, config.num_layers, config.hidden_size) == ('llama', LAYERS, HIDDEN)
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, DIM)
  assert (config.intermediate_size, config.max_positions) == (MLP, 64)
  assert config.rope.theta == 100000.0 and config.rms_norm_eps == 1e-5
  assert config.tie_embeddings and config.vocab_size == len(_vocabulary())
  assert config.to_hf()['eos_token_id'] == 2
  params = from_named_tensors(config, file.read, np.float32)
  want = {f'{hf}.weight': x for hf, x in tensors.values()}
  got = dict(named_tensors(config, params))
  assert got.keys() == want.keys()
  for name, x in want.items():
    np.testing.assert_array_equal(got[name], x, err_msg=name)


@pytest.mark.reference
def test_a_head_of_its_own_unties(tmp_path):
  path = _write(tmp_path / 'm.gguf', _tensors(np.random.default_rng(0)), extra=['output.weight'])
  file = gguf.open_gguf(path)
  assert not file.config.tie_embeddings
  assert file.read('lm_head.weight').shape == (len(_vocabulary()), HIDDEN)


@pytest.mark.reference
def test_tokenizer(tmp_path):
  file = gguf.open_gguf(_write(tmp_path / 'm.gguf', _tensors(np.random.default_rng(0))))
  files = file.tokenizer_files()
  tokenizer = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
  # Digits stand alone, the run of spaces before one stays whole, special tokens are one id each.
  encoded = tokenizer.encode('<|im_start|>ab ab  12<|im_end|>')
  assert encoded.tokens == ['<|im_start|>', 'ab', 'Ġab', 'ĠĠ', '1', '2', '<|im_end|>']
  vocabulary = _vocabulary()
  assert encoded.ids == [vocabulary.index(token) for token in encoded.tokens]
  assert tokenizer.decode(encoded.ids) == 'ab ab  12'
  assert tokenizer.decode(encoded.ids, skip_special_tokens=False).endswith('<|im_end|>')
  config = json.loads(files['tokenizer_config.json'])
  assert (config['bos_token'], config['eos_token']) == ('<|im_start|>', '<|im_end|>')
  assert config['chat_template'] == '{{ messages[0].content }}'


@pytest.mark.reference
def test_refusals(tmp_path):
  tensors = _tensors(np.random.default_rng(0))
  with pytest.raises(ValueError, match=r'none.gguf is not a file; expected a GGUF file'):
    gguf.open_gguf(tmp_path / 'none.gguf')
  (tmp_path / 'text.gguf').write_text('no such thing')
  with pytest.raises(ValueError, match=r'text.gguf is not a complete GGUF file'):
    gguf.open_gguf(tmp_path / 'text.gguf')
  whole = _write(tmp_path / 'm.gguf', tensors)
  (tmp_path / 'cut.gguf').write_bytes(whole.read_bytes()[:-5000])
  with pytest.raises(ValueError, match=r'cut.gguf is not a complete GGUF file'):
    gguf.open_gguf(tmp_path / 'cut.gguf')
  with pytest.raises(ValueError, match="the architecture is 'qwen2'; expected 'llama'"):
    gguf.open_gguf(_write(tmp_path / 'a.gguf', tensors, architecture='qwen2'))
  with pytest.raises(ValueError, match=r'holds 1 tensors such as v.weight; expected Llama'):
    gguf.open_gguf(_write(tmp_path / 'b.gguf', tensors, extra=['v.weight']))
  with pytest.raises(ValueError, match=r"kind is \('gpt2', 'llama-bpe'\); expected"):
    gguf.open_gguf(_write(tmp_path / 'c.gguf', tensors, pre='llama-bpe')).tokenizer_files()


def test_missing_package_is_one_clear_error(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'gguf', None)
  with pytest.raises(ValueError, match=r"needs the package gguf, which isn't installed; expected"):
    gguf.open_gguf(tmp_path / 'm.gguf')
