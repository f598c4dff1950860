import dataclasses

import pytest

from mimo.rollouts.base import PoolStats, RolloutStats


def test_rates_and_turns_come_from_every_pool():
  pool = PoolStats(episodes=2, lost=1, turns=5, sampled_tokens=30, tokens=90)
  fields = {f.name: 0 for f in dataclasses.fields(RolloutStats)}
  fields |= {'secs': 4.0, 'pools': {'a': pool, 'b': dataclasses.replace(pool, turns=7)}}
  stats = RolloutStats(**fields)
  assert stats.sampled_tokens_per_sec == 15.0
  assert stats.turns() == {'a': 5, 'b': 7}
  assert dataclasses.replace(stats, secs=0.0).sampled_tokens_per_sec == 0.0


@pytest.mark.parametrize(
  ('field', 'value', 'message'),
  [
    ('groups', 0, 'groups is 0; expected at least 1'),
    ('members', 1, 'members is 1; expected at least 2'),
    ('seed', -1, 'seed is -1'),
    ('wall_clock_secs', 0.0, 'wall_clock_secs is 0.0'),
    ('wall_clock_secs', float('nan'), 'wall_clock_secs is nan'),
    ('retries', -1, 'retries is -1'),
  ],
)
def test_settings_that_cannot_be_are_refused(kit, field, value, message):
  with pytest.raises(ValueError, match=message):
    kit.settings(**{field: value})
