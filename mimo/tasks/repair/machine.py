"""A stack machine with six-bit words.

A program starts with its input on the stack and answers with the top of the stack. Words are
0 .. 63 and arithmetic wraps. `to` pops a word into the counter; `loop k` takes one from the
counter and, unless that makes it 0, jumps to line k. Since a jump may go anywhere and the counter
wraps, programs can run for ever: the step limit is part of the machine.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from typing import NamedTuple

WORD = 64
STEP_LIMIT = 100
MAX_LINES = 6
MAX_CONSTANT = 9
_MAX_DEPTH = 16

BINARY: dict[str, Callable[[int, int], int]] = {
  'add': operator.add,
  'sub': operator.sub,
  'mul': operator.mul,
  'max': max,
  'min': min,
}
STACK = ('dup', 'swap', 'over', 'drop', 'to')


class Instruction(NamedTuple):
  """One line. `argument` is the constant of `push`, the line of `loop`, else 0."""

  op: str
  argument: int = 0


Program = tuple[Instruction, ...]


class Fault(enum.StrEnum):
  """Why a program has no answer."""

  ERROR = 'error'  # too few or too many words on the stack, or a jump outside the program
  SLOW = 'slow'  # the step limit was reached


def run(
  program: Program, word: int, *, step_limit: int = STEP_LIMIT, modulus: int = WORD
) -> int | Fault:
  """Runs `program` on a fresh machine and returns its answer, or why it has none.

  Args:
    program: its lines.
    word: the input, the only word on the stack at the start.
    step_limit: how many instructions may be executed.
    modulus: words are 0 .. modulus - 1. Another than WORD shows whether an answer wrapped.
  """
  stack = [word]
  counter = line = steps = 0
  while line < len(program):
    if steps == step_limit:
      return Fault.SLOW
    steps += 1
    op, argument = program[line]
    line += 1
    if op == 'push':
      stack.append(argument)
    elif op == 'loop':
      if argument >= len(program):
        return Fault.ERROR
      counter = (counter - 1) % modulus
      if counter:
        line = argument
    elif not _apply(op, stack, modulus):
      if op != 'to' or not stack:
        return Fault.ERROR
      counter = stack.pop()
    if len(stack) > _MAX_DEPTH:
      return Fault.ERROR
  return stack[-1] if stack else Fault.ERROR


def _apply(op: str, stack: list[int], modulus: int) -> bool:
  """Applies an instruction that only touches the stack; False when it can't be."""
  if op in BINARY:
    if len(stack) < 2:
      return False
    right = stack.pop()
    stack[-1] = BINARY[op](stack[-1], right) % modulus
    return True
  if op == 'to' or len(stack) < (2 if op in ('swap', 'over') else 1):
    return False
  if op == 'dup':
    stack.append(stack[-1])
  elif op == 'over':
    stack.append(stack[-2])
  elif op == 'swap':
    stack[-1], stack[-2] = stack[-2], stack[-1]
  else:
    stack.pop()
  return True
