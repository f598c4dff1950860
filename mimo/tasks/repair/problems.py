"""Buggy programs and their tests, seeded, in disjoint splits.

A correct program is drawn from a few families, one of its instructions is replaced by another of
its kind, and the two are told apart by running them. Which split a problem may be in is decided by
a hash of its correct program, so no program that solves a training problem solves a held-out one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random

from mimo.tasks.repair import machine, vocabulary
from mimo.tasks.repair.machine import Instruction, Program

SIZES = {'train': 65536, 'heldout': 256}
INPUTS = range(16)
SMALL_INPUTS = 8  # visible tests use inputs below it, so that numbers stay small
NUM_VISIBLE = 4
NUM_SHOWN = 3  # of the visible tests, in the prompt; `look` shows the rest
_MAX_CONSTANT = 6
_MIN_ANSWERS = 4  # different ones among hidden tests, so that no constant passes
_HELDOUT_SHARE = 8  # one correct program in so many is kept for held-out problems

Test = tuple[int, int]  # input, expected answer


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
  """One task: `buggy` is `solution` with line `line` replaced.

  Attributes:
    solution: passes every test.
    buggy: fails a shown test and a hidden one.
    line: where they differ.
    visible: what `run` runs; the prompt shows the first NUM_SHOWN.
    hidden: what a submission is graded by; other inputs than the visible ones.
  """

  solution: Program
  buggy: Program
  line: int
  visible: tuple[Test, ...]
  hidden: tuple[Test, ...]

  @property
  def id(self) -> str:
    """Twelve hexadecimal digits of a hash of all that the problem is."""
    return _digest((text(self.solution), text(self.buggy), self.visible, self.hidden))[:12]


def text(program: Program) -> str:
  """The program's tokens, joined by spaces."""
  return ' '.join(map(vocabulary.name, program))


def _digest(value: object) -> str:
  return hashlib.sha256(repr(value).encode()).hexdigest()


def passes(program: Program, tests: tuple[Test, ...]) -> bool:
  """Whether `program` answers every test, each on a fresh machine."""
  return all(machine.run(program, word) == answer for word, answer in tests)


def patch(program: Program, line: int, instruction: Instruction) -> Program:
  """`program` with one line replaced."""
  return (*program[:line], instruction, *program[line + 1 :])


def alternatives(program: Program, line: int) -> list[Instruction]:
  """What a slip could have put in `line`: the other instructions of its kind."""
  op, _ = current = program[line]
  if op == 'push':
    kind = [Instruction('push', n) for n in range(1, _MAX_CONSTANT + 1)]
  elif op == 'loop':
    kind = [Instruction('loop', n) for n in range(len(program))]
  else:
    names = machine.BINARY if op in machine.BINARY else machine.STACK
    kind = [Instruction(name) for name in names]
  return [instruction for instruction in kind if instruction != current]


def split_of(solution: Program) -> str:
  """The only split in which `solution` may be the correct program."""
  return 'train' if int(_digest(text(solution))[:8], 16) % _HELDOUT_SHARE else 'heldout'


def generate(split: str, rng: random.Random) -> Problem:
  """Draws a problem of `split`."""
  while True:
    solution = _solution(rng)
    if split_of(solution) != split:
      continue
    problem = _break(solution, rng)
    if problem is not None:
      return problem


def train_problem(index: int) -> Problem:
  """Problem `index` of the training split: a function of the index alone."""
  return generate('train', random.Random(f'repair/train/{index}'))


@functools.cache
def heldout_problems() -> tuple[Problem, ...]:
  """The held-out split, all different."""
  rng = random.Random('repair/heldout')
  chosen: dict[str, Problem] = {}
  while len(chosen) < SIZES['heldout']:
    problem = generate('heldout', rng)
    chosen.setdefault(problem.id, problem)
  return tuple(chosen.values())


def _push(rng: random.Random, low: int, high: int) -> Instruction:
  return Instruction('push', rng.randint(low, high))


def _step(rng: random.Random) -> Program:
  """Two or three lines that turn the top word into another."""
  kind = rng.random()
  if kind < 0.7:
    op = rng.choice(('add', 'add', 'sub', 'mul', 'max', 'min'))
    low, high = (2, 3) if op == 'mul' else (1, _MAX_CONSTANT)
    return (_push(rng, low, high), Instruction(op))
  if kind < 0.9:
    return (Instruction('dup'), Instruction(rng.choice(('add', 'mul'))))
  return (_push(rng, 1, _MAX_CONSTANT), Instruction('swap'), Instruction('sub'))


def _loop(rng: random.Random) -> Program:
  """`push n, to, body, loop 2`: the body n times over."""
  if rng.random() < 0.7:
    times, body = rng.randint(2, 5), (_push(rng, 1, 5), Instruction(rng.choice(('add', 'sub'))))
  else:
    times, body = rng.randint(2, 3), (Instruction('dup'), Instruction('add'))
  return (Instruction('push', times), Instruction('to'), *body, Instruction('loop', 2))


def _solution(rng: random.Random) -> Program:
  if rng.random() < 0.3:
    return _loop(rng)
  program = _step(rng) + _step(rng)
  more = _step(rng) if rng.random() < 0.2 else ()
  return program + more if len(program + more) <= machine.MAX_LINES else program


def _break(solution: Program, rng: random.Random) -> Problem | None:
  """A problem with this solution, or None when the draw has too few tests or no real bug."""
  answers = {word: machine.run(solution, word) for word in INPUTS}
  tests: dict[int, int] = {w: a for w, a in answers.items() if not isinstance(a, machine.Fault)}
  # The visible tests stay clear of wrapping, so that they show what the program is meant to do.
  small = [word for word in INPUTS if word < SMALL_INPUTS]
  plain = [w for w in small if machine.run(solution, w, modulus=1 << 30) == answers[w]]
  if len(tests) < len(INPUTS) or len(plain) < NUM_VISIBLE:
    return None
  seen = sorted(rng.sample(plain, NUM_SHOWN))
  seen += rng.sample([word for word in plain if word not in seen], NUM_VISIBLE - NUM_SHOWN)
  visible = tuple((word, tests[word]) for word in seen)
  hidden = tuple((word, tests[word]) for word in INPUTS if word not in seen)
  if len({answer for _, answer in hidden}) < _MIN_ANSWERS:
    return None
  line = rng.randrange(len(solution))
  buggy = patch(solution, line, rng.choice(alternatives(solution, line)))
  if passes(buggy, visible[:NUM_SHOWN]) or passes(buggy, hidden):
    return None
  return Problem(solution, buggy, line, visible, hidden)
