"""What a sampled turn must be before it may be trained on.

A violation is the sampler's failure, by name: the attempt is lost and never scored. Turns are
checked as they come, for what would mix up the streams; the streams of a whole episode are checked
once at its end, all rows at a time.
"""

from __future__ import annotations

import numpy as np

from mimo.samplers.base import SamplerError
from mimo.types import (
  ROUTE_DTYPE,
  Candidates,
  FinishReason,
  Routes,
  RouteShape,
  SamplingParams,
  TurnSample,
)

# Masses of a whole support sum to 1 within this; so do the records of one log-prob agree.
TOLERANCE = 1e-3
# vLLM's HTTP form lists ids outside the nucleus at this log-prob instead of leaving them out.
_EXCLUDED_LOGP = -9999.0


def check_turn(turn: TurnSample, params: SamplingParams) -> None:
  """Checks lengths, finish reason and version spans of one turn.

  Raises SamplerError naming what was got and what was expected.
  """
  num = len(turn.tokens)
  if not 1 <= num <= params.max_turn_tokens:
    raise SamplerError(f'a turn of {num} tokens; expected 1 to {params.max_turn_tokens}')
  lengths = {
    'logps': len(turn.logps),
    'candidates': len(turn.candidates),
    'full_support': len(turn.full_support),
  }
  for name, length in lengths.items():
    if length != num:
      raise SamplerError(f'{name} of {length} tokens; expected {num}, one per sampled token')
  stops = np.isin(turn.tokens, params.stop_ids)
  if stops[:-1].any():
    raise SamplerError('tokens follow a stop id; expected it to be the last of its turn')
  if stops[-1] != (turn.finish is FinishReason.STOP) and turn.finish is not FinishReason.ABORT:
    raise SamplerError(
      f'finish is {turn.finish.value!r} and the last token is {turn.tokens[-1]}; expected '
      "'stop' exactly where it is a stop id"
    )
  at = 0
  for span in turn.spans:
    if span.start != at or span.end <= span.start:
      raise SamplerError(
        f'span [{span.start}, {span.end}) follows {at}; expected no gap or overlap'
      )
    at = span.end
  if at != num:
    raise SamplerError(f'version spans cover {at} tokens; expected {num}')


def check_routes(routes: Routes | None, shape: RouteShape | None, *, start: int, end: int) -> None:
  """Checks what a turn tells of its tokens' routes.

  Args:
    routes: of the turn.
    shape: what the sampler states; None where it tells no routes.
    start: the first token that no earlier turn told of.
    end: the last token drawn, which was not run.

  Raises:
    SamplerError: there are none, or some where none are stated; they are of other tokens or of
      another shape; an expert is out of range, or occurs twice in a layer of a token.
  """
  if routes is None or shape is None:
    if routes is not None or shape is not None:
      raise SamplerError(
        f'routes are {"told" if routes is not None else "missing"}; expected '
        f'{"none" if shape is None else f"those of {shape}"}, as the sampler states'
      )
    return
  ids, stop = routes.ids, routes.start + len(routes.ids)
  if (routes.start, stop) != (start, end):
    raise SamplerError(
      f'routes of tokens [{routes.start}, {stop}); expected [{start}, {end}): those not told yet '
      'that were run'
    )
  if ids.dtype != ROUTE_DTYPE or ids.shape[1:] != (shape.layers, shape.per_token):
    raise SamplerError(
      f'routes are {ids.dtype} {list(ids.shape)}; expected {np.dtype(ROUTE_DTYPE)} '
      f'{[end - start, shape.layers, shape.per_token]}'
    )
  if not ids.size:
    return
  if ids.min() < -1 or ids.max() >= shape.experts:
    raise SamplerError(
      f'routes run from {ids.min()} to {ids.max()}; expected [0, {shape.experts}), or -1 where '
      'they are not known'
    )
  ordered = np.sort(ids, axis=-1)
  repeated = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
  partly = (ordered[..., 0] < 0) & (ordered[..., -1] >= 0)
  if repeated.any() or partly.any():
    where = np.argwhere(repeated.any(axis=-1) | partly)[0]
    raise SamplerError(
      f'token {start + where[0]} goes to experts {ids[*where].tolist()} in layer {where[1]}; '
      'expected distinct ones'
    )


def check_streams(
  tokens: np.ndarray,
  logps: np.ndarray,
  candidates: Candidates,
  full_support: np.ndarray,
  *,
  vocab_size: int,
  max_candidates: int,
) -> None:
  """Checks what was recorded of S sampled tokens.

  Args:
    tokens: [S] int32.
    logps: [S] float32.
    candidates: S rows.
    full_support: [S] bool.
    vocab_size: V.
    max_candidates: K.

  Raises:
    SamplerError: a token or candidate is out of range; a log-prob is not one of a token that can
      be drawn; a row is empty, over its cap, or repeats an id; the sampled token's log-prob
      differs from its candidate's; a whole support does not sum to 1 or lacks the sampled token.
  """
  num = len(tokens)
  if not num:
    return
  offsets, ids, row_logps = candidates.offsets, candidates.ids, candidates.logps
  counts = np.diff(offsets)
  if offsets[0] != 0 or offsets[-1] != len(ids) or len(ids) != len(row_logps):
    raise SamplerError(
      f'candidate offsets run from {offsets[0]} to {offsets[-1]} over {len(ids)} ids and '
      f'{len(row_logps)} log-probs; expected all of them once'
    )
  if counts.min() < 1 or counts.max() > max_candidates:
    raise SamplerError(
      f'{counts.min()} to {counts.max()} candidates a token; expected 1 to {max_candidates}'
    )
  for name, values in (('sampled', tokens), ('candidate', ids)):
    if values.min() < 0 or values.max() >= vocab_size:
      raise SamplerError(
        f'{name} ids run from {values.min()} to {values.max()}; expected [0, {vocab_size})'
      )
  for name, values in (('sampled', logps), ('candidate', row_logps)):
    low, high = float(values.min()), float(values.max())
    if not _EXCLUDED_LOGP < low <= high <= TOLERANCE:
      raise SamplerError(
        f'{name} log-probs run from {low} to {high}; expected finite ones of tokens with '
        'probability > 0'
      )
  rows = np.repeat(np.arange(num), counts)
  keys = np.sort(rows * np.int64(vocab_size) + ids)
  if (keys[1:] == keys[:-1]).any():
    raise SamplerError('a candidate id occurs twice in a row; expected distinct ids')
  hits = np.flatnonzero(ids == tokens[rows])
  gap = np.abs(row_logps[hits] - logps[rows[hits]])
  if gap.size and not gap.max() <= TOLERANCE:
    raise SamplerError(
      f"a sampled log-prob is {gap.max():.4g} nats off its candidate's; expected < {TOLERANCE}"
    )
  held = np.zeros(num, bool)
  held[rows[hits]] = True
  if (full_support & ~held).any():
    raise SamplerError('a whole support lacks the sampled id; expected it exactly once')
  mass = np.bincount(rows, weights=np.exp(row_logps, dtype=np.float64), minlength=num)
  if mass.max() > 1.0 + TOLERANCE:
    raise SamplerError(f'candidates hold a mass of {mass.max():.4f}; expected at most 1')
  whole = float(mass[full_support].min(initial=1.0))
  if whole <= 1.0 - TOLERANCE:
    raise SamplerError(
      f'a whole support holds a mass of {whole:.4f}; expected 1 within {TOLERANCE}'
    )
