"""From what vLLM returns of a turn to what a sample carries.

vLLM's flat log-probs hold, per drawn token, the token itself and then the n most likely ones, the
drawn one among them again, and ids outside the kept set at -inf (its HTTP forms write -9999). Here
ids become distinct, excluded ones are left out, and a support counts as whole only where n told
that nothing more of it exists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mimo.types import ROUTE_DTYPE, Candidates, FinishReason, Routes, TurnSample, VersionSpan

# A recorded support whose mass misses 1 by more than this is no support.
SUPPORT_TOLERANCE = 1e-3

# Log-probs from here down are vLLM's way to say that an id is excluded.
EXCLUDED = -9000.0


class RecordError(ValueError):
  """What vLLM returned contradicts itself: it must not be trained on."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FlatRecord:
  """A finished turn as vLLM has it.

  Attributes:
    tokens: [S] int32.
    ids: [S, 1 + n] int32: the drawn token, then the n most likely in falling order.
    logps: [S, 1 + n] float32.
    finish: why it ended.
    spans: (version, start, end), in order.
    kept: per token, the ids of the kept set as the engine's sampling mask has them; None where it
      gives none.
    routes: the experts that tokens were sent to, where they were asked for.
  """

  tokens: np.ndarray
  ids: np.ndarray
  logps: np.ndarray
  finish: FinishReason
  spans: Sequence[tuple[int, int, int]]
  kept: Sequence[Sequence[int]] | None = None
  routes: Routes | None = None


def requested_logprobs(candidates: int, vocab_size: int) -> int:
  """Returns n, how many of the most likely tokens to ask vLLM for.

  One more than the cap: where it is excluded, the cap cut nothing.
  """
  return min(candidates + 1, vocab_size)


def turn_sample(record: FlatRecord, *, candidates: int) -> TurnSample:
  """Returns the sample of a turn.

  Args:
    record: with the n that `requested_logprobs` says.
    candidates: the cap K.

  Raises:
    RecordError: the drawn token is not the record's or not drawn from q, a log-prob is NaN or
      above 0, or the sampling mask and the candidates disagree.
  """
  num_tokens = len(record.tokens)
  if record.ids.shape != record.logps.shape or len(record.ids) != num_tokens:
    raise RecordError(f'{num_tokens} tokens with log-probs of {record.logps.shape}')
  drawn, logps = record.ids[:, 0], record.logps[:, 0]
  if not np.array_equal(drawn, record.tokens):
    raise RecordError('the log-probs are those of other tokens than the drawn ones')
  if np.isnan(record.logps).any() or (record.logps > 1e-4).any():
    raise RecordError('a log-prob is NaN or above 0')
  if (logps <= EXCLUDED).any():
    raise RecordError('a drawn token has probability 0')

  present = record.logps[:, 1:] > EXCLUDED
  recorded = present.copy()
  recorded[:, candidates:] = False
  top_ids, top_logps = record.ids[:, 1:], record.logps[:, 1:]
  mass = np.where(recorded, np.exp(top_logps.astype(np.float64)), 0.0).sum(axis=1)
  holds = (recorded & (top_ids == drawn[:, None])).any(axis=1)
  whole = present.sum(axis=1) == recorded.sum(axis=1)
  full_support = whole & holds & (np.abs(mass - 1.0) < SUPPORT_TOLERANCE)
  if record.kept is not None:
    _check_mask(record.kept, top_ids, recorded, full_support)
  offsets = np.zeros(num_tokens + 1, np.int64)
  np.cumsum(recorded.sum(axis=1), out=offsets[1:])
  return TurnSample(
    tokens=record.tokens,
    logps=logps,
    candidates=Candidates(offsets, top_ids[recorded], top_logps[recorded]),
    full_support=full_support,
    finish=record.finish,
    spans=tuple(VersionSpan(start, end, version) for version, start, end in record.spans),
    routes=record.routes,
  )


def told_routes(ids: np.ndarray | None, *, start: int, end: int) -> Routes:
  """Returns the routes that vLLM told of tokens `[start, end)`, of whatever dtype it has them in.

  Raises RecordError where it told none, or of other tokens.
  """
  if ids is None or ids.ndim != 3 or len(ids) != end - start:
    raise RecordError(
      f'routes {"are missing" if ids is None else f"have shape {ids.shape}"}; expected those of '
      f'tokens [{start}, {end})'
    )
  return Routes(start, ids.astype(ROUTE_DTYPE))


def _check_mask(
  kept: Sequence[Sequence[int]], ids: np.ndarray, recorded: np.ndarray, full_support: np.ndarray
) -> None:
  """Raises RecordError where the engine's kept set and the candidates disagree."""
  if len(kept) != len(ids):
    raise RecordError(f'a sampling mask of {len(kept)} tokens; expected {len(ids)}')
  for s, mask in enumerate(kept):
    of_mask, of_record = set(mask), set(ids[s][recorded[s]].tolist())
    if not of_record <= of_mask:
      raise RecordError(f'token {s}: candidates {sorted(of_record - of_mask)[:3]} are not kept')
    if full_support[s] != (of_record == of_mask):
      raise RecordError(
        f'token {s}: {len(of_record)} candidates of a kept set of {len(of_mask)}; expected '
        f'{"all" if full_support[s] else "fewer"}'
      )
