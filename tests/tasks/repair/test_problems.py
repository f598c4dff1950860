import random

import pytest

from mimo.tasks.repair import machine, problems
from mimo.tasks.repair.machine import Instruction

TRAIN = [problems.train_problem(index) for index in range(2000)]
HELDOUT = problems.heldout_problems()


@pytest.mark.parametrize('problem', [*HELDOUT, *TRAIN[:200]], ids=lambda problem: problem.id)
def test_the_bug_is_real_and_one_line(problem: problems.Problem):
  assert problems.passes(problem.solution, problem.visible + problem.hidden)
  assert not problems.passes(problem.buggy, problem.hidden)
  assert not problems.passes(problem.buggy, problem.visible[: problems.NUM_SHOWN])
  differ = [
    i for i, (a, b) in enumerate(zip(problem.solution, problem.buggy, strict=True)) if a != b
  ]
  assert differ == [problem.line]
  fixed = problems.patch(problem.buggy, problem.line, problem.solution[problem.line])
  assert fixed == problem.solution


def test_visible_and_hidden_tests_share_no_input():
  for problem in HELDOUT:
    visible, hidden = ({word for word, _ in tests} for tests in (problem.visible, problem.hidden))
    assert len(visible) == problems.NUM_VISIBLE
    assert not visible & hidden
    assert visible | hidden == set(problems.INPUTS)


def test_visible_tests_do_not_wrap():
  for problem in HELDOUT:
    for word, answer in problem.visible:
      assert machine.run(problem.solution, word, modulus=1 << 30) == answer


def test_splits_share_no_correct_program():
  assert not {p.solution for p in TRAIN} & {p.solution for p in HELDOUT}
  assert {problems.split_of(p.solution) for p in TRAIN} == {'train'}
  assert {problems.split_of(p.solution) for p in HELDOUT} == {'heldout'}
  # As shown, too: no held-out prompt is a training prompt.
  shown = lambda p: (p.buggy, p.visible)
  assert not {shown(p) for p in TRAIN} & {shown(p) for p in HELDOUT}


def test_problems_differ():
  assert len({p.id for p in HELDOUT}) == len(HELDOUT) == 256
  assert len({p.id for p in TRAIN}) > 0.99 * len(TRAIN)


def test_generation_is_a_function_of_the_seed():
  assert problems.train_problem(7) == TRAIN[7]
  assert problems.generate('heldout', random.Random('repair/heldout')) == HELDOUT[0]
  # Frozen: the shipped list of hard problems names them by what they are.
  assert [HELDOUT[0].id, TRAIN[0].id] == ['115cf2007487', '0e1910fc6ba5']


def test_alternatives_are_of_the_same_kind():
  program = (Instruction('push', 3), Instruction('add'), Instruction('dup'), Instruction('loop', 1))
  assert Instruction('push', 4) in problems.alternatives(program, 0)
  assert problems.alternatives(program, 1) == [
    *(Instruction(op) for op in ('sub', 'mul', 'max', 'min'))
  ]
  assert Instruction('swap') in problems.alternatives(program, 2)
  assert problems.alternatives(program, 3) == [Instruction('loop', n) for n in (0, 2, 3)]
  for line in range(4):
    assert program[line] not in problems.alternatives(program, line)


def test_some_programs_loop():
  assert 0.05 < sum(any(i.op == 'loop' for i in p.buggy) for p in TRAIN) / len(TRAIN) < 0.6
