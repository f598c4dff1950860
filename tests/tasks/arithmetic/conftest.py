import json

import pytest
import tokenizers

TEMPLATE = (
  "{% for message in messages %}\n"
  "  {% if message['role'] == 'tool' %}\n"
  "    {{ raise_exception('no tool messages') }}\n"
  "  {% endif %}\n"
  "{{ bos_token + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}{% endif %}"
)  # fmt: skip


@pytest.fixture(scope='session')
def tokenizer_files():
  """One id per byte, and two special tokens."""
  alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate(['<|im_start|>', '<|im_end|>', *alphabet])}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  tokenizer.add_special_tokens(['<|im_start|>', '<|im_end|>'])
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'bos_token': {'__type': 'AddedToken', 'content': '<|im_start|>', 'special': True},
    'eos_token': '<|im_end|>',
    'chat_template': TEMPLATE,
  }
  return {
    'tokenizer.json': tokenizer.to_str().encode(),
    'tokenizer_config.json': json.dumps(config).encode(),
  }


@pytest.fixture(scope='session')
def encode(tokenizer_files):
  tokenizer = tokenizers.Tokenizer.from_str(tokenizer_files['tokenizer.json'].decode())
  return lambda text: tokenizer.encode(text).ids
