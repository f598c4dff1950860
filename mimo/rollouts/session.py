"""One episode, from prompt to trajectory: sampler turn, environment step, sampler turn, ..."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable

import numpy as np

from mimo.rollouts import contract
from mimo.samplers.base import Sampler, SamplerError
from mimo.tasks.base import EnvironmentFailure, Episode, StepResult, Task
from mimo.types import (
  ROUTE_DTYPE,
  Candidates,
  EpisodeEnd,
  FinishReason,
  PromptRef,
  SamplingParams,
  Trajectory,
  Turn,
  TurnSample,
  VersionSpan,
)

# A release that takes longer is given up: its place must come back.
CLEANUP_SECS = 30.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EpisodeSpec:
  """One attempt at one prompt.

  Attributes:
    session: the sampler session's name.
    prompt: the task and group.
    member: index in the group.
    incarnation: which start of the run this is.
    sampling: how tokens are drawn.
    key: [2] uint32.
    wall_clock_secs: how long the episode may take, or None.
  """

  session: str
  prompt: PromptRef
  member: int
  incarnation: int
  sampling: SamplingParams
  key: np.ndarray
  wall_clock_secs: float | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Attempt:
  """How an attempt ended.

  Attributes:
    trajectory: what was sampled; of a lost attempt, up to its loss.
    error: why it was lost; None where it is scored.
    cleanup_errors: what went wrong in releasing its session or its episode.
  """

  trajectory: Trajectory
  error: str | None
  cleanup_errors: tuple[str, ...]


class _Lost(Exception):
  """Ends an episode that is not scored."""

  def __init__(self, end: EpisodeEnd, message: str) -> None:
    super().__init__(message)
    self.end = end


class _Record:
  """The trajectory so far. Ids are only ever appended: each turn's prompt extends the last."""

  def __init__(self) -> None:
    self._tokens = np.zeros(1024, np.int32)
    self._length = 0
    self._turns: list[Turn] = []
    self._samples: list[TurnSample] = []

  def __len__(self) -> int:
    return self._length

  @property
  def routed(self) -> int:
    """The first token whose routes no turn has told: the last one drawn, which was not run yet."""
    return self._turns[-1].end - 1 if self._turns else 0

  @property
  def tokens(self) -> np.ndarray:
    """[T] int32, a read-only view that later appends leave as it is."""
    view = self._tokens[: self._length]
    view.flags.writeable = False
    return view

  def append(self, ids: np.ndarray) -> None:
    length = self._length + len(ids)
    if length > len(self._tokens):
      grown = np.zeros(max(length, 2 * len(self._tokens)), np.int32)
      grown[: self._length] = self._tokens[: self._length]
      self._tokens = grown
    self._tokens[self._length : length] = ids
    self._length = length

  def turn(self, sample: TurnSample) -> None:
    start = self._length
    self.append(sample.tokens)
    spans = tuple(VersionSpan(s.start + start, s.end + start, s.version) for s in sample.spans)
    self._turns.append(Turn(start, self._length, sample.finish, spans))
    self._samples.append(sample)

  def trajectory(
    self, spec: EpisodeSpec, sampler: Sampler, end: EpisodeEnd, reward: float
  ) -> Trajectory:
    sampled = np.zeros(self._length, bool)
    for turn in self._turns:
      sampled[turn.start : turn.end] = True
    none = np.zeros(0)
    return Trajectory(
      tokens=self._tokens[: self._length].copy(),
      sampled=sampled,
      logps=np.concatenate([none, *(s.logps for s in self._samples)], dtype=np.float32),
      candidates=Candidates.concatenate([s.candidates for s in self._samples]),
      full_support=np.concatenate([none, *(s.full_support for s in self._samples)]).astype(bool),
      turns=tuple(self._turns),
      source=sampler.contract.source,
      sampling=spec.sampling,
      logprob_mode=sampler.contract.logprob_mode,
      prefix_cache=sampler.contract.prefix_cache,
      end=end,
      reward=reward,
      prompt=spec.prompt,
      member=spec.member,
      incarnation=spec.incarnation,
      routes=self._routes(),
    )

  def _routes(self) -> np.ndarray | None:
    told = [sample.routes for sample in self._samples if sample.routes is not None]
    if not told:
      return None
    ids = np.full((self._length, *told[0].ids.shape[1:]), -1, ROUTE_DTYPE)
    for routes in told:
      ids[routes.start : routes.start + len(routes.ids)] = routes.ids
    return ids


