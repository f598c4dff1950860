"""Frozen records that cross the boundaries between rooms.

Nothing here does IO or imports another module of mimo. Arrays are numpy arrays on the host; the
trainer turns them into device arrays when it packs a batch.

Axis letters: T tokens of a trajectory, S sampled tokens of a trajectory (or of one turn),
C candidates of all sampled tokens, laid end to end, N consecutive tokens of a trajectory, L layers,
k experts that a layer sends a token to.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np


class FinishReason(enum.StrEnum):
  """Why a sampler ended a turn."""

  STOP = 'stop'  # a stop id was drawn; it is the turn's last token
  LENGTH = 'length'  # the turn's limit or the context's end was reached
  ABORT = 'abort'  # the server gave up: never scored


class EpisodeEnd(enum.StrEnum):
  """Why an episode ended. The first four are scored, the rest never are."""

  SUBMITTED = 'submitted'
  TURN_LIMIT = 'turn_limit'
  TOKEN_LIMIT = 'token_limit'
  MALFORMED = 'malformed'
  WALL_CLOCK = 'wall_clock'
  SAMPLER_FAILURE = 'sampler_failure'
  ENVIRONMENT_FAILURE = 'environment_failure'

  @property
  def scored(self) -> bool:
    return self in _SCORED


_SCORED = frozenset(
  {EpisodeEnd.SUBMITTED, EpisodeEnd.TURN_LIMIT, EpisodeEnd.TOKEN_LIMIT, EpisodeEnd.MALFORMED}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
  """Where a trajectory was sampled: what makes its log-probs differ from the trainer's."""

  pool: str
  accelerator: str
  format: str  # a weight format: bf16, fp8_block, fp8_channel, nvfp4_w4a16, nvfp4_w4a4
  kv_cache_dtype: str  # 'bf16' or 'fp8'


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingParams:
  """How tokens are drawn: temperature, then top-k (ties kept), then top-p over the rest.

  `top_k=0` and `top_p=1.0` keep the whole vocabulary. `temperature=0.0` takes the most likely
  token, and log-probs are then those at temperature 1. `candidates` is how many of the most likely
  tokens are recorded per sampled token (the cap K), never fewer than the sampled one.
  """

  temperature: float
  top_p: float
  top_k: int
  candidates: int
  max_turn_tokens: int
  stop_ids: tuple[int, ...]

  def __post_init__(self) -> None:
    if not self.temperature >= 0.0:
      raise ValueError(f'temperature is {self.temperature}; expected a number >= 0')
    if not 0.0 < self.top_p <= 1.0:
      raise ValueError(f'top_p is {self.top_p}; expected a number in (0, 1]')
    if self.top_k < 0:
      raise ValueError(f'top_k is {self.top_k}; expected 0 (off) or a positive number')
    if self.candidates < 1:
      raise ValueError(f'candidates is {self.candidates}; expected at least 1')
    if self.max_turn_tokens < 1:
      raise ValueError(f'max_turn_tokens is {self.max_turn_tokens}; expected at least 1')


