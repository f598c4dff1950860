"""What a run publishes: which versions are kept, and what is missing is named."""

import pytest

from mimo.experiments import factories
from mimo.experiments.publications import FirstPublicationError, Publications
from mimo.weights.publication import Publisher, Snapshot
from mimo.weights.views import ViewSpec

_VIEWS = {name: ViewSpec(name) for name in ('bf16', 'fp8_channel')}


@pytest.fixture(scope='module')
def policy(tiny_policy):
  return factories.make_policy(tiny_policy, 'repair')


@pytest.fixture
def opened(policy, tmp_path):
  def open_publications(starts=(0,)):
    return Publications(tmp_path / 'store', policy, _VIEWS, starts)

  return open_publications


def _publish(publications, policy, update, needed_from=float('inf')):
  snapshot = Snapshot(policy.model, policy.params)
  return publications.publish(update, snapshot, needed_from=needed_from)


def _break(monkeypatch, view):
  publish_view = Publisher._publish_view

  def full(self, name, *rest):
    if name == view:
      raise OSError('the disk is full')
    return publish_view(self, name, *rest)

  monkeypatch.setattr(Publisher, '_publish_view', full)


def test_the_newest_are_kept_and_what_is_needed(opened, policy):
  publications = opened()
  for update in range(7):
    _publish(publications, policy, update)
  held = {number for number in range(7) if publications.evaluated(number) is not None}
  assert held == {3, 4, 5, 6}
  # A later start knows what the store still has of this history.
  again = opened(starts=(0, 5))
  assert sorted(again.timeline.version_of) == [3, 4, 5]
  _publish(again, policy, 6, needed_from=3)
  _publish(again, policy, 7, needed_from=3)
  assert again.evaluated(3) is not None and again.evaluated(2) is None


def test_a_version_that_is_drawn_from_again_is_named_where_it_is_gone(opened, policy):
  publications = opened()
  publications.check_held(range(0))
  for update in range(6):
    _publish(publications, policy, update)
  again = opened()
  again.check_held(range(2, 6))
  with pytest.raises(ValueError, match='no publication of update 0; expected every one of updates'):
    again.check_held(range(6))


def test_a_view_without_a_version_is_named_once_nothing_can_be_served(opened, policy, monkeypatch):
  publications = opened()
  _break(monkeypatch, 'fp8_channel')
  _publish(publications, policy, 0)
  with pytest.raises(
    FirstPublicationError, match=r'view fp8_channel could not be published: .*full'
  ):
    publications.check_started()
  monkeypatch.undo()
  _publish(publications, policy, 0)
  publications.check_started()
  # A later failure leaves the view at its last version.
  _break(monkeypatch, 'bf16')
  _publish(publications, policy, 1)
  publications.check_started()
  assert publications.evaluated(1) is None and publications.evaluated(0) is not None
