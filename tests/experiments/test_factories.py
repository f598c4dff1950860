"""From sections of an experiment to parts of a run."""

import pytest

from mimo.experiments import factories
from mimo.experiments.schema import parse
from mimo.rollouts.base import VirtualOptions


def test_a_pool_is_as_fast_as_the_throughput_that_it_is_priced_by(tiny_config) -> None:
  virtual = VirtualOptions(turn_tokens=6.0, session_tokens_per_sec=4.0)
  pace = factories.make_pace(parse(tiny_config).pools['b200_nvfp4'], virtual)
  # 30,000 turns an hour of 6 tokens each.
  assert (pace.session_tokens_per_sec, pace.replica_tokens_per_sec) == (4.0, pytest.approx(50.0))
