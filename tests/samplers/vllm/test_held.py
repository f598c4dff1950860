"""Views that stay while a server may read them."""

import contextlib
import errno
import os

import pytest

from mimo.samplers.vllm.held import HeldViews
from mimo.types import Version
from mimo.weights.store import Blob

_BLOBS = {'a': Blob('00', 1)}


class _Feed:
  def __init__(self, root) -> None:
    self.root = root

  def latest(self):
    raise NotImplementedError

  def locate(self, version):
    directory = self.root / str(version.number)
    if not directory.exists():
      raise ValueError(f'no version {version.number}')
    return directory, _BLOBS


@pytest.fixture
def feed(tmp_path) -> _Feed:
  for number in (1, 2):
    (tmp_path / 'store' / str(number)).mkdir(parents=True)
    (tmp_path / 'store' / str(number) / 'a').write_text(str(number))
  return _Feed(tmp_path / 'store')


def test_a_view_outlives_its_publication_and_takes_no_room(feed, tmp_path) -> None:
  views = HeldViews(feed, tmp_path / 'held')
  one = views.hold(Version(1, 0, 0))
  assert one.files == _BLOBS
  assert (one.directory / 'a').samefile(feed.root / '1' / 'a')
  (feed.root / '1' / 'a').unlink()
  (feed.root / '1').rmdir()
  assert views.hold(Version(1, 0, 0)) == one
  assert (one.directory / 'a').read_text() == '1'


def test_what_nobody_needs_is_let_go(feed, tmp_path) -> None:
  views = HeldViews(feed, tmp_path / 'held')
  one, two = (views.hold(Version(number, 0, 0)) for number in (1, 2))
  views.keep({Version(2, 0, 0), None})
  assert not one.directory.exists()
  assert two.directory.exists()
  views.close()
  assert not (tmp_path / 'held').exists()


def test_a_full_disk_costs_no_view(feed, small_disk) -> None:
  """Not one file more can be made there: views are read where the store has them."""
  views = HeldViews(feed, small_disk / 'held')
  made = 0
  with contextlib.suppress(OSError):
    while True:
      (small_disk / f'empty{made}').touch()
      made += 1
  assert views.hold(Version(1, 0, 0)).directory == feed.root / '1'
  for number in range(made):
    (small_disk / f'empty{number}').unlink()
  views.keep(set())


@pytest.mark.parametrize('number', [errno.EXDEV, errno.ENOSPC, errno.EPERM])
def test_where_nothing_can_be_linked_views_are_read_in_place(
  feed, tmp_path, monkeypatch, number
) -> None:
  def link(*paths):
    raise OSError(number, os.strerror(number))

  monkeypatch.setattr(os, 'link', link)
  views = HeldViews(feed, tmp_path / 'held')
  assert views.hold(Version(1, 0, 0)).directory == feed.root / '1'
  views.keep(set())
  assert (feed.root / '1' / 'a').read_text() == '1'


def test_a_version_that_is_not_stored_is_said(feed, tmp_path) -> None:
  (tmp_path / 'held').mkdir()
  (tmp_path / 'held' / 'left by another').write_text('')
  views = HeldViews(feed, tmp_path / 'held')
  assert not list((tmp_path / 'held').iterdir())
  with pytest.raises(ValueError, match='no version 3'):
    views.hold(Version(3, 0, 0))
