"""A clock that jumps, a tiny task and scripted samplers: nothing here waits for real time."""

import asyncio
import types
from collections.abc import Callable, Coroutine

import numpy as np
import pytest

from mimo.rollouts.base import RolloutOptions, RolloutSettings
from mimo.rollouts.clock import VirtualLoop
from mimo.rollouts.schedules import schedule_of
from mimo.rollouts.source import RolloutSource
from mimo.samplers.base import SamplerContract
from mimo.samplers.scripted import ScriptedCall, ScriptedSampler
from mimo.tasks.base import EnvironmentFailure, StepResult
from mimo.types import EpisodeEnd, FinishReason, SamplingParams, Source

VOCAB = 32
STOP = 1
WIN, LOSE, GO_ON, MALFORMED, BREAK, HANG = 10, 11, 12, 13, 14, 15


def run(coroutine: Coroutine):
  with asyncio.Runner(loop_factory=VirtualLoop) as runner:
    return runner.run(coroutine)


class TinyEpisode:
  """Understands its turns' first token: see the names above."""

  def __init__(self, task, index):
    self._task = task
    self._prompt = np.array([2, 16 + index % 16], np.int32)

  @property
  def prompt(self):
    return self._prompt

  async def step(self, tokens, finish):
    none = np.zeros(0, np.int32)
    self._task.steps.append((tokens.tolist(), finish))
    match int(tokens[0]):
      case 10:
        return StepResult(none, EpisodeEnd.SUBMITTED, 1.0)
      case 11:
        return StepResult(none, EpisodeEnd.SUBMITTED, 0.0)
      case 13:
        return StepResult(none, EpisodeEnd.MALFORMED, 0.0)
      case 14:
        raise EnvironmentFailure('the stack machine broke')
      case 15:
        await asyncio.get_running_loop().create_future()
    if finish is FinishReason.LENGTH:
      return StepResult(none, EpisodeEnd.MALFORMED, 0.0)
    return StepResult(self._task.observation, None, 0.0)

  async def close(self):
    self._task.closed += 1


class TinyTask:
  name = 'tiny'
  splits = ('train',)
  stop_ids = (STOP,)
  max_turn_tokens = 8

  def __init__(self, size=10, max_tokens=64, observation=(3, 4)):
    self.max_tokens = max_tokens
    self.observation = np.array(observation, np.int32)
    self.opened = 0
    self.closed = 0
    self.steps = []
    self._size = size

  def size(self, split):
    return self._size

  def task_id(self, split, index):
    return f'{split}-{index}'

  def start(self, split, index):
    self.opened += 1
    return TinyEpisode(self, index)


SAMPLING = SamplingParams(
  temperature=1.0, top_p=1.0, top_k=0, candidates=2, max_turn_tokens=8, stop_ids=(STOP,)
)


def settings(*, seed=7, incarnation=0, **changes) -> RolloutSettings:
  options = RolloutOptions(
    **{'prompts_per_update': 2, 'group_size': 3, 'episode_timeout_secs': 100.0} | changes
  )
  return RolloutSettings(options=options, sampling=SAMPLING, seed=seed, incarnation=incarnation)


def source(samplers, *, task=None, update_of=None, version_of=None, state=None, **changes):
  """A source that samples beside training, or as `schedule` says."""
  stated = settings(**changes)
  return RolloutSource(
    task or TinyTask(),
    samplers,
    stated,
    pacing=schedule_of(stated.options).pacing,
    update_of={0: 0} if update_of is None else update_of,
    version_of={} if version_of is None else version_of,
    state=state,
  )


def sampler(
  script: Callable[[ScriptedCall], object],
  *,
  pool='a',
  sessions=8,
  max_tokens=64,
  version=0,
  routes=None,
) -> ScriptedSampler:
  contract = SamplerContract(
    source=Source(pool, 'H100', 'bf16', 'bf16'),
    logprob_mode='processed',
    logits_dtype='float32',
    vocab_size=VOCAB,
    max_tokens=max_tokens,
    prefix_cache='keep',
    max_sessions=sessions,
    routes=routes,
  )
  return ScriptedSampler(contract, script, version=version)


def win(call: ScriptedCall) -> list[int]:
  return [WIN, STOP]


def after(secs: float, draw: Callable[[ScriptedCall], object] = win):
  """A script that takes `secs` of the virtual clock."""

  async def script(call):
    await asyncio.sleep(secs)
    return draw(call)

  return script


@pytest.fixture(scope='session')
def kit():
  """What the tests of this room share."""
  names = ('VOCAB', 'STOP', 'WIN', 'LOSE', 'GO_ON', 'MALFORMED', 'BREAK', 'HANG', 'SAMPLING')
  parts = {name: globals()[name] for name in names}
  functions = (run, TinyTask, settings, sampler, source, win, after)
  return types.SimpleNamespace(**parts, **{f.__name__: f for f in functions})
