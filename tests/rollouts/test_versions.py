import dataclasses

from mimo.rollouts import versions
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.types import PromptRef, Turn, VersionSpan


def _trajectory(kit, turns):
  async def one():
    spec = EpisodeSpec('s', PromptRef(0, 'train', 0), 0, 0, kit.SAMPLING, None, None)
    return (await run_episode(kit.TinyTask(), kit.sampler(kit.win), spec)).trajectory

  return dataclasses.replace(kit.run(one()), turns=turns)


def test_staleness_of_each_range_by_hand(kit):
  # Publications 10, 11, 14 hold the weights of updates 3, 4, 7; the trainer has applied 9.
  turns = (
    Turn(2, 7, None, (VersionSpan(2, 5, 10), VersionSpan(5, 7, 11))),
    Turn(9, 10, None, (VersionSpan(9, 10, 14),)),
  )
  trajectory = _trajectory(kit, turns)
  ranges = versions.stale_ranges(trajectory, 9, {10: 3, 11: 4, 14: 7})
  assert ranges == ((2, 5, 6), (5, 7, 5), (9, 10, 2))
  assert versions.stale_ranges(trajectory, 9, {10: 3, 14: 7}) is None
