import json

import numpy as np
import pytest

from mimo.tasks.arithmetic.chat import ChatTokenizer

MESSAGES = [{'role': 'user', 'content': 'What is 2 + 3?'}]


def test_prompt_and_text(tokenizer_files, encode):
  chat = ChatTokenizer(tokenizer_files)
  prompt = chat.prompt(MESSAGES)
  want = '<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n'
  assert prompt.dtype == np.int32 and prompt.tolist() == encode(want)
  assert prompt[0] == 0 and (prompt == 1).sum() == 1  # special tokens are one id each
  assert chat.stop_id == 1
  assert chat.text(np.array([*encode('It is 5 — yes.'), 1])) == 'It is 5 — yes.'


def test_template_file_wins(tokenizer_files):
  files = {**tokenizer_files, 'chat_template.jinja': b'{{ messages[0].content }}'}
  assert len(ChatTokenizer(files).prompt(MESSAGES)) == len('What is 2 + 3?')


def test_refusals(tokenizer_files):
  with pytest.raises(ValueError, match=r'the policy has no tokenizer_config.json; expected a chat'):
    ChatTokenizer({'tokenizer.json': tokenizer_files['tokenizer.json']})
  config = json.loads(tokenizer_files['tokenizer_config.json'])

  def variant(**changes):
    return tokenizer_files | {'tokenizer_config.json': json.dumps({**config, **changes}).encode()}

  with pytest.raises(ValueError, match='has no chat_template; expected that of a chat model'):
    ChatTokenizer(variant(chat_template=None))
  with pytest.raises(ValueError, match="eos_token '<end>' is not in the vocabulary"):
    ChatTokenizer(variant(eos_token='<end>'))
  with pytest.raises(ValueError, match='the chat template refuses the messages: no tool mess'):
    ChatTokenizer(tokenizer_files).prompt([{'role': 'tool', 'content': ''}])


@pytest.mark.reference
def test_ids_equal_those_of_transformers(tokenizer_files, tmp_path):
  import transformers

  for name, content in tokenizer_files.items():
    (tmp_path / name).write_bytes(content)
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  for messages in (MESSAGES, [*MESSAGES, {'role': 'assistant', 'content': 'x\n y'}, *MESSAGES]):
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ChatTokenizer(tokenizer_files).prompt(messages).tolist() == want
