"""The schema: what it parses, what it refuses and in what words, and what it says of each key."""

import math
import pathlib
import runpy

import pytest
from ml_collections import config_dict

from mimo import fleet
from mimo.experiments import cli, configuration, defaults, schema

_ROOT = pathlib.Path(__file__).parents[2]
_CONFIGS = sorted((_ROOT / 'configs').rglob('*.py'))


def _config() -> config_dict.ConfigDict:
  config = defaults.base('sc_mis')
  config.pools.h100_fp8 = defaults.pool('H100', 'fp8_block', sessions=4, turns_per_hour=800.0)
  config.pools.a100 = defaults.pool('2xA100', 'bf16', sessions=8, turns_per_hour=None)
  return config


def _with(key: str, value: object) -> config_dict.ConfigDict:
  config = _config()
  *path, last = key.split('.')
  section = config
  for part in path:
    section = section[part]
  with section.ignore_type():
    section[last] = value
  return config


@pytest.mark.parametrize('path', _CONFIGS, ids=lambda path: path.stem)
def test_every_config_states_an_experiment_that_survives_json(path) -> None:
  experiment = schema.parse(runpy.run_path(str(path))['get_config']())
  again = schema.parse(config_dict.ConfigDict(schema.plain(experiment)))
  assert again == experiment


def test_values_reach_their_sections_as_they_are() -> None:
  config = _config()
  config.trainer.b1, config.trainer.eps, config.trainer.offload = 0.5, 1e-6, 'residuals, moments'
  config.trainer.remat = True
  config.rollouts.max_staleness_updates = 3
  config.rollouts.virtual.update_secs = 7
  config.objective.high = 4
  config.pools.h100_fp8.usd_per_gpu_hour = 2.0
  made = schema.parse(config)
  assert (made.trainer.b1, made.trainer.eps) == (0.5, 1e-6)
  assert made.trainer.offload == ('residuals', 'moments')
  assert made.rollouts.max_staleness_updates == 3
  assert made.rollouts.virtual.update_secs == 7.0
  assert isinstance(made.objective.high, float)
  assert [pool.name for pool in made.fleet] == ['a100', 'h100_fp8']
  assert [pool.replica_usd_per_hour for pool in made.fleet] == [5.0, 2.0]
  assert schema.flat(made)['pools.h100_fp8.sessions'] == 4


def test_what_is_left_out_has_its_default() -> None:
  stated = {'arm': 'grpo', 'pools': {'a': {'accelerator': 'CPU', 'format': 'bf16', 'sessions': 1}}}
  made = schema.parse(config_dict.ConfigDict(stated))
  assert made.trainer == schema.parse(_config()).trainer
  assert made.pools['a'] == fleet.Pool(name='a', accelerator='CPU', format='bf16', sessions=1)


def test_defaults_have_the_types_of_their_fields() -> None:
  """So that a flag of a configuration parses as its field's type."""
  types = {'bool': bool, 'int': int, 'float': float, 'str': str}
  for leaf in schema.leaves():
    if not leaf.required and leaf.default is not None:
      assert type(leaf.default) is types[leaf.type], leaf
    assert leaf.default is not None or leaf.required or leaf.type.endswith(' or None'), leaf


def test_every_leaf_says_in_a_line_what_it_is() -> None:
  leaves = schema.leaves()
  assert len(leaves) <= 60  # what no experiment varies is a constant of its room
  assert len({leaf.name for leaf in leaves}) == len(leaves)
  for leaf in leaves:
    assert 10 < len(leaf.doc) < 200 and leaf.doc.endswith('.'), leaf
    assert not leaf.name.endswith('_secs') or 'second' in leaf.doc, leaf


def test_every_misspelt_key_is_refused_with_the_nearest_named() -> None:
  flat = schema.flat(schema.parse(_config()))
  sections = {name.rpartition('.')[0] for name in flat} | {'pools'}
  sections -= {'', *(f'pools.{name}' for name in _config().pools)}  # names that are anyone's choice
  for name in [*flat, *sorted(sections)]:
    with pytest.raises(configuration.UnknownKey) as raised:
      schema.parse(_with(f'{name}x', 1))
    assert str(raised.value).startswith(f'{name}x is no key of a configuration; did you mean ')
    assert str(raised.value).count('\n') == 0
    assert f"'{name}'" in str(raised.value)


@pytest.mark.parametrize(
  ('key', 'message'),
  [
    ('trainer.lerning_rate', "trainer.lerning_rate is no .*; did you mean 'trainer.learning_rate'"),
    ('learning_rate', "learning_rate is no .*; did you mean 'trainer.learning_rate'"),
    ('rollouts.virtual.upd_secs', "upd_secs is no .* 'rollouts.virtual.update_secs'"),
    ('pools.a100.name', r'pools\.a100\.name is no key'),
    ('zzzzzzzz', r'^zzzzzzzz is no key of a configuration$'),
  ],
)
def test_unknown_keys_are_usage_errors(key, message) -> None:
  with pytest.raises(cli.Usage, match=message), cli.mistakes():
    schema.parse(_with(key, 1))


