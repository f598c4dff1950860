"""Checkpoints: asynchronous saves, kills, and policies read back from every kind of path."""

import json
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from mimo.models import table
from mimo.weights import checkpoints, huggingface

TOKENIZER = {'tokenizer.json': '{"a": "ä"}'.encode(), 'tokenizer.model': b'\xff\x00\x01'}


class State(typing.NamedTuple):
  params: dict
  opt_state: tuple
  update: jax.Array


@pytest.fixture(scope='module')
def state(params):
  return State(params, optax.adamw(1e-3).init(params), jnp.int32(3))


@pytest.fixture(scope='module')
def workdir(tmp_path_factory, config, state):
  """A work directory with steps 2 and 4, each with parameters of its own."""
  root = tmp_path_factory.mktemp('run')
  (root / 'config.json').write_text(json.dumps({'updates': 4}))  # a run's, not a model's
  store = checkpoints.Checkpoints(root / 'checkpoints', keep=2)
  meta = checkpoints.policy_meta(config, TOKENIZER)
  for step in (1, 2, 4):
    params = jax.tree.map(lambda x, step=step: x + step, state.params)
    store.save(step, state._replace(params=params), meta | {'cursor': step})
  store.close()
  return root


def assert_equal(got, expected):
  got, expected = jax.tree.flatten(got), jax.tree.flatten(expected)
  assert got[1] == expected[1]
  for x, y in zip(got[0], expected[0], strict=True):
    np.testing.assert_array_equal(x, y)


def test_restore_gives_the_tree_and_the_meta(workdir, state, config):
  store = checkpoints.Checkpoints(workdir / 'checkpoints', keep=2)
  assert store.steps() == [2, 4]
  assert store.latest() == 4
  tree, meta = store.restore(2, jax.eval_shape(lambda: state))
  assert isinstance(tree, State)
  assert_equal(tree, state._replace(params=jax.tree.map(lambda x: x + 2, state.params)))
  assert meta['cursor'] == 2
  with pytest.raises(ValueError, match=r'has no step 3; it has \[2, 4\]'):
    store.restore(3, state)
  wrong = state._replace(opt_state=())
  with pytest.raises(ValueError, match='can not be read') as error:
    store.restore(4, wrong)
  assert '\n' not in str(error.value)
  store.close()


def test_saved_arrays_may_be_donated(tmp_path):
  step = jax.jit(lambda x: x + 1.0, donate_argnums=0)
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=3)
  x = jnp.zeros((300, 300))
  for i in range(3):
    store.save(i, {'x': x}, {})
    for _ in range(5):
      x = step(x)
  store.wait()
  for i in range(3):
    tree, _ = store.restore(i, {'x': jax.ShapeDtypeStruct((300, 300), jnp.float32)})
    np.testing.assert_array_equal(tree['x'], np.full((300, 300), 5.0 * i))
  store.close()


def test_restore_onto_a_mesh(tmp_path):
  mesh = jax.make_mesh((4,), ('fsdp',), axis_types=(jax.sharding.AxisType.Auto,))
  sharding = jax.NamedSharding(mesh, jax.P('fsdp'))
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=1)
  store.save(0, {'x': jnp.arange(8.0)}, {})
  store.wait()
  tree, _ = store.restore(0, {'x': jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)})
  assert tree['x'].sharding == sharding
  np.testing.assert_array_equal(tree['x'], np.arange(8.0))
  store.close()


def test_mistakes_of_the_caller(tmp_path):
  with pytest.raises(ValueError, match='keep is 0'):
    checkpoints.Checkpoints(tmp_path / 'c', keep=0)
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=1)
  assert store.latest() is None
  store.save(3, {'x': jnp.zeros(2)}, {})
  with pytest.raises(ValueError, match='step 2 does not follow the last one saved, 3'):
    store.save(2, {'x': jnp.zeros(2)}, {})
  with pytest.raises(TypeError, match='not JSON serializable'):
    store.save(4, {'x': jnp.zeros(2)}, {'bad': object()})
  store.close()


