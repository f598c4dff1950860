import asyncio

import numpy as np
import pytest

from mimo.tasks import base
from mimo.tasks.repair import environment, problems, vocabulary
from mimo.tasks.repair.machine import Instruction
from mimo.types import EpisodeEnd, FinishReason

ADD, PUSH2, PUSH3 = Instruction('add'), Instruction('push', 2), Instruction('push', 3)
# x + 3, broken to x + 2.
PROBLEM = problems.Problem(
  solution=(PUSH3, ADD),
  buggy=(PUSH2, ADD),
  line=0,
  visible=((0, 3), (1, 4), (5, 8), (2, 5)),
  hidden=((3, 6), (4, 7)),
)


def play(problem: problems.Problem, *turns: str) -> tuple[list[str], base.StepResult]:
  """Plays turns; returns the observations and the last result."""
  episode = environment.RepairEpisode(problem)

  async def steps() -> list[base.StepResult]:
    return [
      await episode.step(vocabulary.encode(turn.split()), FinishReason.STOP) for turn in turns
    ]

  results = asyncio.run(steps())
  return [' '.join(vocabulary.decode(result.observation)) for result in results], results[-1]


def test_prompt():
  episode = environment.RepairEpisode(PROBLEM)
  assert ' '.join(vocabulary.decode(episode.prompt)) == 'task push2 add tests 0 3 1 4 5 8 >'


def test_a_repair():
  observations, last = play(
    PROBLEM, 'look ;', 'run ;', 'edit @0 push3 ;', 'look run ;', 'run submit ;'
  )
  assert observations == [
    'now push2 add tests 2 5 >',
    'ran 2 3 7 4 >',
    'ok >',
    'now push3 add tests 2 5 ran pass pass pass pass >',
    '',
  ]
  assert (last.end, last.reward) == (EpisodeEnd.SUBMITTED, 1.0)


def test_an_edit_replaces_the_one_before():
  _, last = play(PROBLEM, 'edit @1 sub ;', 'edit @0 push3 ;', 'submit ;')
  assert last.reward == 1.0
  _, last = play(PROBLEM, 'edit @0 push3 ;', 'edit @1 sub ;', 'submit ;')
  assert (last.end, last.reward) == (EpisodeEnd.SUBMITTED, 0.0)


def test_faults_are_observed():
  observations, _ = play(PROBLEM, 'edit @0 add run ;', 'edit @1 loop0 run ;')
  assert observations[0] == 'ok ran error error error error >'
  assert observations[1] == 'ok ran error error error error >'  # 17 words on the stack
  observations, _ = play(PROBLEM, 'edit @1 loop1 run ;')
  assert observations == ['ok ran 2 2 2 2 >']  # 64 rounds of nothing


@pytest.mark.parametrize(
  'turn',
  [
    *(';', 'run', 'submit run ;', 'edit @0 ;', 'edit push3 @0 ;', 'edit @2 push3 ;'),
    *(
      'edit @0 3 ;',
      '> ;',
      'run ; run ;',
      'edit @0 push3',
      '<pad> ;',
      'task ;',
      'run <reserved0> ;',
    ),
  ],
)
def test_malformed_turns_end_the_episode_at_zero(turn: str):
  _, last = play(PROBLEM, turn)
  assert (last.end, last.reward) == (EpisodeEnd.MALFORMED, 0.0)
  assert last.observation.size == 0


def test_turn_limit():
  _, last = play(PROBLEM, *['run ;'] * 5, 'edit @0 push3 ;')
  assert (last.end, last.reward) == (EpisodeEnd.TURN_LIMIT, 0.0)
  _, last = play(PROBLEM, *['run ;'] * 4, 'edit @0 push3 ;', 'submit ;')
  assert (last.end, last.reward) == (EpisodeEnd.SUBMITTED, 1.0)


def test_token_limit():
  turn = ' '.join(['look'] * 7) + ' ;'
  _, last = play(PROBLEM, turn, turn)
  assert (last.end, last.reward) == (EpisodeEnd.TOKEN_LIMIT, 0.0)


def test_a_turn_cut_by_the_context_is_not_malformed():
  episode = environment.RepairEpisode(PROBLEM)
  tokens = np.full(environment.MAX_TOKENS, vocabulary.STOP_ID + 1, np.int32)
  result = asyncio.run(episode.step(tokens, FinishReason.LENGTH))
  assert result.end is EpisodeEnd.TOKEN_LIMIT
  episode = environment.RepairEpisode(PROBLEM)
  result = asyncio.run(episode.step(tokens[:8], FinishReason.LENGTH))
  assert result.end is EpisodeEnd.MALFORMED


def test_misuse_is_named():
  episode = environment.RepairEpisode(PROBLEM)
  with pytest.raises(base.EnvironmentFailure, match='aborted'):
    asyncio.run(episode.step(np.zeros(0, np.int32), FinishReason.ABORT))
  asyncio.run(episode.close())
  with pytest.raises(ValueError, match='ended'):
    asyncio.run(episode.step(vocabulary.encode(['run', ';']), FinishReason.STOP))


def test_no_episode_outgrows_the_limits():
  """The longest turns that parse, to the end, on the longest programs."""
  for problem in problems.heldout_problems():
    episode = environment.RepairEpisode(problem)
    total = len(episode.prompt)
    assert total <= 36
    for turn in ['edit @0 push3 run ;'] * 5:
      tokens = vocabulary.encode(turn.split())
      result = asyncio.run(episode.step(tokens, FinishReason.STOP))
      total += len(tokens) + len(result.observation)
      assert result.end is None, total  # five repairs tried and a submission fit
    assert total + 2 <= environment.MAX_TOKENS


CHEATS = {
  'unedited': ['submit ;'],
  'for ever': ['edit @{last} loop0 submit ;'],
  'for ever, run': ['edit @{last} loop0 run ;', 'submit ;'],
  'edited back': ['edit @0 push3 ;', 'edit @0 {old} ;', 'submit ;'],
}
CHEATS |= {f'always {n}': [f'edit @{{last}} push{n} submit ;'] for n in range(10)}


@pytest.mark.parametrize('cheat', CHEATS)
def test_cheaters_score_nothing(cheat: str):
  for problem in problems.heldout_problems():
    old = vocabulary.name(problem.buggy[0])
    turns = [turn.format(last=len(problem.buggy) - 1, old=old) for turn in CHEATS[cheat]]
    _, last = play(problem, *turns)
    assert (last.end, last.reward) == (EpisodeEnd.SUBMITTED, 0.0), problem


def test_the_known_fix_scores_on_every_heldout_problem():
  for problem in problems.heldout_problems():
    fix = vocabulary.name(problem.solution[problem.line])
    _, last = play(problem, f'edit @{problem.line} {fix} run ;', 'submit ;')
    assert last.reward == 1.0
