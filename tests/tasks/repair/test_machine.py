import pytest

from mimo.tasks.repair import machine, vocabulary
from mimo.tasks.repair.machine import Fault


def program(text: str) -> machine.Program:
  return tuple(vocabulary.INSTRUCTIONS[word] for word in text.split())


@pytest.mark.parametrize(
  ('text', 'word', 'answer'),
  [
    ('push3 add', 4, 7),
    ('push3 sub', 4, 1),
    ('push5 sub', 4, 63),  # words wrap
    ('push9 mul', 8, 8),  # 72 - 64
    ('push5 max', 4, 5),
    ('push5 min', 4, 4),
    ('dup mul', 7, 49),
    ('push9 swap sub', 4, 5),
    ('push2 over add', 5, 7),  # 5 2 5 -> 5 7
    ('push2 drop', 5, 5),
    ('push3 to push4 add loop2', 1, 13),
    ('push3 to dup add loop2', 5, 40),
    ('', 9, 9),
    # The counter starts at 0 and wraps: the body runs 64 times.
    ('add', 9, Fault.ERROR),
    ('swap', 9, Fault.ERROR),
    ('over', 9, Fault.ERROR),
    ('drop dup', 9, Fault.ERROR),
    ('drop to', 9, Fault.ERROR),
    ('drop', 9, Fault.ERROR),  # nothing left to answer with
    ('loop1', 9, Fault.ERROR),  # outside the program
    ('dup loop0', 9, Fault.ERROR),  # the stack grows without end
    ('push1 add loop0', 9, Fault.SLOW),
  ],
)
def test_answers(text: str, word: int, answer: int | Fault):
  assert machine.run(program(text), word) == answer


def test_the_step_limit_is_exact():
  loop = program('push3 to push4 add loop2')  # 2 + 3 * 3 steps
  assert machine.run(loop, 1, step_limit=11) == 13
  assert machine.run(loop, 1, step_limit=10) is Fault.SLOW


def test_a_program_that_never_ends_is_stopped():
  assert machine.run(program('push2 to loop0'), 0, step_limit=10_000) is Fault.SLOW


def test_the_counter_wraps():
  # 64 rounds of + 1 bring a six-bit word back to where it was.
  assert machine.run(program('push1 add loop0'), 9, step_limit=192) == 9


def test_modulus_shows_a_wrap():
  assert machine.run(program('push9 mul'), 8, modulus=1 << 30) == 72
