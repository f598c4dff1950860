"""A turn while it is drawn, and the record made of it."""

from __future__ import annotations

import dataclasses

import numpy as np

from mimo.samplers.base import SamplerError
from mimo.samplers.draw import Draw
from mimo.types import Candidates, FinishReason, Routes, SamplingParams, TurnSample, VersionSpan


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TurnRequest:
  """One call of `sample`: its arguments, under the names they have there."""

  session: str
  tokens: np.ndarray
  params: SamplingParams
  key: np.ndarray


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Part:
  """Consecutive tokens drawn under one version.

  Attributes:
    draws: leaves [n, ...].
    version: the publication number of the weights that drew them.
  """

  draws: Draw
  version: int


@dataclasses.dataclass(slots=True, eq=False)
class Session:
  """A trajectory.

  Attributes:
    name: unique while it is open.
    tokens: [T] int32, at the end of its last turn.
    request: the turn that runs or waits, or None.
    slot: where its cache is, or None.
    parts: what the running turn has drawn.
  """

  name: str
  tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
  request: TurnRequest | None = None
  slot: int | None = None
  parts: list[Part] = dataclasses.field(default_factory=list)

  @property
  def untold(self) -> int:
    """The first token that no earlier turn told the routes of: the last one drawn was not run."""
    return max(len(self.tokens) - 1, 0)


def assemble(
  request: TurnRequest, parts: list[Part], stopped: bool, routes: Routes | None = None
) -> TurnSample | SamplerError:
  """Makes the record of a turn that has ended; an error where a log-prob is not finite."""
  draws = Draw(*(np.concatenate(leaves) for leaves in zip(*(p.draws for p in parts), strict=True)))
  if not np.isfinite(draws.logps).all():
    where = int(np.flatnonzero(~np.isfinite(draws.logps))[0])
    return SamplerError(
      f'session {request.session}: the log-prob of token {where} of the turn is '
      f'{draws.logps[where]}, under version {_version_of(parts, where)}'
    )
  return TurnSample(
    tokens=draws.ids,
    logps=draws.logps,
    candidates=Candidates.from_dense(draws.candidate_ids, draws.candidate_logps),
    full_support=draws.full_support,
    finish=FinishReason.STOP if stopped else FinishReason.LENGTH,
    spans=_spans(parts),
    routes=routes,
  )


def _spans(parts: list[Part]) -> tuple[VersionSpan, ...]:
  spans: list[VersionSpan] = []
  end = 0
  for part in parts:
    start, end = end, end + len(part.draws.ids)
    if spans and spans[-1].version == part.version:
      start = spans.pop().start
    spans.append(VersionSpan(start, end, part.version))
  return tuple(spans)


def _version_of(parts: list[Part], index: int) -> int:
  return next(span.version for span in _spans(parts) if index < span.end)
