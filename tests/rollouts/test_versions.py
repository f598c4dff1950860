import dataclasses

from mimo.rollouts import versions
from mimo.rollouts.session import EpisodeSpec, run_episode
from mimo.types import PromptRef, Turn, Version, VersionSpan


def test_what_was_published_after_a_checkpoint_that_a_start_went_back_to_is_abandoned():
  # Start 0 goes from 0 to 5 and dies; start 1 goes on from 3, reaches 4 and dies; start 2 from 3.
  published = [
    *(Version(number=n, incarnation=0, update=n) for n in range(6)),
    Version(number=6, incarnation=1, update=3),
    Version(number=7, incarnation=1, update=4),
    Version(number=8, incarnation=2, update=3),
    Version(number=9, incarnation=2, update=4),
  ]
  live = versions.live_updates(published, starts=[0, 3, 3])
  assert live == {0: 0, 1: 1, 2: 2, 3: 3, 6: 3, 8: 3, 9: 4}
  # Start 1 went further back than start 2 does: what it made unreachable stays so.
  assert versions.live_updates(published, starts=[0, 1, 3]) == {0: 0, 1: 1, 6: 3, 8: 3, 9: 4}


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
