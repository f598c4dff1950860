"""A float64 enumeration of the objective over the whole vocabulary, and rows to try it on.

The enumeration shares nothing with mimo.objectives but the floors of the tail masses: it sums over
every token, the tail included, with scores written out as vectors.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mimo.objectives import policy_loss

FLOOR = 1e-6
SIZE, WIDTH = 48, 56  # V, and K: more than any support
BATCH = 256  # rows per call: one shape, so one trace per correction


@dataclasses.dataclass
class Row:
  """One position. `logits` are the trainer's; `ids` and `logq` the sampler's record."""

  logits: np.ndarray  # [V] float32
  ids: np.ndarray  # [K] int32
  logq: np.ndarray  # [K] float32
  full: bool
  token: int
  logq_token: np.float32
  adv: np.float32


def log_softmax(x):
  x = np.asarray(x, np.float64)
  top = x.max(-1, keepdims=True)
  return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def f(ratio, correction):
  if correction.importance == 'none':
    return np.ones_like(ratio)
  if correction.importance == 'truncated':
    return np.minimum(ratio, correction.high)
  return np.where((correction.low <= ratio) & (ratio <= correction.high), ratio, 0.0)


def tails(row):
  """Masses outside the candidates under the sampler and the trainer, float64, unfloored."""
  kept = row.ids[row.ids >= 0]
  p = np.exp(log_softmax(row.logits))
  q = np.exp(row.logq.astype(np.float64))[row.ids >= 0]
  return 1 - q.sum(), 1 - p[kept].sum()


def tail_ratio(row):
  """rho of a row, floors included; 1 where its candidates are the whole support."""
  if row.full and (row.ids >= 0).any():
    return 1.0
  sampler, trainer = tails(row)
  return max(sampler, FLOOR) / max(trainer, FLOOR)


def enumerate_row(row, correction):
  """Returns (loss, gradient of the loss with respect to the logits [V]), float64."""
  size = len(row.logits)
  logp = log_softmax(row.logits)
  scores = np.eye(size) - np.exp(logp)
  kept = row.ids[row.ids >= 0]
  full = row.full and len(kept) > 0
  if correction.replay and full:
    logp_kept = log_softmax(row.logits[kept])
    logp = np.full(size, -np.inf)
    logp[kept] = logp_kept
    scores = np.eye(size) - np.exp(logp)
  p = np.exp(logp)
  w = f(np.exp(logp[row.token] - np.float64(row.logq_token)), correction)
  score = w * scores[row.token]
  value = w * logp[row.token] if w else 0.0
  if correction.center:
    q = np.zeros(size) if full else tail_ratio(row) * p
    q[kept] = np.exp(row.logq.astype(np.float64))[row.ids >= 0]
    for v in np.flatnonzero(q):
      w_v = f(p[v] / q[v], correction)
      score = score - q[v] * w_v * scores[v]
      value -= q[v] * w_v * logp[v] if w_v else 0.0
  return -row.adv * value, -row.adv * score


@functools.partial(jax.jit, static_argnames='correction')
def _row_losses(logits, args, correction):
  def one(logits, row):
    logp = jax.nn.log_softmax(logits)
    return policy_loss(
      logp_trainer=logp[row['token']],
      # Ids of -1 read the last token here: the loss must not care.
      logp_trainer_candidates=logp[row['candidate_ids']],
      mask=jnp.array(True),
      correction=correction,
      denominator=1.0,
      **{name: value for name, value in row.items() if name != 'token'},
    )

  (loss, aux), grads = jax.vmap(jax.value_and_grad(one, has_aux=True))(logits, args)
  return loss, grads, aux


def evaluate_rows(rows, correction):
  """Returns (loss [R], gradients in the logits [R, V], aux [R]) of policy_loss, row by row."""
  count, rows = len(rows), list(rows) + [rows[0]] * (BATCH - len(rows))
  logits = np.stack([row.logits for row in rows])
  args = {
    'token': np.array([row.token for row in rows], np.int32),
    'logp_sampler': np.array([row.logq_token for row in rows], np.float32),
    'logp_sampler_candidates': np.stack([row.logq for row in rows]),
    'candidate_ids': np.stack([row.ids for row in rows]),
    'full_support': np.array([row.full for row in rows]),
    'adv': np.array([row.adv for row in rows], np.float32),
  }
  out = _row_losses(logits, args, correction=correction)
  return jax.tree.map(lambda x: np.asarray(x)[:count], out)


def make_row(rng, size, width, *, kind, head=None, scale=2.0, gap=0.5):
  """Draws a row of one kind.

  Args:
    rng: numpy generator.
    size: V.
    width: K.
    kind: 'head' (the `head` most likely of a full-vocabulary sampler), 'nucleus' (`head` tokens
      that are the whole support), 'cut' (a nucleus of which only some is recorded).
    head: how many candidates.
    scale: standard deviation of the trainer's logits.
    gap: standard deviation of the sampler's logits around them.
  """
  logits = rng.normal(0, scale, size).astype(np.float32)
  logq = log_softmax(logits + rng.normal(0, gap, size))
  order = np.argsort(-logq)
  head = head or int(rng.integers(1, min(size, width) + 1))
  if kind != 'head':
    support = order[: head if kind == 'nucleus' else min(size, head + 3)]
    cut = np.full(size, -np.inf)
    cut[support] = log_softmax(logq[support])
    logq = cut
  token = int(rng.choice(size, p=np.exp(logq) / np.exp(logq).sum()))
  kept = rng.permutation(order[:head])
  ids = np.full(width, -1, np.int32)
  record = np.full(width, np.nan, np.float32)
  at = rng.permutation(width)[:head]
  ids[at] = kept
  record[at] = logq[kept]
  adv = np.float32(rng.normal())
  return Row(logits, ids, record, kind == 'nucleus', token, np.float32(logq[token]), adv)


def _ordinary(rng, size, width):
  rows = [make_row(rng, size, width, kind='head', head=h) for h in range(1, size + 1)]
  rows += [make_row(rng, size, width, kind='nucleus', head=h) for h in range(1, size + 1)]
  rows += [make_row(rng, size, width, kind='cut') for _ in range(8)]
  return rows


def _extreme(rng, size, width):
  """Ratios far outside the range, near-zero tails, ties, empty and one-token records."""
  rows = []
  for kind in ('head', 'nucleus', 'cut'):
    for scale, gap in ((0.1, 4.0), (12.0, 0.3), (12.0, 12.0), (30.0, 1.0), (2.0, 0.0)):
      rows += [make_row(rng, size, width, kind=kind, scale=scale, gap=gap) for _ in range(6)]
    tied = make_row(rng, size, width, kind=kind)
    tied.logits = np.round(tied.logits)
    rows.append(tied)
  for offset in (100.0, -100.0):  # log-ratios of about +-100 at the sampled token and its candidate
    for kind in ('head', 'nucleus'):
      row = make_row(rng, size, width, kind=kind, head=9)
      row.token = int(row.ids[row.ids >= 0][0])
      row.logits[row.token] += offset
      row.logq_token = row.logq[row.ids == row.token][0]
      if offset > 0:  # a sampler that all but excludes what the trainer is sure of
        row.logq_token = np.float32(row.logq_token - 100)
        row.logq[row.ids == row.token] -= 100
      rows.append(row)
  for mass in (1e-12, 0.0):  # tails of next to nothing, on either side
    row = make_row(rng, size, width, kind='head', head=6)
    row.logq[row.ids >= 0] = np.log(np.full(6, (1 - mass) / 6))
    rows.append(row)
    row = make_row(rng, size, width, kind='head', head=6)
    outside = np.setdiff1d(np.arange(size), row.ids)
    row.logits[outside] = row.logits.max() + (-200 if mass == 0 else np.log(mass))
    rows.append(row)
  over = make_row(rng, size, width, kind='head', head=12)  # masses of 1 + 1e-6
  over.logq[over.ids >= 0] = log_softmax(over.logq[over.ids >= 0]) + 1e-6
  empty = make_row(rng, size, width, kind='nucleus', head=4)
  empty.ids[:] = -1
  rounded = make_row(rng, size, width, kind='nucleus', head=20)
  rounded.logq = rounded.logq.astype(ml_dtypes.bfloat16).astype(np.float32)
  rounded.logq_token = rounded.logq[rounded.ids == rounded.token][0]
  return [*rows, over, empty, rounded]


@pytest.fixture(scope='session')
def enumeration():
  return enumerate_row


@pytest.fixture(scope='session')
def rho_of():
  return tail_ratio


@pytest.fixture(scope='session')
def tails_of():
  return tails


@pytest.fixture(scope='session')
def evaluate():
  return evaluate_rows


@pytest.fixture(scope='session')
def row_type():
  return Row


@pytest.fixture(scope='session')
def rows():
  """Ordinary positions, then extreme ones."""
  ordinary = _ordinary(np.random.default_rng(0), SIZE, WIDTH)
  return ordinary + _extreme(np.random.default_rng(1), SIZE, WIDTH)
