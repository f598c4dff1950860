import asyncio
import dataclasses
import random

import numpy as np
import pytest

from mimo.tasks.repair import demonstrations, environment, problems, vocabulary
from mimo.tasks.repair.demonstrations import Habits
from mimo.types import EpisodeEnd, FinishReason

PERFECT = Habits(fix=1.0, look_first=0.0, run=1.0, accept=1.0, retry=1.0, give_up=0.0)
PROBLEMS = [problems.train_problem(index) for index in range(200)]


def replay(problem: problems.Problem, shown: demonstrations.Demonstration):
  """Plays the demonstrator's tokens against the environment; returns the ids and the result."""
  episode = environment.RepairEpisode(problem)
  ids = list(episode.prompt)
  result = None
  turn: list[int] = []
  for token in shown.tokens[shown.agent]:
    turn.append(int(token))
    if token == vocabulary.STOP_ID:
      result = asyncio.run(episode.step(np.array(turn, np.int32), FinishReason.STOP))
      ids += [*turn, *result.observation]
      turn = []
  assert not turn
  return ids, result


@pytest.mark.parametrize('habits', [PERFECT, demonstrations.HABITS])
def test_a_demonstration_is_an_episode_of_the_environment(habits: Habits):
  for index, problem in enumerate(PROBLEMS):
    shown = demonstrations.demonstrate(problem, random.Random(index), habits)
    ids, result = replay(problem, shown)
    assert result.end in (EpisodeEnd.SUBMITTED, EpisodeEnd.TURN_LIMIT, EpisodeEnd.TOKEN_LIMIT)
    # Where a limit cut the episode, the environment gave no last observation.
    assert shown.tokens.tolist()[: len(ids)] == ids
    if result.end is EpisodeEnd.SUBMITTED:
      assert len(ids) == len(shown.tokens)


def test_without_bad_habits_every_problem_is_solved():
  for index, problem in enumerate(PROBLEMS):
    shown = demonstrations.demonstrate(problem, random.Random(index), PERFECT)
    _, result = replay(problem, shown)
    assert result.reward == 1.0
    assert shown.agent.sum() == 7  # edit, line, instruction, run, end; submit, end


def test_habits_have_their_stated_frequencies():
  rng = random.Random(0)
  habits = dataclasses.replace(PERFECT, fix=0.6, run=0.25)
  fixes = runs = 0
  for problem in PROBLEMS * 5:
    shown = demonstrations.demonstrate(problem, rng, habits)
    first = vocabulary.decode(shown.tokens[shown.agent][:4])
    fixes += first[1:3] == [f'@{problem.line}', vocabulary.name(problem.solution[problem.line])]
    runs += first[3] == 'run'
  assert abs(fixes / 1000 - 0.6) < 0.05  # three standard errors
  assert abs(runs / 1000 - 0.25) < 0.05


def test_no_edit_is_made_twice():
  never_right = dataclasses.replace(PERFECT, fix=0.0)
  for index, problem in enumerate(PROBLEMS):
    shown = demonstrations.demonstrate(problem, random.Random(index), never_right)
    words = vocabulary.decode(shown.tokens[shown.agent])
    edits = [tuple(words[i + 1 : i + 3]) for i, word in enumerate(words) if word == 'edit']
    # A slip that happens to pass is submitted.
    assert len(edits) == len(set(edits))
    assert len(edits) == environment.MAX_TURNS or words[-2] == 'submit'
