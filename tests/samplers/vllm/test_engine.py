"""Which flags a server may have, from a configuration that only has them."""

import logging
import types

import pytest

from mimo.samplers.vllm.internals import VllmEngine
from mimo.samplers.vllm.launch import SCHEDULER, WORKER_EXTENSION


def _client(**changes):
  flags = {
    'logprobs_mode': 'processed_logprobs',
    'worker_extension_cls': WORKER_EXTENSION,
    'scheduler_cls': SCHEDULER,
    'log_stats': True,
  } | changes
  space = types.SimpleNamespace
  config = space(
    model_config=space(logprobs_mode=flags['logprobs_mode']),
    parallel_config=space(worker_extension_cls=flags['worker_extension_cls']),
    scheduler_config=space(scheduler_cls=flags['scheduler_cls']),
  )
  loggers = space(stat_loggers=[]) if flags['log_stats'] else None
  return space(vllm_config=config, logger_manager=loggers)


def test_the_flags_of_launch_are_taken_and_steps_are_counted(caplog):
  client = _client()
  with caplog.at_level(logging.WARNING):
    VllmEngine(client)
  assert len(client.logger_manager.stat_loggers) == 1
  assert not caplog.records


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'log_stats': False}, 'expected no --disable-log-stats'),
    ({'logprobs_mode': 'raw_logprobs'}, 'raw_logprobs; expected processed_logprobs'),
    ({'worker_extension_cls': ''}, "--worker-extension-cls is ''; expected mimo"),
  ],
)
def test_flags_that_a_trainer_cannot_do_with_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    VllmEngine(_client(**change))


@pytest.mark.parametrize('other', [None, 'theirs.Scheduler'])
def test_another_scheduler_is_taken_and_said_to_be_slower(other, caplog):
  with caplog.at_level(logging.WARNING):
    VllmEngine(_client(scheduler_cls=other))
  (record,) = caplog.records
  assert f'--scheduler-cls is {other}' in record.getMessage() and 'slower' in record.getMessage()
