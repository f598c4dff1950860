"""The `arithmetic` task: a word problem, one answer, a reward for the right last number."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fractions import Fraction

import numpy as np

from mimo.tasks.arithmetic import problems
from mimo.tasks.arithmetic.chat import ChatTokenizer
from mimo.tasks.base import EnvironmentFailure, StepResult
from mimo.types import EpisodeEnd, FinishReason

MAX_TURN_TOKENS = 20
MAX_TOKENS = 176

# Without examples a model of this size tells stories; with them it mostly writes one sum.
SYSTEM = 'Answer with one sum.'
EXAMPLES = (
  ('Lena has 4 eggs and gets 3 more. How many now?', '4 + 3 = 7'),
  ('Omar has 8 keys and loses 2. How many are left?', '8 - 2 = 6'),
  ('Rosa has 3 bags of 5 nuts. How many nuts?', '3 * 5 = 15'),
)

# A minus sign counts where nothing is subtracted: not behind a digit, a letter or a bracket.
_NUMBER = re.compile(r'(?:(?<![\w)\]])-)?\d[\d,]*(?:\.\d+)?')


def last_number(text: str) -> Fraction | None:
  """Returns the last number in `text`, thousands separators or decimals included, or None."""
  found = _NUMBER.findall(text)
  return Fraction(found[-1].replace(',', '')) if found else None


def messages(question: str) -> list[dict[str, str]]:
  """Returns the conversation that asks `question`, after the examples."""
  turns = [('system', SYSTEM)]
  for asked, answered in EXAMPLES:
    turns += [('user', asked), ('assistant', answered)]
  return [{'role': role, 'content': content} for role, content in [*turns, ('user', question)]]


class ArithmeticTask:
  """Word problems for a chat model. Its splits are 'train' and 'heldout'."""

  name = 'arithmetic'
  splits = ('train', 'heldout')
  max_turn_tokens = MAX_TURN_TOKENS
  max_sampled_tokens = MAX_TURN_TOKENS  # its one turn
  max_tokens = MAX_TOKENS

  def __init__(self, tokenizer_files: Mapping[str, bytes]) -> None:
    """Takes the policy's tokenizer files. Raises ValueError where they have no chat template."""
    self._chat = ChatTokenizer(tokenizer_files)

  @property
  def stop_ids(self) -> tuple[int, ...]:
    return (self._chat.stop_id,)

  def size(self, split: str) -> int:
    if split not in problems.SIZES:
      raise ValueError(f'arithmetic has no split {split!r}; expected one of {list(problems.SIZES)}')
    return problems.SIZES[split]

  def task_id(self, split: str, index: int) -> str:
    return problems.problem(split, index).id

  def start(self, split: str, index: int) -> ArithmeticEpisode:
    return ArithmeticEpisode(problems.problem(split, index), self._chat)


class ArithmeticEpisode:
  """One attempt at one problem: a single turn."""

  def __init__(self, problem: problems.Problem, chat: ChatTokenizer) -> None:
    self._problem = problem
    self._chat = chat
    self._over = False

  @functools.cached_property
  def prompt(self) -> np.ndarray:
    return self._chat.prompt(messages(self._problem.text))

  async def step(self, tokens: np.ndarray, finish: FinishReason) -> StepResult:
    if self._over:
      raise EnvironmentFailure(f'{self._problem.id}: a second turn; the episode has one')
    self._over = True
    end, reward = self._judge(tokens, finish)
    return StepResult(observation=np.zeros(0, np.int32), end=end, reward=reward)

  def _judge(self, tokens: np.ndarray, finish: FinishReason) -> tuple[EpisodeEnd, float]:
    if finish is not FinishReason.STOP:
      return EpisodeEnd.TOKEN_LIMIT, 0.0
    number = last_number(self._chat.text(tokens))
    if number is None:
      return EpisodeEnd.MALFORMED, 0.0
    return EpisodeEnd.SUBMITTED, float(number == self._problem.answer)

  async def close(self) -> None:
    """Holds nothing."""
