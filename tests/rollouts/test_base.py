import dataclasses

import pytest

from mimo.rollouts.base import Pacing, PoolStats, RolloutOptions, RolloutStats, VirtualOptions


def test_rates_and_turns_come_from_every_pool():
  pool = PoolStats(episodes=2, lost=1, turns=5, sampled_tokens=30, tokens=90)
  fields = {f.name: 0 for f in dataclasses.fields(RolloutStats)}
  fields |= {'secs': 4.0, 'pools': {'a': pool, 'b': dataclasses.replace(pool, turns=7)}}
  stats = RolloutStats(**fields)
  assert stats.sampled_tokens_per_sec == 15.0
  assert stats.turns() == {'a': 5, 'b': 7}
  assert dataclasses.replace(stats, secs=0.0).sampled_tokens_per_sec == 0.0


@pytest.mark.parametrize('seed', [-1, 2**32])
def test_a_seed_beyond_a_word_is_refused(kit, seed):
  with pytest.raises(ValueError, match=f'seed is {seed}; expected a whole number'):
    kit.settings(seed=seed)


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'in_flight': 0.0}, 'in_flight is 0.0; expected a number > 0'),
    ({'buffered': -1.0}, 'buffered is -1.0; expected a number >= 0'),
    ({'in_flight': 0.9, 'buffered': 0.9}, 'no batch would ever be whole'),
    ({'pin_lag': -1}, 'pin_lag is -1; expected a whole number >= 0'),
  ],
)
def test_a_pacing_that_cannot_be_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Pacing(**{'in_flight': 1.0, 'buffered': 1.0, 'pin_lag': None} | changes)


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('schedule', 'asink', "schedule is 'asink'; expected one of .*did you mean 'async'"),
    ('prompts_per_update', 0, 'prompts_per_update is 0; expected a whole number >= 1'),
    ('group_size', 1, 'group_size is 1; expected a whole number >= 2'),
    ('in_flight_batches', 0.0, 'in_flight_batches is 0.0; expected a number > 0'),
    ('in_flight_batches', float('nan'), 'in_flight_batches is nan'),
    ('in_flight_batches', float('inf'), 'in_flight_batches is inf'),
    ('buffered_batches', 0.5, 'buffered_batches is 0.5; expected a number >= 1'),
    ('max_staleness_updates', -1, 'max_staleness_updates is -1; expected a whole number >= 0'),
    ('lag_updates', -1, 'lag_updates is -1; expected a whole number >= 0'),
    ('episode_timeout_secs', 0.0, 'episode_timeout_secs is 0.0'),
    ('retries', -1, 'retries is -1'),
  ],
)
def test_options_that_cannot_be_are_refused(field, value, message):
  with pytest.raises(ValueError, match=message):
    RolloutOptions(**{field: value})


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('update_secs', -1.0),
    ('update_secs', float('inf')),
    ('publication_secs', float('nan')),
    ('answer_secs', -0.5),
    ('session_tokens_per_sec', 0.0),
    ('turn_tokens', 0.0),
  ],
)
def test_virtual_durations_that_cannot_be_are_refused(field, value):
  with pytest.raises(ValueError, match=f'{field} is {value}; expected a number >'):
    VirtualOptions(**{field: value})
