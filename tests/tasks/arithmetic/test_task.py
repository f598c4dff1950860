import asyncio
import re
from fractions import Fraction

import numpy as np
import pytest

from mimo.tasks.arithmetic import ArithmeticTask, problems
from mimo.tasks.arithmetic.task import EXAMPLES, SYSTEM, last_number
from mimo.tasks.base import EnvironmentFailure
from mimo.types import EpisodeEnd, FinishReason


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    ('7', 7),
    ('He has 3 + 4 = 7 apples.', 7),
    ('It is 1,234.', 1234),
    ('7.50', Fraction(15, 2)),
    ('7.0!', 7),
    ('-3', -3),
    ('9-2', 2),
    ('x = -2', -2),
    ('(5)-1', 1),
    ('Seven.', None),
    ('', None),
  ],
)
def test_last_number(text, want):
  assert last_number(text) == want


def _step(task, index, ids, finish=FinishReason.STOP):
  episode = task.start('heldout', index)
  result = asyncio.run(episode.step(np.array(ids, np.int32), finish))
  return result.end, result.reward, len(result.observation)


def test_rewards_and_ends(tokenizer_files, encode):
  task = ArithmeticTask(tokenizer_files)
  answer = problems.problem('heldout', 3).answer
  right, wrong = encode(f'The answer is {answer}.'), encode(f'{answer}? No, {answer + 1}.')
  assert _step(task, 3, [*right, 1]) == (EpisodeEnd.SUBMITTED, 1.0, 0)
  assert _step(task, 3, [*wrong, 1]) == (EpisodeEnd.SUBMITTED, 0.0, 0)
  assert _step(task, 3, [*encode('Seven.'), 1]) == (EpisodeEnd.MALFORMED, 0.0, 0)
  # A turn that was cut is not submitted, whatever its last number is.
  assert _step(task, 3, right, FinishReason.LENGTH) == (EpisodeEnd.TOKEN_LIMIT, 0.0, 0)


def test_prompt_is_the_chat_template_around_examples_and_problem(tokenizer_files, encode):
  prompt = ArithmeticTask(tokenizer_files).start('train', 0).prompt
  turns = [('system', SYSTEM)]
  turns += [turn for asked, said in EXAMPLES for turn in (('user', asked), ('assistant', said))]
  turns += [('user', problems.problem('train', 0).text)]
  want = ''.join(f'<|im_start|>{role}\n{text}<|im_end|>\n' for role, text in turns)
  assert prompt.tolist() == encode(f'{want}<|im_start|>assistant\n')


def test_examples_are_right():
  for asked, said in EXAMPLES:
    a, b = re.findall(r'\d+', asked)
    left, right = said.split(' = ')
    assert re.findall(r'\d+', left) == [a, b] and eval(left) == int(right)


def test_the_port(tokenizer_files):
  task = ArithmeticTask(tokenizer_files)
  assert (task.name, task.stop_ids) == ('arithmetic', (1,))
  assert task.size('train') == 4096 and task.size('heldout') == 64
  assert task.task_id('train', 0) == problems.problem('train', 0).id
  with pytest.raises(ValueError, match="no split 'hard'"):
    task.size('hard')


def test_one_turn_only(tokenizer_files):
  episode = ArithmeticTask(tokenizer_files).start('train', 0)

  async def twice():
    await episode.step(np.array([1]), FinishReason.STOP)
    await episode.step(np.array([1]), FinishReason.STOP)

  with pytest.raises(EnvironmentFailure, match='a second turn; the episode has one'):
    asyncio.run(twice())
