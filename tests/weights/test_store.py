"""The file store: immutable blobs, checksums, compare-and-swap under contention."""

import concurrent.futures
import hashlib
import multiprocessing
import os
import shutil

import pytest

from mimo.weights import store as store_lib


@pytest.fixture
def store(tmp_path):
  return store_lib.FileStore(tmp_path / 'store')


def test_write_read_and_checksum(store):
  blob = store.write('views/a/1/config.json', b'abc')
  # The published SHA-256 of 'abc'.
  assert blob.sha256 == 'ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad'
  assert blob.size_bytes == 3
  assert store.read('views/a/1/config.json') == b'abc'
  assert store.exists('views/a/1/config.json')
  assert not store.exists('views/a/1')
  assert (store.local_path('views/a/1') / 'config.json').read_bytes() == b'abc'


def test_blobs_never_change(store):
  store.write('k', b'one')
  store.write('k', b'one')
  with pytest.raises(ValueError, match='k is stored with other content'):
    store.write('k', b'two')
  assert store.read('k') == b'one'
  assert list(store.scratch.iterdir()) == []


def test_a_stored_file_is_read_only(store):
  store.write('k', b'one')
  assert os.stat(store.local_path('k')).st_mode & 0o222 == 0


def directory_of(path, **files):
  path.mkdir()
  for name, content in files.items():
    (path / name).write_bytes(content)
  return path


def test_adopt_takes_a_directory_whole(store):
  blobs = store.adopt('v/a/1', directory_of(store.scratch / 'x', f=b'xyz', g=b'abc'))
  assert blobs['f'] == store_lib.Blob(hashlib.sha256(b'xyz').hexdigest(), 3)
  assert store.list('') == ['v/a/1/f', 'v/a/1/g']
  assert os.stat(store.local_path('v/a/1/f')).st_mode & 0o222 == 0
  again = directory_of(store.scratch / 'x', f=b'xyz', g=b'abc')
  assert store.adopt('v/a/1', again) == blobs
  for files in ({'f': b'xyz'}, {'f': b'xyz', 'g': b'abd'}):
    shutil.rmtree(store.scratch / 'x')
    with pytest.raises(ValueError, match='v/a/1 is stored with other content'):
      store.adopt('v/a/1', directory_of(store.scratch / 'x', **files))
  assert store.read('v/a/1/g') == b'abc'


def test_adopt_copies_from_another_device(store, tmp_path, monkeypatch):
  source = directory_of(tmp_path / 'x', f=b'xyz')
  monkeypatch.setattr(store, '_same_device', lambda path: False)
  store.adopt('x', source)
  assert store.read('x/f') == b'xyz'
  assert list(store.scratch.iterdir()) == []


def test_list_and_delete(store):
  for key in ('v/a/1/f', 'v/a/2/f', 'v/ab/1/f'):
    store.write(key, key.encode())
  assert store.list('v/a') == ['v/a/1/f', 'v/a/2/f']
  store.delete('v/a/1')
  store.delete('v/a/1')
  store.delete('v/ab/1/f')
  assert store.list('v') == ['v/a/2/f']
  assert store.list('absent') == []
  with pytest.raises(KeyError, match='v/a/1/f is not in the store'):
    store.read('v/a/1/f')
  with pytest.raises(KeyError):
    store.local_path('v/a/1')


@pytest.mark.parametrize('key', ['', '/a', '../a', 'a/../b', 'a//b', 'a/', '.hidden', 'a b'])
def test_keys_are_plain_relative_paths(store, key):
  with pytest.raises(ValueError, match='is not a relative path'):
    store.write(key, b'')


def test_a_key_can_not_be_a_directory(store):
  store.write('a/b', b'')
  with pytest.raises(ValueError, match='other keys lie under it'):
    store.write('a', b'')


def test_swap_compares_first(store):
  assert store.pointer('p') is None
  assert not store.swap('p', 'x', 'y')
  assert store.swap('p', None, '1')
  assert not store.swap('p', None, '2')
  assert store.swap('p', '1', '2')
  assert store.pointer('p') == '2'
  with pytest.raises(ValueError, match='plain name'):
    store.swap('a/b', None, '1')


def increment(root, times):
  store = store_lib.FileStore(root)
  for _ in range(times):
    while True:
      seen = store.pointer('n')
      if store.swap('n', seen, str(int(seen or 0) + 1)):
        break


def test_concurrent_swaps_lose_nothing_across_threads(store):
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    for future in [pool.submit(increment, store.root, 15) for _ in range(4)]:
      future.result()
  assert store.pointer('n') == '60'


def test_concurrent_swaps_lose_nothing_across_processes(store):
  context = multiprocessing.get_context('spawn')
  workers = [context.Process(target=increment, args=(store.root, 15)) for _ in range(2)]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join(60)
  assert [worker.exitcode for worker in workers] == [0, 0]
  assert store.pointer('n') == '30'


def test_one_of_two_writers_of_a_key_wins_whole(store):
  contents = [bytes([i]) * 200_000 for i in range(8)]

  def attempt(content):
    try:
      store.write('k', content)
    except ValueError:
      return 0
    return 1

  with concurrent.futures.ThreadPoolExecutor(8) as pool:
    won = sum(pool.map(attempt, contents))
  assert won == 1
  assert store.read('k') in contents


def test_a_pointer_is_on_disk_before_it_is_seen(store, monkeypatch):
  events = []
  sync, replace = os.fsync, os.replace
  monkeypatch.setattr(os, 'fsync', lambda fd: (events.append('sync'), sync(fd)))
  monkeypatch.setattr(os, 'replace', lambda a, b: (events.append('rename'), replace(a, b)))
  store.swap('p', None, '1')
  assert events == ['sync', 'rename', 'sync']
  events.clear()
  link = os.link
  monkeypatch.setattr(os, 'link', lambda a, b: (events.append('link'), link(a, b)))
  store.write('k', b'x')
  assert events == ['sync', 'link', 'sync']


def test_a_failed_write_leaves_nothing(store, monkeypatch):
  def full(fd):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, 'fsync', full)
  with pytest.raises(OSError, match='No space'):
    store.write('k', b'x')
  with pytest.raises(OSError, match='No space'):
    store.swap('p', None, '1')
  assert not store.exists('k')
  assert store.pointer('p') is None
  assert list(store.scratch.iterdir()) == []


def test_leftovers_are_swept_when_asked(store):
  (store.scratch / 'a').mkdir()
  (store.scratch / 'a' / 'shard').write_bytes(b'x')
  (store.scratch / 'b').write_bytes(b'')
  store.write('k', b'one')
  reader = store_lib.FileStore(store.root)  # which may be another process's
  assert sorted(path.name for path in store.scratch.iterdir()) == ['a', 'b']
  reader.sweep()
  assert list(store.scratch.iterdir()) == []
  assert store.read('k') == b'one'
