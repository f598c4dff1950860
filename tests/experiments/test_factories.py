"""From values of a configuration to settings of a room."""

import pytest

from mimo.experiments import factories
from mimo.rollouts.base import VirtualOptions


@pytest.mark.parametrize(
  ('text', 'expected'),
  [
    ('', ()),
    ('moments', ('moments',)),
    ('residuals, moments', ('residuals', 'moments')),
  ],
)
def test_offload_is_a_list_in_a_text(tiny_config, text, expected) -> None:
  tiny_config.trainer.remat = True  # which offloaded residuals need
  tiny_config.trainer.offload = text
  assert factories.make_trainer_config(tiny_config).offload == expected


def test_settings_of_the_update_are_the_configuration_s(tiny_config) -> None:
  tiny_config.trainer.freeze_router = True
  tiny_config.trainer.b2 = 0.5
  tiny_config.sampling.temperature = 0.75
  made = factories.make_trainer_config(tiny_config)
  assert (made.freeze_router, made.replay_routes, made.b2) == (True, False, 0.5)
  assert made.temperature == 0.75  # one for the samplers and the trainer


def test_a_pool_is_as_fast_as_the_throughput_that_it_is_priced_by(tiny_config) -> None:
  virtual = VirtualOptions(turn_tokens=6.0, session_tokens_per_sec=4.0)
  pool = next(p for p in factories.make_pools(tiny_config) if p.name == 'b200_nvfp4')
  pace = factories.make_pace(pool, virtual)
  # 30,000 turns an hour of 6 tokens each.
  assert (pace.session_tokens_per_sec, pace.replica_tokens_per_sec) == (4.0, pytest.approx(50.0))