@pytest.mark.parametrize(
  ('key', 'value', 'message'),
  [
    ('seed', True, 'seed is True; expected a whole number'),
    ('seed', 1.0, 'seed is 1.0; expected a whole number'),
    ('trainer.b1', '0.9', "trainer.b1 is '0.9'; expected a finite number"),
    ('trainer.b1', None, 'trainer.b1 is None; expected a finite number'),
    ('trainer.remat', 1, 'trainer.remat is 1; expected True or False'),
    ('task', 3, 'task is 3; expected a text'),
    ('trainer.offload', 3, 'trainer.offload is 3; expected a text, with commas'),
    ('trainer', 3, 'trainer is 3; expected a section of keys and values'),
    ('trainer.rows', {'a': 1}, "trainer.rows is {'a': 1}; expected a whole number"),
    ('pools', 3, 'pools is 3; expected pools by name'),
    ('pools.a100', 3, 'pools.a100 is 3; expected a section of keys and values'),
    ('pools', {}, 'pools is empty; expected at least one pool'),
    ('rollouts.max_staleness_updates', 1.5, 'rollouts.max_staleness_updates is 1.5; expected a'),
    ('pools.a100.turns_per_hour', math.inf, 'pools.a100.turns_per_hour is inf; expected a finite'),
    ('rollouts.in_flight_batches', math.nan, 'rollouts.in_flight_batches is nan; expected a'),
    ('rollouts.virtual.update_secs', math.inf, 'rollouts.virtual.update_secs is inf; expected'),
    ('sampling.temperature', 1e-300, 'sampling.temperature is 1e-300; expected a number >= 0.01'),
    ('sampling.temperature', 1e300, 'sampling.temperature is 1e.300; expected a number'),
    ('sampling.candidates', 99999999999, 'sampling.candidates is 99999999999; expected'),
    ('trainer.learning_rate', 1e30, 'trainer.learning_rate is 1e.30; expected a number > 0'),
    ('seed', 2**32, 'seed is 4294967296; expected a whole number >= 0 and <= 4294967295'),
    ('seed', -1, 'seed is -1; expected'),
    ('updates', 10**12, 'updates is 1000000000000; expected'),
    ('evaluation.samples', 10**6, 'evaluation.samples is 1000000; expected'),
    ('pools.a100.sessions', 10**6, 'pools.a100.sessions is 1000000; expected'),
    ('pools.a100.usd_per_gpu_hour', -1.0, 'pools.a100.usd_per_gpu_hour is -1.0; expected'),
    ('pools.a100.turns_per_hour', -1.0, 'pools.a100.turns_per_hour is -1.0; expected'),
    ('pools.a100.accelerator', 'a100', r"pools.a100.accelerator is 'a100'; expected .* 'A100'"),
    ('rollouts.schedule', 'asink', r"rollouts.schedule is 'asink'; expected .* mean 'async'"),
    ('trainer.mesh', 'dta=2', r"trainer.mesh is 'dta'; expected one of .* mean 'data'"),
    ('objective.low', 9.0, 'objective.low is 9.0 and high is 5.0; expected low <= high'),
    ('distributed.process', 1, 'distributed.process is 1 of 1; expected one of 0 to 0'),
    ('arm', 'sc_miss', "arm is 'sc_miss'; expected .* 'sc_mis'"),
    ('block_scale', 'max', 'block_scale is .max.; expected one of amax'),
  ],
)
def test_what_cannot_be_meant_is_one_line_that_begins_with_its_key(key, value, message) -> None:
  with pytest.raises(ValueError, match=f'^{message}') as raised:
    schema.parse(_with(key, value))
  assert '\n' not in str(raised.value)


@pytest.mark.parametrize('name', ['a b', '2x', 'a-b', 'a-', 'ä'])
def test_a_pool_s_name_is_a_letter_and_letters_digits_and_underscores(name) -> None:
  config = _config()
  config.pools[name] = config.pools.a100
  with pytest.raises(ValueError, match=r'^pools\..*name is .*; expected a letter followed by'):
    schema.parse(config)


def test_a_pool_states_what_has_no_default() -> None:
  config = _config()
  del config.pools.a100['sessions']
  with pytest.raises(ValueError, match=r'^pools.a100.sessions is not stated; expected a whole num'):
    schema.parse(config)


def test_a_simulated_pool_is_native_and_has_a_speed() -> None:
  config = _with('rollouts.schedule', 'simulated')
  with pytest.raises(ValueError, match=r'^pools.a100.turns_per_hour is not stated; expected how'):
    schema.parse(config)
  config.pools.a100.turns_per_hour = 5.0
  assert schema.parse(config).rollouts.schedule == 'simulated'
  config.pools.h100_fp8.server = 'vllm'
  with pytest.raises(ValueError, match=r"^pools.h100_fp8.server is 'vllm'; expected 'native'"):
    schema.parse(config)
