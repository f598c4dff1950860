"""The `repair` task: its splits, limits and shipped base policy."""

from __future__ import annotations

import functools
import pathlib

from mimo.tasks.repair import environment, problems, vocabulary

POLICY_DIR = pathlib.Path(__file__).parent / 'policy'  # the base policy, a Hugging Face directory
HARD_FILE = POLICY_DIR / 'hard.txt'  # ids of the held-out problems that it solves least


@functools.cache
def _hard_indices() -> tuple[int, ...]:
  index = {problem.id: i for i, problem in enumerate(problems.heldout_problems())}
  if not HARD_FILE.is_file():
    raise ValueError(f'{HARD_FILE} is missing; mimo.experiments.pretrain writes it')
  names = HARD_FILE.read_text(encoding='utf-8').split()
  unknown = [name for name in names if name not in index]
  if unknown:
    raise ValueError(
      f'{HARD_FILE.name}: {unknown[0]!r} is no held-out problem; expected ids that '
      'mimo.experiments.pretrain wrote for the problems as they are generated now'
    )
  return tuple(index[name] for name in names)


class RepairTask:
  """Program repair in miniature; see `environment` for what the agent may do."""

  name = 'repair'
  splits = ('train', 'heldout', 'hard')
  stop_ids = (vocabulary.STOP_ID,)
  max_turn_tokens = environment.MAX_TURN_TOKENS
  max_sampled_tokens = environment.MAX_TURNS * environment.MAX_TURN_TOKENS
  max_tokens = environment.MAX_TOKENS

  def size(self, split: str) -> int:
    if split == 'hard':
      return len(_hard_indices())
    if split not in problems.SIZES:
      raise ValueError(f'repair has no split {split!r}; expected train, heldout or hard')
    return problems.SIZES[split]

  def problem(self, split: str, index: int) -> problems.Problem:
    """Task `index` of a split."""
    size = self.size(split)
    if not 0 <= index < size:
      raise ValueError(f'task {index} of {split}; expected 0 to {size - 1}')
    if split == 'train':
      return problems.train_problem(index)
    return problems.heldout_problems()[index if split == 'heldout' else _hard_indices()[index]]

  def task_id(self, split: str, index: int) -> str:
    return self.problem(split, index).id

  def start(self, split: str, index: int) -> environment.RepairEpisode:
    return environment.RepairEpisode(self.problem(split, index))
