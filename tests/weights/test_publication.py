"""Publication: versions, failures of one view or all, restarts, pruning, followers."""

import dataclasses
import errno
import json
import os
import threading

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo.models import table
from mimo.types import Version
from mimo.weights import publication, views
from mimo.weights.store import FileStore

VIEWS = {
  'a': views.ViewSpec('bf16'),
  'b': views.ViewSpec('fp8_channel'),
  'c': views.ViewSpec('nvfp4_w4a16', block_scale='four_over_six'),
}


class FailingStore(FileStore):
  """A file store that is out of space where `fails` says so of a key."""

  def __init__(self, root):
    super().__init__(root)
    self.fails = lambda key: False

  def _check(self, key):
    if self.fails(key):
      raise OSError(errno.ENOSPC, 'No space left on device', key)

  def adopt(self, prefix, directory):
    self._check(prefix)
    return super().adopt(prefix, directory)

  def write(self, key, content):
    self._check(key)
    return super().write(key, content)


@pytest.fixture
def store(tmp_path):
  return FailingStore(tmp_path / 'store')


@pytest.fixture
def publish(store, config, tensors):
  def publish(update=0, incarnation=0, changed=tensors, **options):
    publisher = publication.Publisher(
      store, config, {'tokenizer.json': b'{}'}, VIEWS, incarnation, **options
    )
    return publisher.publish(update, changed), publisher

  return publish


def follow(store, view):
  return publication.ViewFollower(store, view)


def with_value(tensors, index, value):
  name, tensor = tensors[index]
  changed = tensor.copy()
  changed.flat[3] = value
  return [*tensors[:index], (name, changed), *tensors[index + 1 :]]


def test_publish_moves_every_pointer_to_a_whole_view(store, publish, config, tensors):
  assert follow(store, 'a').latest() is None
  version, publisher = publish(update=4, incarnation=2)
  assert version == Version(1, 2, 4)
  assert publisher.failures == {}
  weights = dict(tensors)
  for name, spec in VIEWS.items():
    follower = follow(store, name)
    assert follower.latest() == version
    directory = follower.open(version)
    view = views.read_view(directory)
    assert view.format == spec.format
    assert (directory / 'tokenizer.json').read_bytes() == b'{}'
  got = dict(table.named_tensors(config, views.read_view(follow(store, 'a').open(version)).params))
  for name, tensor in got.items():
    np.testing.assert_array_equal(tensor, weights[name].astype(np.float32))
  assert list(store.scratch.iterdir()) == []


