"""The evaluate command: the same numbers as scoring by hand, and one line for a mistake."""

import asyncio
import json

import pytest

from mimo.experiments import evaluate, factories


class _First:
  """The repair task with a handful of held-out tasks, so that an evaluation is short."""

  def __init__(self, task, size: int) -> None:
    self._task, self._size = task, size

  def __getattr__(self, name: str):
    return getattr(self._task, name)

  splits = ('train', 'heldout')

  def size(self, split: str) -> int:
    return self._size if split == 'heldout' else self._task.size(split)


def test_base_policy_scores_between_chance_and_perfection() -> None:
  policy = factories.make_policy('', 'repair')
  task = _First(factories.make_task('repair', policy), 24)
  results = [
    asyncio.run(evaluate.evaluate(policy, task, samples=4, seed=seed)) for seed in (0, 0, 1)
  ]
  assert all(result.complete for result in results)
  # A pure function of the seed, whatever is batched with what.
  assert (results[0].rewards == results[1].rewards).all()
  assert (results[0].rewards != results[2].rewards).any()
  successes = results[0].rewards.sum(axis=1)
  scores = results[0].summary()['heldout']
  assert scores['pass@1'] == pytest.approx(successes.mean() / 4)
  # Of 4 samples with c right, a draw of 4 has one right unless c = 0.
  assert scores['pass@4'] == pytest.approx((successes > 0).mean())
  assert 0.2 < scores['pass@1'] < 0.8


@pytest.mark.parametrize(
  ('flags', 'code', 'word'),
  [
    (['--checkpoint=/nowhere'], 1, '/nowhere'),
    ([], 2, '--checkpoint'),
    (['--checkpoint=configs', '--samples=0'], 1, '--samples'),
    (['--checkpoint=configs', '--out=/nowhere/x.json'], 1, '/nowhere'),
  ],
)
def test_a_mistake_is_one_line(run_command, flags, code, word) -> None:
  done = run_command(evaluate.COMMAND, '--config=mixed', *flags)
  assert done.returncode == code
  assert done.stderr.count('\n') == 1, done.stderr
  assert word in done.stderr


def test_a_dry_run_says_what_it_would_do(run_command, tiny_policy, tmp_path) -> None:
  out = tmp_path / 'rewards.json'
  flags = (f'--checkpoint={tiny_policy}', '--samples=2', f'--out={out}', '--dry_run')
  done = run_command(evaluate.COMMAND, '--config=mixed', *flags)
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == f'would evaluate {tiny_policy}: 256 tasks of repair, 2 samples each\n'
  assert not out.exists()


def test_result_is_json(tiny_policy, tmp_path) -> None:
  policy = factories.make_policy(tiny_policy, 'repair')
  task = _First(factories.make_task('repair', policy), 3)
  result = asyncio.run(evaluate.evaluate(policy, task, samples=2, seed=0))
  stated = json.loads(json.dumps(result.to_json()))
  assert len(stated['rewards']) == 3
  assert stated['complete']
