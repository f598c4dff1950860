"""Episodes of `repair`: turns in, observations out, a verdict at the end.

The prompt is `task <program> tests <input answer>... >`. A turn is one or more actions and the
end of turn:

    look            shows the program as it stands and the visible tests that the prompt left out
    edit @k <op>    replaces line k of the program as given; a later edit takes the place of it
    run             runs the visible tests: for each `pass`, or the answer got, `error` or `slow`
    submit          ends the episode; nothing may follow

A submission is right when the program then passes the hidden tests, each on a fresh machine with
a step limit. A repair is one line, so an agent can't write a program that only knows the tests.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from mimo.tasks import base
from mimo.tasks.repair import machine, problems, vocabulary
from mimo.types import EpisodeEnd, FinishReason

MAX_TURNS = 6
MAX_TURN_TOKENS = 8
MAX_TOKENS = 96


@dataclasses.dataclass(frozen=True, slots=True)
class Action:
  """One action; `line` and `instruction` are those of an edit."""

  kind: str
  line: int = 0
  instruction: machine.Instruction | None = None


def parse(words: list[str], num_lines: int) -> list[Action] | None:
  """The actions of one turn, or None when it is malformed."""
  if len(words) < 2 or words[-1] != vocabulary.END_OF_TURN:
    return None
  actions: list[Action] = []
  rest = words[:-1]
  while rest:
    if actions and actions[-1].kind == 'submit':
      return None
    kind = rest[0]
    if kind in ('look', 'run', 'submit'):
      actions.append(Action(kind))
      rest = rest[1:]
    elif kind == 'edit' and len(rest) >= 3:
      line = vocabulary.LINES.get(rest[1])
      instruction = vocabulary.INSTRUCTIONS.get(rest[2])
      if line is None or line >= num_lines or instruction is None:
        return None
      actions.append(Action(kind, line, instruction))
      rest = rest[3:]
    else:
      return None
  return actions


def _pairs(tests: tuple[problems.Test, ...]) -> list[str]:
  return [str(number) for test in tests for number in test]


def prompt_words(problem: problems.Problem) -> list[str]:
  """What the agent is shown first."""
  program = [vocabulary.name(instruction) for instruction in problem.buggy]
  shown = _pairs(problem.visible[: problems.NUM_SHOWN])
  return ['task', *program, 'tests', *shown, vocabulary.YOUR_TURN]


def observe(problem: problems.Problem, program: machine.Program, action: Action) -> list[str]:
  """What one action shows, `program` being the program after it. A submission shows nothing."""
  if action.kind == 'look':
    rest = _pairs(problem.visible[problems.NUM_SHOWN :])
    return ['now', *(vocabulary.name(instruction) for instruction in program), 'tests', *rest]
  if action.kind == 'edit':
    return ['ok']
  if action.kind == 'run':
    answers = ((machine.run(program, word), answer) for word, answer in problem.visible)
    return ['ran', *('pass' if got == answer else str(got) for got, answer in answers)]
  return []


class RepairEpisode:
  """One attempt. It starts from the problem as given and keeps its own patch."""

  def __init__(self, problem: problems.Problem):
    self._problem = problem
    self._program = problem.buggy
    self._prompt = vocabulary.encode(prompt_words(problem))
    self._num_tokens = len(self._prompt)
    self._num_turns = 0
    self._ended = False

  @property
  def prompt(self) -> np.ndarray:
    return self._prompt

  async def step(self, tokens: np.ndarray, finish: FinishReason) -> base.StepResult:
    if self._ended:
      raise ValueError('the episode has ended; expected no further turn')
    if finish is FinishReason.ABORT:
      raise base.EnvironmentFailure('an aborted turn is no turn; expected it to be resampled')
    self._num_turns += 1
    self._num_tokens += len(tokens)
    actions = parse(vocabulary.decode(tokens), len(self._problem.buggy))
    if actions is None:
      # Cut short by the context's end, a turn is not the agent's mistake.
      cut = finish is FinishReason.LENGTH and self._num_tokens >= MAX_TOKENS
      return self._end(EpisodeEnd.TOKEN_LIMIT if cut else EpisodeEnd.MALFORMED)
    observation: list[str] = []
    for action in actions:
      if action.instruction is not None:
        self._program = problems.patch(self._problem.buggy, action.line, action.instruction)
      observation += observe(self._problem, self._program, action)
    if actions[-1].kind == 'submit':
      right = problems.passes(self._program, self._problem.hidden)
      return self._end(EpisodeEnd.SUBMITTED, reward=float(right))
    if self._num_turns == MAX_TURNS:
      return self._end(EpisodeEnd.TURN_LIMIT)
    ids = vocabulary.encode([*observation, vocabulary.YOUR_TURN])
    self._num_tokens += len(ids)
    if self._num_tokens >= MAX_TOKENS:
      return self._end(EpisodeEnd.TOKEN_LIMIT)
    return base.StepResult(ids, None, 0.0)

  def _end(self, end: EpisodeEnd, reward: float = 0.0) -> base.StepResult:
    self._ended = True
    return base.StepResult(np.zeros(0, np.int32), end, reward)

  async def close(self) -> None:
    self._ended = True