def test_a_save_under_way_is_no_step_yet(tmp_path, monkeypatch):
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=2)
  store.save(20, {'x': jnp.zeros(2)}, {})
  store.wait()
  go_on, finalize = threading.Event(), ocp.StandardCheckpointHandler.finalize

  def held_up(self, directory):
    assert go_on.wait(60)
    finalize(self, directory)

  monkeypatch.setattr(ocp.StandardCheckpointHandler, 'finalize', held_up)
  store.save(40, {'x': jnp.ones(2)}, {})
  try:
    assert store.latest() == 20 and store.steps() == [20]
    with pytest.raises(ValueError, match=r'has no step 40; it has \[20\]'):
      store.restore(40, {'x': jnp.zeros(2)})
    # The order of steps counts it all the same.
    with pytest.raises(ValueError, match='step 30 does not follow the last one saved, 40'):
      store.save(30, {'x': jnp.zeros(2)}, {})
  finally:
    go_on.set()
  store.save(40, {'x': jnp.zeros(2)}, {})  # again: waits for the first, and changes nothing
  assert store.latest() == 40 and store.steps() == [20, 40]
  np.testing.assert_array_equal(store.restore(40, {'x': jnp.zeros(2)})[0]['x'], np.ones(2))
  store.close()


@pytest.mark.parametrize('where', ['', 'checkpoints', 'checkpoints/4'])
def test_policy_from_a_work_directory_a_manager_or_a_step(workdir, state, config, where):
  got_config, params, files = checkpoints.load_policy(workdir / where)
  assert got_config.to_hf() == config.to_hf()
  assert_equal(params, jax.tree.map(lambda x: x + 4, state.params))
  assert files == TOKENIZER
  assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}


def test_policy_from_an_older_step(workdir, state):
  _, params, _ = checkpoints.load_policy(workdir / 'checkpoints/2')
  assert_equal(params, jax.tree.map(lambda x: x + 2, state.params))


def test_policy_from_a_hugging_face_directory(tmp_path, config, params):
  huggingface.write_model(tmp_path / 'm', config, params, TOKENIZER, dtype=np.float32)
  got_config, got, files = checkpoints.load_policy(tmp_path / 'm')
  assert got_config.hidden_size == config.hidden_size
  assert_equal(got, params)
  assert files == TOKENIZER


def test_a_step_that_is_being_written_is_not_read(workdir, tmp_path):
  copy = tmp_path / 'checkpoints'
  (copy / '9').mkdir(parents=True)
  (copy / '10.orbax-checkpoint-tmp-3').mkdir()
  with pytest.raises(ValueError, match='holds no complete checkpoint'):
    checkpoints.load_policy(tmp_path)
  shutil.copytree(workdir / 'checkpoints/4', copy / '4.orbax-checkpoint-tmp')
  with pytest.raises(ValueError, match='holds no checkpoint'):
    checkpoints.load_policy(copy / '4.orbax-checkpoint-tmp')


@pytest.mark.parametrize('value', [np.nan, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, config, params, value):
  broken = jax.tree.map(np.array, params)
  row = next(row for row in table.table(config) if 'down_proj' in row.hf_name)
  table.leaf(broken, row.path)[1].flat[5] = value
  message = r'm: tensor model\.layers\.1\.mlp\.down_proj\.weight holds NaN or infinity; expected'
  huggingface.write_model(tmp_path / 'm', config, broken, TOKENIZER, dtype=np.float32)
  with pytest.raises(ValueError, match=message):
    checkpoints.load_policy(tmp_path / 'm')
  save_one(tmp_path / 'c', {'params': broken}, checkpoints.policy_meta(config, {}))
  with pytest.raises(ValueError, match=message.replace('m:', 'c/0:')):
    checkpoints.load_policy(tmp_path / 'c')


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda root: None, 'does not exist; expected an Orbax or Hugging Face checkpoint'),
    (lambda root: root.write_text(''), 'is a file; expected the directory'),
    (lambda root: root.mkdir(), 'holds no checkpoint; expected an Orbax step'),
  ],
)
def test_paths_that_hold_no_checkpoint(tmp_path, make, message):
  make(tmp_path / 'x')
  with pytest.raises(ValueError, match=message):
    checkpoints.load_policy(tmp_path / 'x')


