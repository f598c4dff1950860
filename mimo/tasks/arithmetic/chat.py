"""A chat model's tokenizer: messages to prompt ids, sampled ids to text.

Only the files of a checkpoint are read. Text becomes ids once, for the prompt; sampled ids become
text for the verifier and never ids again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import tokenizers
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TOKENIZER = 'tokenizer.json'
_CONFIG = 'tokenizer_config.json'
_TEMPLATE = 'chat_template.jinja'


class ChatTokenizer:
  """A tokenizer with the chat template of its checkpoint.

  Attributes:
    stop_id: the id that ends a message.
  """

  def __init__(self, files: Mapping[str, bytes]) -> None:
    """Reads tokenizer files by name, as a checkpoint holds them.

    Raises ValueError naming what is missing.
    """
    for name in (_TOKENIZER, _CONFIG):
      if name not in files:
        raise ValueError(f'the policy has no {name}; expected a chat model with its tokenizer')
    self._tokenizer = tokenizers.Tokenizer.from_str(files[_TOKENIZER].decode())
    config = json.loads(files[_CONFIG])
    template = _template(files, config)
    if template is None:
      raise ValueError(f'{_CONFIG} has no chat_template; expected that of a chat model')
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals['raise_exception'] = _refuse
    self._template = environment.from_string(template)
    self._names = {name: _content(config, name) for name in ('bos_token', 'eos_token')}
    stop_id = self._tokenizer.token_to_id(self._names['eos_token'])
    if stop_id is None:
      raise ValueError(f'eos_token {self._names["eos_token"]!r} is not in the vocabulary')
    self.stop_id: int = stop_id

  def prompt(self, messages: Sequence[Mapping[str, str]]) -> np.ndarray:
    """Returns [P] int32: the messages, and the opening of the assistant's.

    Raises ValueError where the template refuses them.
    """
    try:
      text = self._template.render(messages=messages, add_generation_prompt=True, **self._names)
    except TemplateError as error:
      raise ValueError(f'the chat template refuses the messages: {error}') from error
    return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

  def text(self, ids: np.ndarray) -> str:
    """Returns what sampled ids say, special tokens left out."""
    return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True)


def _template(files: Mapping[str, bytes], config: Mapping[str, Any]) -> str | None:
  if _TEMPLATE in files:
    return files[_TEMPLATE].decode()
  return config.get('chat_template')


def _content(config: Mapping[str, Any], name: str) -> str:
  """Returns a special token, which a configuration states as a string or as an object."""
  value = config[name] if name in config and config[name] is not None else ''
  return value if isinstance(value, str) else value['content']


def _refuse(message: str) -> NoReturn:
  raise TemplateError(message)
