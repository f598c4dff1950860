"""Scripted episodes by a demonstrator that knows the fix and has bad habits.

The base policy learns from them. It picks up the habits too: it edits at random, submits what it
has not run, gives up. Those cost it tasks that it could solve, and are for RL to unlearn.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from mimo.tasks.repair import environment, problems, vocabulary
from mimo.tasks.repair.machine import Instruction


@dataclasses.dataclass(frozen=True, slots=True)
class Habits:
  """Probabilities of what the demonstrator does.

  Attributes:
    fix: an edit is the fix, and not a slip: another instruction of its kind on some line.
    look_first: the first turn only looks.
    run: an edit is run, and not submitted at once.
    accept: a program that passes is submitted, and not looked at once more.
    retry: after a failed run, the next turn edits again.
    give_up: after a failed run, the next turn submits. Otherwise it looks.
  """

  fix: float
  look_first: float
  run: float
  accept: float
  retry: float
  give_up: float


HABITS = Habits(fix=0.75, look_first=0.1, run=0.6, accept=0.9, retry=0.55, give_up=0.3)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Demonstration:
  """One episode: tokens [T] int32, and agent [T] bool, true where the agent wrote the token."""

  tokens: np.ndarray
  agent: np.ndarray


def demonstrate(
  problem: problems.Problem, rng: random.Random, habits: Habits = HABITS
) -> Demonstration:
  """Plays one episode on `problem`."""
  words = environment.prompt_words(problem)
  agent = [False] * len(words)
  tried = {(problem.line, problem.buggy[problem.line])}
  program = problem.buggy
  turn = ['look'] if rng.random() < habits.look_first else _edit(problem, tried, rng, habits)
  for _ in range(environment.MAX_TURNS):
    written = [*turn, vocabulary.END_OF_TURN]
    words += written
    agent += [True] * len(written)
    actions = environment.parse(written, len(program))
    assert actions is not None, written
    observation: list[str] = []
    for action in actions:
      if action.instruction is not None:
        program = problems.patch(problem.buggy, action.line, action.instruction)
      observation += environment.observe(problem, program, action)
    if actions[-1].kind == 'submit':
      break
    observation.append(vocabulary.YOUR_TURN)
    words += observation
    agent += [False] * len(observation)
    turn = _next(problem, observation, tried, rng, habits)
  return Demonstration(vocabulary.encode(words), np.array(agent))


def _next(
  problem: problems.Problem,
  observation: list[str],
  tried: set[tuple[int, Instruction]],
  rng: random.Random,
  habits: Habits,
) -> list[str]:
  """The turn after `observation`."""
  draw = rng.random()
  if 'ran' not in observation:
    return _edit(problem, tried, rng, habits)
  if all(word == 'pass' for word in observation[observation.index('ran') + 1 : -1]):
    return ['submit'] if draw < habits.accept else ['look', 'run']
  if draw < habits.retry:
    return _edit(problem, tried, rng, habits)
  return ['submit'] if draw < habits.retry + habits.give_up else ['look']


def _edit(
  problem: problems.Problem,
  tried: set[tuple[int, Instruction]],
  rng: random.Random,
  habits: Habits,
) -> list[str]:
  """An edit not tried before, and `run` or `submit`."""
  line, instruction = problem.line, problem.solution[problem.line]
  if rng.random() >= habits.fix:
    slips = [
      (line, slip)
      for line in range(len(problem.buggy))
      for slip in problems.alternatives(problem.buggy, line)
    ]
    fresh = [edit for edit in slips if edit not in tried and edit != (line, instruction)]
    if fresh:
      line, instruction = rng.choice(fresh)
  tried.add((line, instruction))
  then = 'run' if rng.random() < habits.run else 'submit'
  return ['edit', f'@{line}', vocabulary.name(instruction), then]
