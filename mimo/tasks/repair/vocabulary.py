"""The 128 tokens of `repair`, and the tokenizer files that say so to other libraries.

Every instruction, number and action is one token, so ids and text map one to one: text is tokens
joined by single spaces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import numpy as np

from mimo.tasks.repair import machine

PAD = '<pad>'
UNKNOWN = '<unk>'
END_OF_TURN = ';'
YOUR_TURN = '>'
_WORDS = (
  *(PAD, UNKNOWN, END_OF_TURN, YOUR_TURN),
  *('task', 'tests', 'now', 'ran', 'ok', 'pass', machine.Fault.ERROR.value),
  *(machine.Fault.SLOW.value, 'look', 'edit', 'run', 'submit'),
)
SIZE = 128


def _build() -> tuple[str, ...]:
  tokens = [
    *_WORDS,
    *(f'@{line}' for line in range(machine.MAX_LINES)),
    *(f'push{constant}' for constant in range(machine.MAX_CONSTANT + 1)),
    *machine.BINARY,
    *machine.STACK,
    *(f'loop{line}' for line in range(machine.MAX_LINES)),
    *(str(number) for number in range(machine.WORD)),
  ]
  reserved = (f'<reserved{index}>' for index in range(SIZE - len(tokens)))
  return (*tokens, *reserved)


TOKENS = _build()
_IDS = {token: index for index, token in enumerate(TOKENS)}
INSTRUCTIONS: dict[str, machine.Instruction] = {
  **{f'push{n}': machine.Instruction('push', n) for n in range(machine.MAX_CONSTANT + 1)},
  **{op: machine.Instruction(op) for op in (*machine.BINARY, *machine.STACK)},
  **{f'loop{n}': machine.Instruction('loop', n) for n in range(machine.MAX_LINES)},
}
LINES: dict[str, int] = {f'@{line}': line for line in range(machine.MAX_LINES)}
PAD_ID = _IDS[PAD]
STOP_ID = _IDS[END_OF_TURN]


def name(instruction: machine.Instruction) -> str:
  """The token of an instruction."""
  if instruction.op in ('push', 'loop'):
    return f'{instruction.op}{instruction.argument}'
  return instruction.op


def encode(words: Iterable[str]) -> np.ndarray:
  """Returns [T] int32. Raises ValueError naming a word that is no token."""
  try:
    return np.array([_IDS[word] for word in words], np.int32)
  except KeyError as error:
    raise ValueError(f'{error.args[0]!r} is no token of repair; expected one of TOKENS') from None


def decode(ids: Sequence[int] | np.ndarray) -> list[str]:
  """Returns the tokens of [T] ids."""
  return [TOKENS[int(index)] for index in ids]


def tokenizer_files() -> dict[str, bytes]:
  """tokenizer.json and tokenizer_config.json, by file name: a word-level tokenizer."""
  special = [
    {
      **{'id': _IDS[token], 'content': token, 'special': True, 'normalized': False},
      **{'single_word': False, 'lstrip': False, 'rstrip': False},
    }
    for token in (PAD, UNKNOWN, END_OF_TURN)
  ]
  tokenizer = {
    'version': '1.0',
    'truncation': None,
    'padding': None,
    'added_tokens': special,
    'normalizer': None,
    'pre_tokenizer': {'type': 'WhitespaceSplit'},
    'post_processor': None,
    'decoder': None,
    'model': {'type': 'WordLevel', 'vocab': _IDS, 'unk_token': UNKNOWN},
  }
  config = {
    'tokenizer_class': 'PreTrainedTokenizerFast',
    'pad_token': PAD,
    'unk_token': UNKNOWN,
    'eos_token': END_OF_TURN,
    'clean_up_tokenization_spaces': False,
    'model_max_length': 128,
  }
  files = {'tokenizer.json': tokenizer, 'tokenizer_config.json': config}
  return {file: (json.dumps(text, indent=1) + '\n').encode() for file, text in files.items()}
