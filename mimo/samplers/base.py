"""The sampler port: what a rollout needs of whatever draws tokens.

A sampler serves one pool. A session is one trajectory: it stays on one sampler, whose prefix cache
holds it, and is named by a string that is unique while it is open.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from mimo import checks
from mimo.types import RouteShape, SamplingParams, Source, TurnSample, Version


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
  """How the pools of a run draw: the section `sampling` of a configuration.

  Attributes:
    temperature: divides the logits, in samplers and trainer alike; 1 is the policy itself.
    top_p: the mass of the nucleus, in arms with _topp; the others draw from everything.
    top_k: the most tokens of the nucleus, in arms with _topp; 0 is no bound.
    candidates: how many tokens are recorded per sampled one; twice top_k, so that ties fit.
  """

  temperature: float = 1.0
  top_p: float = 0.97
  top_k: int = 8
  candidates: int = 16

  def __post_init__(self) -> None:
    checks.number('temperature', self.temperature, least=0.01, most=100)
    checks.number('top_p', self.top_p, above=0, most=1)
    checks.whole('top_k', self.top_k, least=0, most=2**20)
    checks.whole('candidates', self.candidates, least=1, most=2**20)

  def params(
    self, *, nucleus: bool, max_turn_tokens: int, stop_ids: tuple[int, ...]
  ) -> SamplingParams:
    """Returns how a turn is drawn: from the nucleus, or from the whole vocabulary."""
    return SamplingParams(
      temperature=self.temperature,
      top_p=self.top_p if nucleus else 1.0,
      top_k=self.top_k if nucleus else 0,
      candidates=self.candidates,
      max_turn_tokens=max_turn_tokens,
      stop_ids=stop_ids,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SamplerContract:
  """What a sampler states of itself, checked once at start.

  Attributes:
    source: the pool's name, accelerator, weight format and cache dtype.
    logprob_mode: 'processed' when log-probs are those of the distribution drawn from.
    logits_dtype: the dtype of the head's matmul and of the logits.
    vocab_size: V.
    max_tokens: the longest trajectory it can hold.
    prefix_cache: 'keep' or 'drop' at a weight update.
    max_sessions: how many sessions it decodes at a time; more wait their turn.
    routes: the shape of the routes that its turns tell; None where they tell none.
  """

  source: Source
  logprob_mode: str
  logits_dtype: str
  vocab_size: int
  max_tokens: int
  prefix_cache: str
  max_sessions: int
  routes: RouteShape | None = None


class SamplerError(Exception):
  """A turn could not be sampled. The episode ends as `sampler_failure` and is never scored."""


class Sampler(Protocol):
  """Draws turns for many sessions at a time."""

  @property
  def contract(self) -> SamplerContract: ...

  async def start(self) -> None:
    """Returns once a first version is served. Raises SamplerError when none can be."""

  async def sample(
    self, session: str, tokens: np.ndarray, params: SamplingParams, key: np.ndarray
  ) -> TurnSample:
    """Draws one turn.

    Args:
      session: its name. The first call opens it.
      tokens: [T] int32, the whole trajectory so far; it must extend the ids of this session's
        previous call and sample exactly.
      params: how to draw.
      key: [2] uint32, the session's random key; position t draws with `fold_in(key, t)`, t being
        the drawn token's index in the trajectory, so what is drawn does not depend on batching.

    Raises:
      SamplerError: the tokens do not extend the session's, the session outgrew `max_tokens`
        before a token was drawn, or the sampler failed.
    """

  async def release(self, session: str) -> None:
    """Frees what the session holds. Unknown names are ignored."""

  @property
  def version(self) -> int:
    """The publication number now served."""

  async def close(self) -> None:
    """Stops; turns in flight raise SamplerError."""


class PinnableSampler(Sampler, Protocol):
  """A sampler that can be held at a version."""

  async def pin(self, version: Version | None) -> None:
    """Serves exactly `version`, once this returns and until the next call; None follows again.

    Raises SamplerError when it cannot be loaded; what was served then still is.
    """


def check_contract(contract: SamplerContract, *, logits_dtype: str, vocab_size: int) -> None:
  """Refuses a sampler whose log-probs the trainer's cannot be compared with.

  Raises ValueError naming the pool, what it states and what was expected.
  """
  pool = contract.source.pool
  if contract.logprob_mode != 'processed':
    raise ValueError(
      f'pool {pool}: log-prob mode is {contract.logprob_mode!r}; expected '
      "'processed': log-probs of the distribution drawn from, after temperature, top-k and top-p"
    )
  if contract.logits_dtype != logits_dtype:
    raise ValueError(
      f'pool {pool}: logits are computed in {contract.logits_dtype}; expected {logits_dtype}, '
      "the trainer's"
    )
  if contract.vocab_size != vocab_size:
    raise ValueError(f'pool {pool}: vocabulary of {contract.vocab_size}; expected {vocab_size}')
