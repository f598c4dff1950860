"""Trajectories of many lengths laid into rows of few shapes, on the host in numpy.

A row holds whole trajectories end to end, each its own segment: `segment_ids` count from 1 in a row
and `positions` restart at 0, so a packed neighbour is as absent as one in another row. The trained
tokens of a row are listed apart, [R, M], because the head and the objective only need those.

Shapes come from a few buckets. The update is traced once per bucket, so a batch never makes a new
shape: what is left over is padded.

Axis letters: R rows, L tokens of a row, M trained tokens of a row, K candidates, k experts that a
token is sent to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mimo.types import ROUTE_DTYPE, RouteShape, Trajectory


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bucket:
  """A shape of micro-batch: at most `tokens` and `trained` tokens in each of `rows` rows."""

  tokens: int
  trained: int
  rows: int

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value < 1:
        raise ValueError(f'bucket {field.name} is {value}; expected at least 1')


class MicroBatch(NamedTuple):
  """What one micro-step is given. numpy arrays until the trainer places them on devices.

  Attributes:
    tokens: [R, L] int32, 0 where there is padding.
    segment_ids: [R, L] int32, from 1 in each row; 0 is padding.
    positions: [R, L] int32, from 0 in each segment.
    predict: [R, M] int32, the index in the row whose hidden state predicts the trained token: the
      one just before it.
    targets: [R, M] int32, the trained token.
    mask: [R, M] bool, False where there is padding.
    logp_sampler: [R, M] float32, log q(a) in nats.
    candidate_ids: [R, M, K] int32, -1 where there is no candidate.
    candidate_logps: [R, M, K] float32, log q(v) in nats.
    full_support: [R, M] bool.
    adv: [R, M] float32.
    source: [R, M] int32, an index into the names that `pack` was given.
    routes: [R, L, layers, k] int16, the experts that the samplers sent a token to: those of the
      pass that the token at that index of the row enters. -1 where none are known. None where
      none are replayed.
  """

  tokens: Any
  segment_ids: Any
  positions: Any
  predict: Any
  targets: Any
  mask: Any
  logp_sampler: Any
  candidate_ids: Any
  candidate_logps: Any
  full_support: Any
  adv: Any
  source: Any
  routes: Any = None


class Placement(NamedTuple):
  """Where a trajectory lies: its first token and its first trained token in a row."""

  micro: int
  row: int
  token: int
  trained: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batch:
  """The micro-batches of one update, and what they hold.

  Attributes:
    micro: the micro-batches, each of some bucket's shape.
    placements: one per trajectory, in the order given; None where no token was sampled, so that
      there is nothing to train on and no room is taken.
    trained: masked-in tokens over all micro-batches: the loss's denominator.
    tokens: tokens that are not padding.
    capacity: tokens, padding included.
  """

  micro: tuple[MicroBatch, ...]
  placements: tuple[Placement | None, ...]
  trained: int
  tokens: int
  capacity: int

  @property
  def padding_share(self) -> float:
    return 1.0 - self.tokens / self.capacity if self.capacity else 0.0


@dataclasses.dataclass(slots=True)
class _Row:
  """A row being filled."""

  shape: tuple[int, int]  # (L, M)
  members: list[int] = dataclasses.field(default_factory=list)
  tokens: int = 0
  trained: int = 0

  def holds(self, tokens: int, trained: int) -> bool:
    return self.tokens + tokens <= self.shape[0] and self.trained + trained <= self.shape[1]

  def add(self, index: int, tokens: int, trained: int) -> None:
    self.members.append(index)
    self.tokens += tokens
    self.trained += trained


def pack(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float] | np.ndarray,
  *,
  buckets: Sequence[Bucket],
  num_candidates: int,
  sources: Sequence[str],
  temperature: float,
  routes: RouteShape | None = None,
) -> Batch:
  """Lays trajectories, one advantage each, into micro-batches.

  First-fit decreasing: the longest trajectory first (ties in the order given), into the first open
  row with room for its tokens and for its trained tokens, else into a new row of the smallest
  bucket that holds it. The result depends on nothing but the arguments. A trajectory whose
  advantage is 0 is packed like any other: its tokens count in the denominator.

  Args:
    trajectories: scored ones, all sampled at one temperature.
    advantages: [len(trajectories)].
    buckets: the shapes allowed. Several may share tokens and trained and differ in rows: as many of
      the largest as fill up, then the smallest that holds the rest.
    num_candidates: K.
    sources: pool names; `MicroBatch.source` indexes it.
    temperature: what the trainer divides its logits by.
    routes: of the model, where the samplers' are replayed; None packs none.

  Raises:
    ValueError: a trajectory is too long for every bucket, has more than K candidates at a token, is
      of an unknown pool or another temperature, is not scored, states another log-prob mode, has
      routes of another model, or has streams that do not fit together; an advantage is not finite;
      there are no buckets.
  """
  if not buckets:
    raise ValueError('no buckets; expected at least one')
  adv = np.asarray(advantages, np.float32)
  if adv.shape != (len(trajectories),):
    raise ValueError(f'advantages have shape {adv.shape}; expected ({len(trajectories)},)')
  if not np.isfinite(adv).all():
    raise ValueError(f'advantage {int(np.argmin(np.isfinite(adv)))} is not finite')
  for trajectory in trajectories:
    _check(trajectory, sources=sources, temperature=temperature, num_candidates=num_candidates)
    if routes is not None:
      _check_routes(trajectory, routes)
  micro: list[MicroBatch] = []
  placements: list[Placement | None] = [None] * len(trajectories)
  for bucket, rows in _cut(_fill(trajectories, buckets), buckets):
    batch = empty_micro_batch(bucket, num_candidates, routes)
    for r, row in enumerate(rows):
      at = Placement(len(micro), r, 0, 0)
      for segment, index in enumerate(row.members, start=1):
        placements[index] = at
        trajectory = trajectories[index]
        source = sources.index(trajectory.source.pool)
        at = _write(batch, at, trajectory, segment=segment, adv=float(adv[index]), source=source)
    micro.append(batch)
  return Batch(
    micro=tuple(micro),
    placements=tuple(placements),
    trained=sum(int(batch.mask.sum()) for batch in micro),
    tokens=sum(int((batch.segment_ids > 0).sum()) for batch in micro),
    capacity=sum(batch.tokens.size for batch in micro),
  )


def empty_micro_batch(
  bucket: Bucket, num_candidates: int, routes: RouteShape | None = None
) -> MicroBatch:
  """A micro-batch that is all padding; with `routes` of a shape, or without any."""
  row = (bucket.rows, bucket.tokens)
  trained = (bucket.rows, bucket.trained)
  ways = None
  if routes is not None:
    ways = np.full((*row, routes.layers, routes.per_token), -1, ROUTE_DTYPE)
  return MicroBatch(
    tokens=np.zeros(row, np.int32),
    segment_ids=np.zeros(row, np.int32),
    positions=np.zeros(row, np.int32),
    predict=np.zeros(trained, np.int32),
    targets=np.zeros(trained, np.int32),
    mask=np.zeros(trained, bool),
    logp_sampler=np.zeros(trained, np.float32),
    candidate_ids=np.full((*trained, num_candidates), -1, np.int32),
    candidate_logps=np.zeros((*trained, num_candidates), np.float32),
    full_support=np.zeros(trained, bool),
    adv=np.zeros(trained, np.float32),
    source=np.zeros(trained, np.int32),
    routes=ways,
  )


def _name(trajectory: Trajectory) -> str:
  return f'trajectory of group {trajectory.prompt.group}, member {trajectory.member}'


def _check(
  trajectory: Trajectory, *, sources: Sequence[str], temperature: float, num_candidates: int
) -> None:
  """Raises ValueError naming the trajectory, what was got and what was expected."""
  name = _name(trajectory)
  if trajectory.source.pool not in sources:
    raise ValueError(
      f'{name}: pool is {trajectory.source.pool!r}; expected one of {", ".join(sources)}'
    )
  if trajectory.sampling.temperature != temperature:
    raise ValueError(
      f'{name}: sampled at temperature {trajectory.sampling.temperature}; expected '
      f"{temperature}, the trainer's"
    )
  if trajectory.logprob_mode != 'processed':
    raise ValueError(f"{name}: log-prob mode is {trajectory.logprob_mode!r}; expected 'processed'")
  if not trajectory.end.scored:
    raise ValueError(f'{name}: ended as {trajectory.end.value}; expected a scored ending')
  if trajectory.sampled.shape != trajectory.tokens.shape:
    raise ValueError(
      f'{name}: sampled has shape {trajectory.sampled.shape}; expected '
      f'{trajectory.tokens.shape}, that of its tokens'
    )
  sampled = int(trajectory.sampled.sum())
  streams = {
    'logps': len(trajectory.logps),
    'candidates': len(trajectory.candidates),
    'full_support': len(trajectory.full_support),
  }
  for stream, length in streams.items():
    if length != sampled:
      raise ValueError(f'{name}: {length} {stream}; expected {sampled}, one per sampled token')
  if sampled and trajectory.sampled[0]:
    raise ValueError(f'{name}: its first token is sampled; expected a prompt before it')
  counts = np.diff(trajectory.candidates.offsets)
  if counts.size and counts.max() > num_candidates:
    raise ValueError(
      f'{name}: a token has {counts.max()} candidates; expected at most {num_candidates}'
    )


def _check_routes(trajectory: Trajectory, shape: RouteShape) -> None:
  """Raises ValueError naming a trajectory whose routes are not of this model."""
  ids = trajectory.routes
  if ids is None:
    return
  expected = (len(trajectory.tokens), shape.layers, shape.per_token)
  if ids.shape != expected:
    raise ValueError(
      f'{_name(trajectory)}: routes have shape {ids.shape}; expected {expected}: of each token, '
      'layers and experts per token'
    )
  if ids.size and ids.max() >= shape.experts:
    raise ValueError(
      f'{_name(trajectory)}: routes name expert {ids.max()}; expected less than {shape.experts}'
    )


def _fill(trajectories: Sequence[Trajectory], buckets: Sequence[Bucket]) -> list[_Row]:
  """First-fit decreasing. Trajectories without a sampled token are left out."""
  shapes = sorted({(bucket.tokens, bucket.trained) for bucket in buckets})
  sizes = [(len(trajectory.tokens), trajectory.num_sampled) for trajectory in trajectories]
  rows: list[_Row] = []
  for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i][0], i)):
    tokens, trained = sizes[index]
    if trained == 0:
      continue
    row = next((row for row in rows if row.holds(tokens, trained)), None)
    if row is None:
      shape = next((shape for shape in shapes if tokens <= shape[0] and trained <= shape[1]), None)
      if shape is None:
        raise ValueError(
          f'{_name(trajectories[index])}: {tokens} tokens, {trained} of them trained; expected at '
          f'most {shapes[-1][0]} and {shapes[-1][1]}, the largest bucket'
        )
      row = _Row(shape)
      rows.append(row)
    row.add(index, tokens, trained)
  return rows


def _cut(rows: Sequence[_Row], buckets: Sequence[Bucket]) -> list[tuple[Bucket, list[_Row]]]:
  """Groups rows of one shape into micro-batches, in the order they were opened."""
  result: list[tuple[Bucket, list[_Row]]] = []
  for shape in dict.fromkeys(row.shape for row in rows):
    left = [row for row in rows if row.shape == shape]
    fitting = sorted(bucket for bucket in buckets if (bucket.tokens, bucket.trained) == shape)
    while left:
      bucket = next((bucket for bucket in fitting if bucket.rows >= len(left)), fitting[-1])
      result.append((bucket, left[: bucket.rows]))
      left = left[bucket.rows :]
  return result


def _write(
  batch: MicroBatch,
  at: Placement,
  trajectory: Trajectory,
  *,
  segment: int,
  adv: float,
  source: int,
) -> Placement:
  """Writes the streams of one trajectory in place. Returns where the next one goes."""
  length, trained = len(trajectory.tokens), trajectory.num_sampled
  r, row = at.row, slice(at.token, at.token + length)
  batch.tokens[r, row] = trajectory.tokens
  batch.segment_ids[r, row] = segment
  batch.positions[r, row] = np.arange(length)
  if batch.routes is not None and trajectory.routes is not None:
    batch.routes[r, row] = trajectory.routes  # of a token's own pass: nothing is shifted
  span = slice(at.trained, at.trained + trained)
  sampled = np.flatnonzero(trajectory.sampled)
  batch.predict[r, span] = at.token + sampled - 1
  batch.targets[r, span] = trajectory.tokens[sampled]
  batch.mask[r, span] = True
  batch.logp_sampler[r, span] = trajectory.logps
  ids, logps = trajectory.candidates.dense(batch.candidate_ids.shape[-1])
  batch.candidate_ids[r, span] = ids
  batch.candidate_logps[r, span] = logps
  batch.full_support[r, span] = trajectory.full_support
  batch.adv[r, span] = adv
  batch.source[r, span] = source
  return at._replace(token=row.stop, trained=span.stop)