def save_one(root, tree, meta):
  store = checkpoints.Checkpoints(root, keep=1)
  store.save(0, tree, meta)
  store.close()


def test_checkpoints_of_something_else(tmp_path, config, params):
  meta = checkpoints.policy_meta(config, {})
  save_one(tmp_path / 'a', {'x': jnp.zeros(2)}, {'x': 1})
  with pytest.raises(ValueError, match=r"meta has \['x'\]; expected model and tokenizer"):
    checkpoints.load_policy(tmp_path / 'a')
  save_one(tmp_path / 'b', {'x': jnp.zeros(2)}, meta)
  with pytest.raises(ValueError, match=r"state has \['x'\]; expected params"):
    checkpoints.load_policy(tmp_path / 'b')
  save_one(tmp_path / 'c', {'params': {'embed': params['embed']}}, meta)
  with pytest.raises(ValueError, match='parameter layers/mixer_norm/scale is missing'):
    checkpoints.load_policy(tmp_path / 'c')
  other = checkpoints.policy_meta(config, {})
  other['model']['vocab_size'] = 50
  save_one(tmp_path / 'd', {'params': params}, other)
  with pytest.raises(ValueError, match=r'embedding has shape \[48, 128\]; expected \[50, 128\]'):
    checkpoints.load_policy(tmp_path / 'd')


def test_damaged_checkpoint_is_one_line(tmp_path, config, params):
  save_one(tmp_path / 'a', {'params': params}, checkpoints.policy_meta(config, {}))
  data = [path for path in (tmp_path / 'a/0/state').rglob('d/*') if path.is_file()]
  for path in data:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  with pytest.raises(ValueError, match='can not be read') as error:
    checkpoints.load_policy(tmp_path / 'a')
  assert '\n' not in str(error.value)
  (tmp_path / 'a/0/meta/metadata').write_text('{')
  with pytest.raises(ValueError, match='can not be read'):
    checkpoints.load_policy(tmp_path / 'a')


VICTIM = """
import os, signal, sys
import jax.numpy as jnp
from mimo.weights import checkpoints

store = checkpoints.Checkpoints(sys.argv[1], keep=2)
store.save(1, {'x': jnp.full((1 << 22,), 1.0)}, {'step': 1})
store.wait()
store.save(2, {'x': jnp.full((1 << 22,), 2.0)}, {'step': 2})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_a_save_leaves_the_last_complete_step(tmp_path):
  victim = subprocess.run(
    [sys.executable, '-c', VICTIM, str(tmp_path / 'c')], timeout=120, capture_output=True
  )
  assert victim.returncode == -signal.SIGKILL, victim.stderr.decode()
  left = [path.name for path in pathlib.Path(tmp_path / 'c').iterdir()]
  assert '1' in left
  found = int(checkpoints.find_step(tmp_path / 'c').name)
  store = checkpoints.Checkpoints(tmp_path / 'c', keep=2)
  latest = store.latest()
  assert latest == found and latest in (1, 2)
  tree, meta = store.restore(latest, {'x': jax.ShapeDtypeStruct((1 << 22,), jnp.float32)})
  assert (np.asarray(tree['x']) == latest).all() and meta == {'step': latest}
  # What the kill left behind is gone, and the run goes on from there.
  assert {path.name for path in store.directory.iterdir()} <= {'1', '2'}
  store.save(3, {'x': jnp.zeros(1 << 22)}, {'step': 3})
  store.wait()
  assert store.latest() == 3
  store.close()
