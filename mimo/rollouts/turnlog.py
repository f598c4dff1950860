"""What samplers answered in the episodes under way: from it an episode is played again exactly.

An episode is a coroutine, which can't be saved. Its environment answers equal turns equally, so
its turns are all that it depends on: played again with them, it is where it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from mimo.samplers.base import SamplerError
from mimo.types import Candidates, FinishReason, Routes, TurnSample, VersionSpan

Answer = TurnSample | SamplerError


class Member(NamedTuple):
  """One member of one group."""

  group: int
  member: int


@dataclasses.dataclass(slots=True)
class AttemptLog:
  """One attempt: where it is, and its turns so far.

  Attributes:
    replica: its place among the samplers.
    answers: in order; a failure can only be the last.
  """

  replica: int
  answers: list[Answer] = dataclasses.field(default_factory=list)


class TurnLog:
  """Attempts by member and number. A session is named `group/member/number`."""

  def __init__(self) -> None:
    self._members: dict[Member, dict[int, AttemptLog]] = {}

  def attempt(self, session: str, replica: int) -> AttemptLog:
    """Returns a session's log, which begins with the first call."""
    member, number = parse(session)
    return self._members.setdefault(member, {}).setdefault(number, AttemptLog(replica))

  def replica(self, member: Member, number: int) -> int | None:
    """Returns where an attempt was made, None where it has not been."""
    attempt = self._members.get(member, {}).get(number)
    return None if attempt is None else attempt.replica

  def answer(self, session: str, answer: Answer) -> None:
    """Adds what a sampler answered."""
    member, number = parse(session)
    if member in self._members and number in self._members[member]:
      self._members[member][number].answers.append(answer)

  def forget(self, member: Member) -> None:
    """Drops the log of a member that is trained on or dropped."""
    self._members.pop(member, None)

  def state(self) -> list[dict[str, Any]]:
    """Returns JSON values and numpy arrays."""
    return [
      {
        'session': f'{member.group}/{member.member}/{number}',
        'replica': attempt.replica,
        'answers': [dump(answer) for answer in attempt.answers],
      }
      for member, attempts in self._members.items()
      for number, attempt in attempts.items()
    ]

  def restore(self, state: list[dict[str, Any]]) -> None:
    """Takes what `state` returned."""
    for stated in state:
      attempt = self.attempt(stated['session'], stated['replica'])
      attempt.answers = [parse_answer(answer) for answer in stated['answers']]


def parse(session: str) -> tuple[Member, int]:
  """Returns the member and the attempt's number of a session's name."""
  group, member, number = map(int, session.split('/'))
  return Member(group, member), number


def dump(answer: Answer) -> dict[str, Any]:
  """Returns an answer as JSON values and numpy arrays."""
  if isinstance(answer, SamplerError):
    return {'error': str(answer)}
  return {
    'tokens': answer.tokens,
    'logps': answer.logps,
    'offsets': answer.candidates.offsets,
    'ids': answer.candidates.ids,
    'candidate_logps': answer.candidates.logps,
    'full_support': answer.full_support,
    'finish': answer.finish.value,
    'spans': [dataclasses.astuple(span) for span in answer.spans],
    'routes': None if answer.routes is None else [answer.routes.start, answer.routes.ids],
  }


def parse_answer(stated: Mapping[str, Any]) -> Answer:
  """The inverse of `dump`."""
  if 'error' in stated:
    return SamplerError(stated['error'])
  return TurnSample(
    tokens=stated['tokens'],
    logps=stated['logps'],
    candidates=Candidates(stated['offsets'], stated['ids'], stated['candidate_logps']),
    full_support=stated['full_support'],
    finish=FinishReason(stated['finish']),
    spans=tuple(VersionSpan(*span) for span in stated['spans']),
    routes=None if stated['routes'] is None else Routes(*stated['routes']),
  )