async def run_episode(task: Task, sampler: Sampler, spec: EpisodeSpec) -> Attempt:
  """Plays one episode and releases its session, however it ends.

  Ends that are scored come from the environment, or are `token_limit` when the trajectory has no
  room for another token in the task's or the sampler's limit. Whatever else ends it is a loss:
  `wall_clock` when it took too long, `sampler_failure` when the sampler failed, aborted a turn or
  broke the contract of samples, `environment_failure` when the environment failed or gave a result
  that is none. A loss is never a low reward.

  Raises:
    ValueError: a prompt fills the limit by itself.
    Whatever a sampler or an environment raises beside their own errors: that is a bug.
  """
  record = _Record()
  reward = 0.0
  error: str | None = None
  cleanup_errors: list[str] = []
  try:
    async with asyncio.timeout(spec.wall_clock_secs) as timer:
      end, reward = await _open_and_play(task, sampler, spec, record, cleanup_errors)
  except TimeoutError:
    if not timer.expired():
      raise  # someone else's timeout
    end, error = EpisodeEnd.WALL_CLOCK, f'no end within {spec.wall_clock_secs} s'
  except SamplerError as failure:
    end, error = EpisodeEnd.SAMPLER_FAILURE, str(failure)
  except EnvironmentFailure as failure:
    end, error = EpisodeEnd.ENVIRONMENT_FAILURE, str(failure)
  except _Lost as lost:
    end, error = lost.end, str(lost)
  finally:
    await _clean_up(sampler.release(spec.session), cleanup_errors)
  trajectory = record.trajectory(spec, sampler, end, reward)
  if error is None:
    try:
      _check(trajectory, sampler)
    except SamplerError as failure:
      end, error = EpisodeEnd.SAMPLER_FAILURE, str(failure)
      trajectory = dataclasses.replace(trajectory, end=end, reward=0.0)
  return Attempt(trajectory, error, tuple(cleanup_errors))


async def _open_and_play(
  task: Task, sampler: Sampler, spec: EpisodeSpec, record: _Record, cleanup_errors: list[str]
) -> tuple[EpisodeEnd, float]:
  """Returns the end and the reward of a scored episode; closes it however it ends."""
  episode = task.start(spec.prompt.split, spec.prompt.index)
  try:
    limit = min(task.max_tokens, sampler.contract.max_tokens)
    record.append(episode.prompt)
    if len(record) >= limit:
      raise ValueError(
        f'pool {sampler.contract.source.pool}: the prompt of '
        f'{task.task_id(spec.prompt.split, spec.prompt.index)} holds {len(record)} tokens; '
        f'expected fewer than {limit}'
      )
    return await _play(episode, sampler, spec, record, limit)
  finally:
    await _clean_up(episode.close(), cleanup_errors)


async def _play(
  episode: Episode, sampler: Sampler, spec: EpisodeSpec, record: _Record, limit: int
) -> tuple[EpisodeEnd, float]:
  """Takes turns until the episode ends. Raises what loses it."""
  while True:
    room = limit - len(record)
    params = spec.sampling
    if room < params.max_turn_tokens:
      params = dataclasses.replace(params, max_turn_tokens=room)
    sample = await sampler.sample(spec.session, record.tokens, params, spec.key)
    contract.check_turn(sample, params)
    contract.check_routes(
      sample.routes,
      sampler.contract.routes,
      start=record.routed,
      end=len(record) + len(sample.tokens) - 1,
    )
    record.turn(sample)
    if sample.finish is FinishReason.ABORT:
      raise SamplerError(f'the sampler aborted a turn after {len(sample.tokens)} tokens')
    if sample.finish is FinishReason.LENGTH and len(record) >= limit:
      return EpisodeEnd.TOKEN_LIMIT, 0.0
    result = await episode.step(sample.tokens, sample.finish)
    if result.end is not None:
      return _scored(result.end, result)
    if len(record) + len(result.observation) >= limit:
      return EpisodeEnd.TOKEN_LIMIT, 0.0  # the observation is left out: nothing would follow it
    record.append(result.observation)


def _scored(end: EpisodeEnd, result: StepResult) -> tuple[EpisodeEnd, float]:
  """Returns an episode's end and reward, or raises what loses it."""
  if not end.scored:
    raise _Lost(end, f'the environment ended the episode as {end.value}')
  best = 1.0 if end is EpisodeEnd.SUBMITTED else 0.0
  if not 0.0 <= result.reward <= best:
    raise EnvironmentFailure(
      f'the reward of an episode that ended as {end.value} is {result.reward}; '
      f'expected {"a number in [0, 1]" if best else "0"}'
    )
  return end, float(result.reward)


def _check(trajectory: Trajectory, sampler: Sampler) -> None:
  contract.check_streams(
    trajectory.tokens[trajectory.sampled],
    trajectory.logps,
    trajectory.candidates,
    trajectory.full_support,
    vocab_size=sampler.contract.vocab_size,
    max_candidates=trajectory.sampling.candidates,
  )


async def _clean_up(released: Awaitable[None], errors: list[str]) -> None:
  """Waits for a release; its failure is noted and costs neither the episode nor its place."""
  try:
    async with asyncio.timeout(CLEANUP_SECS):
      await released
  except TimeoutError:
    errors.append(f'a release took more than {CLEANUP_SECS} s')
  except (SamplerError, EnvironmentFailure) as failure:
    errors.append(f'a release failed: {failure}')
