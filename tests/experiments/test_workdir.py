import json

import pytest

from mimo.experiments import workdir

_CONFIG = {'arm': 'sc_mis', 'updates': 3, 'pools': {'a': {'format': 'bf16'}}}


def test_counts_its_starts_and_keeps_its_configuration(tmp_path) -> None:
  for start, update in enumerate([0, 20, 20]):
    owned = workdir.Workdir(tmp_path / 'run', _CONFIG)
    owned.begin(update)
    assert owned.incarnation == start
    owned.close()
  assert owned.starts == (0, 20, 20)
  assert json.loads((tmp_path / 'run' / 'config.json').read_text()) == _CONFIG


def test_differing_keys_are_dotted() -> None:
  other = {'arm': 'sc', 'updates': 3, 'pools': {'a': {'format': 'fp8_block'}, 'b': {}}}
  assert workdir.differing_keys(_CONFIG, other) == ['arm', 'pools.a.format', 'pools.b']


def test_a_run_may_be_prolonged_but_not_changed(tmp_path) -> None:
  workdir.Workdir(tmp_path, _CONFIG).close()
  workdir.Workdir(tmp_path, {**_CONFIG, 'updates': 9}).close()
  assert json.loads((tmp_path / 'config.json').read_text())['updates'] == 9
  with pytest.raises(
    ValueError, match="whose arm is 'sc_mis' and here is 'grpo'; expected the same"
  ):
    workdir.Workdir(tmp_path, {**_CONFIG, 'arm': 'grpo'})


def test_says_what_a_run_of_another_release_states_otherwise(tmp_path) -> None:
  old = {**_CONFIG, 'trainer': {'mesh': {'fsdp': 2}}}
  new = {**_CONFIG, 'trainer': {'mesh': 'fsdp=2', 'offload': ''}}
  workdir.Workdir(tmp_path, old).close()
  with pytest.raises(
    ValueError, match=r"trainer.mesh is \{'fsdp': 2\} and here is 'fsdp=2' \(1 more differ\)"
  ):
    workdir.Workdir(tmp_path, new)
  del old['trainer']['mesh']
  (tmp_path / 'config.json').write_text(json.dumps(old))
  with pytest.raises(ValueError, match=r"trainer.mesh is not stated and here is 'fsdp=2'"):
    workdir.Workdir(tmp_path, new)


def test_refuses_a_directory_in_use_or_of_something_else(tmp_path) -> None:
  owned = workdir.Workdir(tmp_path / 'run', _CONFIG)
  with pytest.raises(ValueError, match='in use'):
    workdir.Workdir(tmp_path / 'run', _CONFIG)
  owned.close()
  (tmp_path / 'photos').mkdir()
  (tmp_path / 'photos' / 'cat.png').write_text('')
  with pytest.raises(ValueError, match=r"holds 'cat.png'"):
    workdir.Workdir(tmp_path / 'photos', _CONFIG)
  assert [p.name for p in (tmp_path / 'photos').iterdir()] == ['cat.png']
  (tmp_path / 'file').write_text('')
  with pytest.raises(ValueError, match='is a file'):
    workdir.Workdir(tmp_path / 'file', _CONFIG)
  (tmp_path / 'bad').mkdir()
  (tmp_path / 'bad' / 'config.json').write_text('{')
  with pytest.raises(ValueError, match='not JSON'):
    workdir.Workdir(tmp_path / 'bad', _CONFIG)
