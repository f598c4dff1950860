"""A pool's speed is the throughput that it is priced by."""

import pytest

from mimo.experiments import factories, virtual


def test_speeds_and_times_of_a_configuration(tiny_config):
  config = tiny_config
  with config.unlocked():
    config.rollouts.virtual.update_secs = 7.0
    config.rollouts.virtual.publication_secs = 3.0
    config.rollouts.virtual.turn_tokens = 6.0
  pools = factories.make_pools(config)
  speeds = dict(zip([p.name for p in pools], virtual.make_speeds(config, pools), strict=True))
  # 30,000 turns an hour of 6 tokens each.
  assert speeds['b200_nvfp4'].replica_tokens_per_sec == pytest.approx(50.0)
  assert {speed.publication_secs for speed in speeds.values()} == {3.0}
  assert virtual.make_times(config).update_secs == 7.0
