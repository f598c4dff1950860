"""A real server and the versions of its view: followed where they are whole, never served else."""

import pathlib

import jax
import numpy as np
import pytest

from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.samplers.base import SamplerError
from mimo.types import TurnSample
from mimo.weights.publication import PublicationError, Snapshot, ViewFollower
from mimo.weights.store import FileStore

pytestmark = pytest.mark.vllm


def _same(one: TurnSample, two: TurnSample) -> bool:
  return np.array_equal(one.tokens, two.tokens) and np.array_equal(one.logps, two.logps)


def test_versions_are_followed_and_what_they_draw_differs(rig) -> None:
  drawn = []
  for scale in (1.0, 1.5, 1.0):
    rig.feed.newest = rig.publish(scale)
    drawn.append(rig.run(rig.turn(f'of {scale}')))
    assert drawn[-1].spans[0].version == rig.replica.version.number == rig.feed.newest.number
  first, second, third = drawn
  assert not _same(first, second)
  assert _same(first, third)  # bit for bit: these are the same weights again


def _truncate(directory: pathlib.Path) -> None:
  _replace(directory / 'model.safetensors', lambda content: content[: len(content) // 2])


def _flip(directory: pathlib.Path) -> None:
  _replace(directory / 'model.safetensors', lambda content: content[:-1] + b'\x55')


def _delete(directory: pathlib.Path) -> None:
  (directory / 'model.safetensors').unlink()


def _replace(path: pathlib.Path, change) -> None:
  content = path.read_bytes()
  path.unlink()  # it may be linked elsewhere
  path.write_bytes(change(content))


@pytest.mark.parametrize(
  'damage', [_truncate, _flip, _delete], ids=['truncated', 'flipped', 'gone']
)
def test_a_damaged_view_is_never_served(rig, damage) -> None:
  before, served = rig.run(rig.turn('before')), rig.replica.version
  bad = rig.publish(2.0)
  damage(rig.directory(bad))
  rig.feed.newest = bad
  # It waits for the version that it asks for, or its refusal; that is tried again now and then.
  after = rig.run(rig.turn('after'))
  assert f'version {bad.number} cannot be served' in rig.replica.report().last_failure
  assert 'model.safetensors' in rig.replica.report().last_failure
  assert rig.replica.version == served
  assert after.spans[0].version == served.number
  assert _same(before, after)
  rig.feed.newest = served


def test_a_view_of_another_architecture_is_never_served(rig, tmp_path) -> None:
  before, served = rig.run(rig.turn('before')), rig.replica.version
  config = ModelConfig.from_hf({**rig.config.to_hf(), 'intermediate_size': 192})
  params = decoder.init(config, jax.random.key(1))
  store = FileStore(tmp_path / 'other')
  other = rig.publisher(store, config).publish(0, Snapshot(config, params))
  rig.feed.elsewhere[other] = ViewFollower(store, 'bf16')
  rig.feed.newest = other
  after = rig.run(rig.turn('after'))
  assert f'version {other.number} cannot be served' in rig.replica.report().last_failure
  assert rig.replica.version == served
  assert _same(before, after)
  with pytest.raises(SamplerError, match=f'version {other.number} cannot be served'):
    rig.run(rig.sampler.pin(other))
  rig.feed.newest = served


def test_a_full_disk_leaves_the_old_version_serving(rig, small_disk, fill) -> None:
  store = FileStore(small_disk / 'store')
  publisher, follower = rig.publisher(store, rig.config), ViewFollower(store, 'bf16')

  def follow():
    rig.feed.newest = version = follower.latest()
    rig.feed.elsewhere[version] = follower
    drawn = rig.run(rig.turn('follow'))
    assert drawn.spans[0].version == version.number
    return drawn

  whole = publisher.publish(1, rig.snapshot(1.0))
  before = follow()
  filler = fill(small_disk)
  with pytest.raises(PublicationError, match='No space left on device'):
    publisher.publish(2, rig.snapshot(2.0))
  assert follower.latest() == whole
  assert _same(before, follow())
  filler.unlink()
  publisher.retain([])
  newer = publisher.publish(3, rig.snapshot(2.0))
  assert not _same(before, follow())
  assert rig.replica.version == newer
  rig.feed.newest = rig.publish(1.0)
  assert _same(before, rig.run(rig.turn('back')))
