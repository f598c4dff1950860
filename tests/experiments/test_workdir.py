import json

import pytest

from mimo.experiments import workdir

_CONFIG = {'arm': 'sc_mis', 'updates': 3, 'pools': {'a': {'format': 'bf16'}}}


def open_workdir(path, config, digest='0123456789abcdef'):
  return workdir.Workdir(path, config, digest)


def test_counts_its_starts_and_keeps_its_configuration(tmp_path) -> None:
  for start, update in enumerate([0, 20, 20]):
    owned = open_workdir(tmp_path / 'run', _CONFIG)
    owned.begin(update)
    assert owned.incarnation == start
    owned.close()
  assert owned.starts == (0, 20, 20)
  assert json.loads((tmp_path / 'run' / 'config.json').read_text()) == _CONFIG


def test_differing_keys_are_dotted() -> None:
  other = {'arm': 'sc', 'updates': 3, 'pools': {'a': {'format': 'fp8_block'}, 'b': {}}}
  assert workdir.differing_keys(_CONFIG, other) == ['arm', 'pools.a.format', 'pools.b']


def test_a_run_may_be_prolonged_but_not_changed(tmp_path) -> None:
  open_workdir(tmp_path, _CONFIG).close()
  open_workdir(tmp_path, {**_CONFIG, 'updates': 9}).close()
  assert json.loads((tmp_path / 'config.json').read_text())['updates'] == 9
  with pytest.raises(
    ValueError, match="whose arm is 'sc_mis' and here is 'grpo'; expected the same"
  ):
    open_workdir(tmp_path, {**_CONFIG, 'arm': 'grpo'})


def test_a_run_may_go_on_with_another_layout_of_devices(tmp_path) -> None:
  trainer = {'mesh': 'fsdp=4', 'offload': '', 'remat': False, 'rows': 8}
  open_workdir(tmp_path, {**_CONFIG, 'trainer': trainer}).close()
  moved = {**trainer, 'mesh': 'fsdp=2', 'offload': 'residuals', 'remat': True}
  # A run that several processes took part in goes on in one.
  open_workdir(tmp_path, {**_CONFIG, 'trainer': moved, 'distributed': {'processes': 2}}).close()
  open_workdir(tmp_path, {**_CONFIG, 'trainer': moved}).close()
  assert json.loads((tmp_path / 'config.json').read_text())['trainer'] == moved
  with pytest.raises(ValueError, match=r'trainer.rows is 8 and here is 4;'):
    open_workdir(tmp_path, {**_CONFIG, 'trainer': {**moved, 'rows': 4}})


def test_a_run_of_another_release_is_refused_as_that(tmp_path) -> None:
  old = {**_CONFIG, 'arm': 'sc', 'trainer': {'b2': 0.5}}
  open_workdir(tmp_path, old).close()
  with pytest.raises(ValueError, match=r'an earlier release of mimo: trainer\.b1 is no key there'):
    open_workdir(tmp_path, {**_CONFIG, 'trainer': {'b1': 0.9, 'b2': 0.98}})
  with pytest.raises(ValueError, match=r'of another release of mimo: trainer is no key here;'):
    open_workdir(tmp_path, _CONFIG)


def test_another_fleet_is_no_other_release(tmp_path) -> None:
  open_workdir(tmp_path, _CONFIG).close()
  pools = {**_CONFIG['pools'], 'b': {'format': 'bf16'}}
  with pytest.raises(ValueError, match=r"whose pools\.b is not stated and here is \{'format'"):
    open_workdir(tmp_path, {**_CONFIG, 'pools': pools})


def test_refuses_a_directory_in_use_or_of_something_else(tmp_path) -> None:
  owned = open_workdir(tmp_path / 'run', _CONFIG)
  with pytest.raises(ValueError, match='in use'):
    open_workdir(tmp_path / 'run', _CONFIG)
  owned.close()
  (tmp_path / 'photos').mkdir()
  (tmp_path / 'photos' / 'cat.png').write_text('')
  with pytest.raises(ValueError, match=r"holds 'cat.png'"):
    open_workdir(tmp_path / 'photos', _CONFIG)
  assert [p.name for p in (tmp_path / 'photos').iterdir()] == ['cat.png']
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='is a file'):
    open_workdir(tmp_path / 'file', _CONFIG)
  (tmp_path / 'bad').mkdir()
  (tmp_path / 'bad' / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='not JSON'):
    open_workdir(tmp_path / 'bad', _CONFIG)


def test_refuses_to_go_on_from_other_weights_under_the_same_path(tmp_path) -> None:
  config = {**_CONFIG, 'policy': 'runs/smollm2-hf'}
  open_workdir(tmp_path, config).close()
  open_workdir(tmp_path, config).close()
  with pytest.raises(ValueError, match=r"policy 'runs/smollm2-hf' holds other weights") as raised:
    open_workdir(tmp_path, config, 'fedcba9876543210')
  assert '(sha256 fedcba987654)' in str(raised.value)
  assert '(0123456789ab)' in str(raised.value)
  # What began before this was kept is of an earlier release.
  (tmp_path / 'policy').unlink()
  with pytest.raises(ValueError, match='another release of mimo began: it keeps no hash'):
    open_workdir(tmp_path, config)


def test_a_check_writes_nothing_and_refuses_what_a_run_would(tmp_path) -> None:
  config = {**_CONFIG, 'policy': ''}

  def check(path, digest='0123456789abcdef', **changes):
    return workdir.check_workdir(path, {**config, **changes}, lambda: digest)

  fresh = tmp_path / 'runs' / 'fresh'
  assert check(fresh) == str(fresh)
  assert not fresh.parent.exists()
  owned = open_workdir(tmp_path / 'run', config)
  before = {path: path.stat().st_mtime_ns for path in owned.path.iterdir()}
  with pytest.raises(ValueError, match='is in use by another process'):
    check(owned.path)
  owned.close()
  assert check(owned.path, updates=9) == str(owned.path)
  with pytest.raises(ValueError, match="whose arm is 'sc_mis' and here is 'grpo'"):
    check(owned.path, arm='grpo')
  with pytest.raises(ValueError, match='holds other weights'):
    check(owned.path, digest='f' * 16)
  assert {path: path.stat().st_mtime_ns for path in owned.path.iterdir()} == before
  with pytest.raises(ValueError, match=r'config\.json is no directory that can be written'):
    check(owned.path / 'config.json' / 'below')