@dataclasses.dataclass(frozen=True, slots=True)
class VersionSpan:
  """Tokens `[start, end)` were drawn under publication number `version`."""

  start: int
  end: int
  version: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidates:
  """The most likely tokens of each sampled position, ragged.

  Row s holds `ids[offsets[s]:offsets[s + 1]]`: distinct, none with probability 0.

  Attributes:
    offsets: [S + 1] int64, from 0 to C.
    ids: [C] int32.
    logps: [C] float32, log q(v) in nats, of the distribution drawn from.
  """

  offsets: np.ndarray
  ids: np.ndarray
  logps: np.ndarray

  def __len__(self) -> int:
    return len(self.offsets) - 1

  def row(self, s: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, logps) of position `s`."""
    span = slice(int(self.offsets[s]), int(self.offsets[s + 1]))
    return self.ids[span], self.logps[span]

  def dense(self, num_candidates: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids [S, K] int32 padded with -1, and logps [S, K] float32 padded with 0.

    Raises ValueError when a row holds more than `num_candidates`.
    """
    counts = np.diff(self.offsets)
    if counts.size and counts.max() > num_candidates:
      raise ValueError(f'a row holds {counts.max()} candidates; expected at most {num_candidates}')
    ids = np.full((len(self), num_candidates), -1, np.int32)
    logps = np.zeros((len(self), num_candidates), np.float32)
    filled = np.arange(num_candidates) < counts[:, None]
    ids[filled] = self.ids
    logps[filled] = self.logps
    return ids, logps

  @staticmethod
  def from_dense(ids: np.ndarray, logps: np.ndarray) -> Candidates:
    """The inverse of `dense`: ids [S, K] with -1 where there is no candidate, logps [S, K]."""
    filled = ids >= 0
    offsets = np.concatenate([[0], np.cumsum(filled.sum(axis=1))]).astype(np.int64)
    return Candidates(offsets, ids[filled].astype(np.int32), logps[filled].astype(np.float32))

  @staticmethod
  def concatenate(parts: Sequence[Candidates]) -> Candidates:
    """Joins the rows of `parts` in order."""
    counts = np.concatenate([np.diff(part.offsets) for part in parts] or [np.zeros(0, np.int64)])
    return Candidates(
      np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
      np.concatenate([part.ids for part in parts] or [np.zeros(0, np.int32)]),
      np.concatenate([part.logps for part in parts] or [np.zeros(0, np.float32)]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class RouteShape:
  """What there is to tell of a token's way: `per_token` of the `experts` of each of `layers`."""

  layers: int
  experts: int
  per_token: int


# Of `Routes.ids`: experts are counted in hundreds, and there are many ids per token.
ROUTE_DTYPE = np.int16


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routes:
  """The experts that a sampler sent tokens to, as it ran them.

  Row i is of token `start + i` of the trajectory, and of the forward pass that this token entered:
  the one that predicts the token after it. The last token drawn has entered none.

  Attributes:
    start: index in the trajectory.
    ids: [N, L, k] int16; distinct in a layer, or all -1 where they are not known.
  """

  start: int
  ids: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TurnSample:
  """What a sampler returns for one turn.

  Attributes:
    tokens: [S] int32, drawn in order; a stop id, where one was drawn, is the last.
    logps: [S] float32, log q(a) in nats.
    candidates: S rows.
    full_support: [S] bool, True where the candidates are the whole support of q.
    finish: why the turn ended.
    spans: versions, indexed from the turn's first sampled token; they cover [0, S).
    routes: of the tokens from the first that no earlier turn told of, up to and without the last
      drawn; None from a sampler that tells none.
  """

  tokens: np.ndarray
  logps: np.ndarray
  candidates: Candidates
  full_support: np.ndarray
  finish: FinishReason
  spans: tuple[VersionSpan, ...]
  routes: Routes | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
  """One sampled turn: tokens `[start, end)` of the trajectory, and the versions that drew them."""

  start: int
  end: int
  finish: FinishReason
  spans: tuple[VersionSpan, ...]  # indexed in the trajectory's tokens; they cover [start, end)


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRef:
  """One task of a split, and the group that samples it: unique in a run, never reused.

  `group` counts dispensed prompts from 0; `index` is the task's index in its split.
  """

  group: int
  split: str
  index: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
  """One episode, as trained on. Streams marked [S] are indexed by sampled token, in order.

  Attributes:
    tokens: [T] int32, prompt, sampled and observation ids over all turns.
    sampled: [T] bool, True where the policy drew the token (S of them).
    logps: [S] float32, log q(a) in nats.
    candidates: S rows.
    full_support: [S] bool.
    turns: in order.
    source: the pool that sampled it.
    sampling: how tokens were drawn.
    logprob_mode: what the sampler states of its log-probs; 'processed' is the only one trained on.
    prefix_cache: 'keep' or 'drop', what happens to cached keys and values at a weight update.
    end: why the episode ended.
    reward: in [0, 1]; 0.0 where `end` is not scored.
    prompt: the task and group.
    member: index in the group.
    incarnation: which start of the run sampled it, from 0.
    routes: [T, L, k] int16, the experts that the sampler sent each token to, -1 where it did not
      say (of the last drawn token among others); None where it said nothing.
  """

  tokens: np.ndarray
  sampled: np.ndarray
  logps: np.ndarray
  candidates: Candidates
  full_support: np.ndarray
  turns: tuple[Turn, ...]
  source: Source
  sampling: SamplingParams
  logprob_mode: str
  prefix_cache: str
  end: EpisodeEnd
  reward: float
  prompt: PromptRef
  member: int
  incarnation: int
  routes: np.ndarray | None = None

  @property
  def num_sampled(self) -> int:
    return len(self.logps)

  def versions(self) -> np.ndarray:
    """Returns [S] int64: the publication number under which each token was drawn."""
    spans = [span for turn in self.turns for span in turn.spans]
    lengths = np.array([span.end - span.start for span in spans], np.int64)
    return np.repeat(np.array([span.version for span in spans], np.int64), lengths)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
  """The scored trajectories of one prompt, and how many members were asked for."""

  prompt: PromptRef
  trajectories: tuple[Trajectory, ...]
  asked: int


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
  """A publication: `number` only increases, across restarts too."""

  number: int
  incarnation: int  # which start of the run published it
  update: int  # updates applied to the weights it holds; 0 is the base policy

  def is_live(self, starts: Sequence[int]) -> bool:
    """Returns whether the weights are of a run's history.

    A start of the run goes on from a checkpoint; what an earlier start published after that
    checkpoint's update is abandoned: the trainer never had those weights.

    Args:
      starts: updates applied to the weights that each start of the run went on from, first to last.
    """
    later = starts[self.incarnation + 1 :]
    return self.incarnation < len(starts) and self.update <= min(later, default=self.update)