def test_numbers_only_increase_across_restarts(store, publish):
  numbers = [publish(incarnation=i // 2)[0].number for i in range(4)]
  assert numbers == [1, 2, 3, 4]
  (store.root / 'pointers' / 'counter').unlink()
  assert publish(incarnation=9)[0].number == 5


def test_a_view_that_fails_keeps_its_pointer_and_hinders_nobody(store, publish):
  first, _ = publish(update=0)
  store.fails = lambda key: key.startswith('views/b')
  second, publisher = publish(update=1)
  assert list(publisher.failures) == ['b']
  assert 'No space left on device' in publisher.failures['b']
  assert [follow(store, v).latest() for v in 'abc'] == [second, first, second]
  assert follow(store, 'b').open(first)
  store.fails = lambda key: False
  third, publisher = publish(update=2)
  assert publisher.failures == {}
  assert [follow(store, v).latest() for v in 'abc'] == [third] * 3
  # The number that failed half way is not in the view's history, and was not given out again.
  assert [v.number for v in follow(store, 'b').versions()] == [1, 3]


@pytest.mark.parametrize('where', ['views/', 'manifests/'])
def test_when_every_view_fails_the_number_is_spent(store, publish, where):
  first, _ = publish(update=0)
  store.fails = lambda key: key.startswith(where)
  with pytest.raises(publication.PublicationError, match=r'update 1 reached no view.*No space'):
    publish(update=1)
  store.fails = lambda key: False
  assert follow(store, 'a').latest() == first
  assert publish(update=1)[0].number == 3
  assert [v.number for v in follow(store, 'a').versions()] == [1, 3]


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_non_finite_weights_are_never_published(store, publish, tensors, value):
  first, _ = publish()
  for index in (0, len(tensors) - 1):
    with pytest.raises(publication.NonFiniteError, match=f'tensor {tensors[index][0]} holds NaN'):
      publish(update=1, changed=with_value(tensors, index, value))
  assert [follow(store, v).latest() for v in 'abc'] == [first] * 3
  assert list(store.scratch.iterdir()) == []
  assert publish(update=2)[0].number == 2  # nothing was stored, so no number was spent
  largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
  assert publish(update=3, changed=with_value(tensors, 0, largest))[0].number == 3


def test_corruption_on_the_way_in_is_noticed(store, publish, monkeypatch):
  first, _ = publish()
  adopt = FileStore.adopt

  def flip(self, prefix, directory):
    if prefix.startswith('views/c'):
      content = bytearray((directory / 'model.safetensors').read_bytes())
      content[-1] ^= 1
      (directory / 'model.safetensors').write_bytes(content)
    return adopt(self, prefix, directory)

  monkeypatch.setattr(FailingStore, 'adopt', flip)
  second, publisher = publish(update=1)
  assert 'model.safetensors is corrupt' in publisher.failures['c']
  assert [follow(store, v).latest() for v in 'abc'] == [second, second, first]


def test_open_names_what_is_corrupt_missing_or_unknown(store, publish):
  version, _ = publish()
  follower = follow(store, 'b')
  shard = follower.open(version) / 'model.safetensors'
  shard.chmod(0o644)
  content = shard.read_bytes()
  shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
  with pytest.raises(ValueError, match=r'model\.safetensors is corrupt: \d+ bytes of sha256'):
    follower.open(version)
  shard.unlink()
  with pytest.raises(ValueError, match=r'model\.safetensors is missing'):
    follower.open(version)
  with pytest.raises(ValueError, match='view b has no version 7'):
    follower.open(Version(7, 0, 0))
  with pytest.raises(ValueError, match='is stored; expected'):
    follower.open(Version(1, 0, 5))


def test_retain_keeps_what_is_asked_and_what_is_served(store, publish):
  for update in range(4):
    _, publisher = publish(update=update)
  publisher.retain([2])
  follower = follow(store, 'c')
  assert [v.number for v in follower.versions()] == [2, 4]
  assert sorted({key.split('/')[2] for key in store.list('views/c')}) == ['00000002', '00000004']
  follower.open(follower.latest())
  with pytest.raises(ValueError, match='no version 1'):
    follower.open(Version(1, 0, 0))
  assert publish()[0].number == 5


def test_retain_removes_views_that_a_kill_left_without_a_manifest(store, publish):
  publish(update=0)
  last, publisher = publish(update=1)
  for number in (1, 3):  # killed between retain's two deletes, and before the manifest
    store.delete(f'manifests/b/{number:08d}.json')
    store.write(f'views/b/{number:08d}/model.safetensors', b'') if number == 3 else None
  publisher.retain([1, 2, 3])
  assert {key.split('/')[2] for key in store.list('views/b')} == {'00000002'}
  assert {key.split('/')[2] for key in store.list('views/a')} == {'00000001', '00000002'}
  follow(store, 'b').open(last)


def test_retain_waits_for_a_publication_under_way(store, publish, tensors):
  """Called when every view's files are stored and no manifest is: it deletes none of them."""
  _, publisher = publish(update=0)
  all_stored, retaining = threading.Barrier(len(VIEWS)), threading.Event()
  threads = []

  def at_manifest(key):
    if key.startswith('manifests/') and all_stored.wait(60) == 0:
      threads.append(threading.Thread(target=publisher.retain, args=([],)))
      threads[0].start()
      threads[0].join(0.2)  # a wrong one is done by then
      retaining.set()
    assert retaining.wait(60) or not key.startswith('manifests/')
    return False

  store.fails = lambda key: key.startswith('manifests/') and at_manifest(key)
  version = publisher.publish(1, tensors)
  threads[0].join()
  assert publisher.failures == {}
  for view in VIEWS:
    follow(store, view).open(version)
    assert follow(store, view).versions() == [version]


def test_scratch_of_dead_publishers_is_swept_and_by_no_follower(store, publish):
  (store.scratch / 'publish-dead').mkdir()
  (store.scratch / 'publish-dead' / 'shard').write_bytes(b'x')
  (store.scratch / 'pointer').write_bytes(b'')
  publication.ViewFollower(FileStore(store.root), 'a').latest()
  assert len(list(store.scratch.iterdir())) == 2
  publish()
  assert list(store.scratch.iterdir()) == []


def test_a_pointer_never_goes_back(store, publish):
  publish()
  ahead = json.dumps({'number': 50, 'incarnation': 0, 'update': 0})
  store.swap('view.a', store.pointer('view.a'), ahead)
  version, publisher = publish(update=1)
  assert 'pointer is already at' in publisher.failures['a']
  assert follow(store, 'a').latest().number == 50
  assert follow(store, 'b').latest() == version


def test_concurrent_publishers_share_no_number(store, config, tensors):
  versions, lock = [], threading.Lock()
  publishers = [publication.Publisher(store, config, {}, VIEWS, i) for i in range(3)]

  def run(publisher):
    for update in range(2):
      try:
        version = publisher.publish(update, tensors)
      except publication.PublicationError:
        continue  # overtaken in every view
      with lock:
        versions.append(version.number)

  threads = [threading.Thread(target=run, args=(publisher,)) for publisher in publishers]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert versions and len(set(versions)) == len(versions)
  for view in VIEWS:
    follow(store, view).open(follow(store, view).latest())


def test_a_generator_is_enough(store, config, tensors, publish):
  version, publisher = publish(changed=(item for item in tensors))
  assert publisher.failures == {}
  assert version.number == 1


def test_snapshot_rounds_and_outlives_its_parameters(config, params, tensors):
  copy = {'x': jnp.array(1.5)} | params
  snapshot = publication.Snapshot(config, copy)
  del copy
  for _ in range(2):
    got = list(snapshot)
    assert [name for name, _ in got] == [name for name, _ in tensors]
    for (_, ours), (_, expected) in zip(got, tensors, strict=True):
      assert ours.dtype == ml_dtypes.bfloat16
      np.testing.assert_array_equal(ours.view(np.uint16), expected.view(np.uint16))


def test_mistakes_at_the_start(store, config):
  with pytest.raises(ValueError, match='no views to publish'):
    publication.Publisher(store, config, {}, {}, 0)
  with pytest.raises(ValueError, match='nvfp4_w4a4 needs calibrated input scales'):
    views.ViewSpec('nvfp4_w4a4')
  with pytest.raises(ValueError, match=r'view x: .*multiple of 128 for fp8_block'):
    narrow = dataclasses.replace(config, intermediate_size=64)
    publication.Publisher(store, narrow, {}, {'x': views.ViewSpec('fp8_block')}, 0)


def test_a_kill_anywhere_shows_no_half_view(store, config, tensors):
  """Cuts publication off after each of its steps in turn, as a kill would."""

  class Killed(BaseException):
    pass

  steps = [0]

  class Mortal(FileStore):
    def __init__(self, root, life):
      super().__init__(root)
      self.life = life

    def _step(self):
      steps[0] += 1
      if self.life is not None:
        self.life -= 1
        if self.life < 0:
          raise Killed

    def adopt(self, prefix, directory):
      self._step()
      return super().adopt(prefix, directory)

    def write(self, key, content):
      self._step()
      return super().write(key, content)

    def swap(self, name, expected, new):
      self._step()
      return super().swap(name, expected, new)

  spec = {'a': views.ViewSpec('bf16')}
  publication.Publisher(Mortal(store.root, None), config, {}, spec, 0).publish(0, tensors)
  total = steps[0]
  assert total == 4  # the number, the files, the manifest, the pointer
  for life in range(total):
    before = follow(store, 'a').latest()
    with pytest.raises(Killed):
      publication.Publisher(Mortal(store.root, life), config, {}, spec, 0).publish(1, tensors)
    assert follow(store, 'a').latest() == before
    for version in follow(store, 'a').versions():
      follow(store, 'a').open(version)
  numbers = [int(os.path.basename(p)) for p in (store.root / 'blobs/views/a').iterdir()]
  last = publication.Publisher(store, config, {}, spec, 1).publish(2, tensors)
  assert last.number > max(numbers)
