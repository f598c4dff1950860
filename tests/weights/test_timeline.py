"""Which publication holds which update, along one run's history."""

from mimo.types import Version
from mimo.weights.timeline import Timeline


def test_what_was_published_after_a_checkpoint_that_a_start_went_back_to_is_abandoned():
  # Start 0 goes from 0 to 5 and dies; start 1 goes on from 3, reaches 4 and dies; start 2 from 3.
  published = [
    *(Version(number=n, incarnation=0, update=n) for n in range(6)),
    Version(number=6, incarnation=1, update=3),
    Version(number=7, incarnation=1, update=4),
    Version(number=8, incarnation=2, update=3),
    Version(number=9, incarnation=2, update=4),
  ]
  timeline = Timeline(published, starts=[0, 3, 3])
  assert timeline.update_of == {0: 0, 1: 1, 2: 2, 3: 3, 6: 3, 8: 3, 9: 4}
  # Of several publications of an update, the newest.
  numbers = {update: version.number for update, version in timeline.version_of.items()}
  assert numbers == {0: 0, 1: 1, 2: 2, 3: 8, 4: 9}
  # Start 1 went further back than start 2 does: what it made unreachable stays so.
  other = Timeline(published, starts=[0, 1, 3])
  assert other.update_of == {0: 0, 1: 1, 6: 3, 8: 3, 9: 4}


def test_what_is_published_is_added():
  timeline = Timeline([], starts=[0])
  timeline.add(Version(number=7, incarnation=0, update=0))
  timeline.add(Version(number=8, incarnation=0, update=0))
  assert timeline.update_of == {7: 0, 8: 0}
  assert timeline.version_of[0].number == 8
