import json
import pathlib

import numpy as np
import pytest
import tokenizers

from mimo.tasks.repair import vocabulary


def test_tokens_are_128_different_words():
  assert len(vocabulary.TOKENS) == len(set(vocabulary.TOKENS)) == vocabulary.SIZE == 128
  assert sum(not token.startswith('<') for token in vocabulary.TOKENS) >= 96
  assert all(len(token.split()) == 1 for token in vocabulary.TOKENS)


def test_encode_and_decode_are_inverse():
  words = ['task', 'push3', 'add', 'tests', '0', '3', '>', 'edit', '@1', 'sub', 'run', ';']
  ids = vocabulary.encode(words)
  assert ids.dtype == np.int32
  assert vocabulary.decode(ids) == words
  assert ids[-1] == vocabulary.STOP_ID


def test_an_unknown_word_is_named():
  with pytest.raises(ValueError, match='push77'):
    vocabulary.encode(['push77'])


def test_every_instruction_has_its_own_token():
  for token, instruction in vocabulary.INSTRUCTIONS.items():
    assert vocabulary.name(instruction) == token


def test_tokenizer_json_agrees():
  files = vocabulary.tokenizer_files()
  tokenizer = tokenizers.Tokenizer.from_str(files['tokenizer.json'].decode())
  every = list(range(128))
  assert tokenizer.decode(every, skip_special_tokens=False) == ' '.join(vocabulary.TOKENS)
  assert tokenizer.encode(' '.join(vocabulary.TOKENS)).ids == every
  assert (
    tokenizer.encode('edit @1 push3 ;').ids
    == vocabulary.encode(['edit', '@1', 'push3', ';']).tolist()
  )
  assert json.loads(files['tokenizer_config.json'])['eos_token'] == ';'


@pytest.mark.reference
def test_transformers_loads_it(tmp_path: pathlib.Path):
  import transformers

  for name, content in vocabulary.tokenizer_files().items():
    (tmp_path / name).write_bytes(content)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  every = list(range(128))
  text = tokenizer.decode(every)
  assert text == ' '.join(vocabulary.TOKENS)
  assert tokenizer.encode(text) == every
  assert tokenizer.eos_token_id == vocabulary.STOP_ID
