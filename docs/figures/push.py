"""Draws docs/figures/push.svg: the expected push on each token's logit at one prefix.

    python docs/figures/push.py

Everything is computed by `mimo.objectives.policy_loss`: for each token that the sampler can draw,
the negative gradient of the loss with respect to the trainer's logits, weighted by q.
"""

from __future__ import annotations

import pathlib

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

matplotlib.use('Agg')
from matplotlib import pyplot as plt

from mimo.objectives import Correction, arm, policy_loss

OUT = pathlib.Path(__file__).with_name('push.svg')

# The trainer has moved on: it has come to like token 2 (9 times more than the sampler does) and to
# dislike token 4 (a quarter as much).
TRAINER = np.array([0.30, 0.22, 0.18, 0.10, 0.06, 0.05, 0.04, 0.03, 0.015, 0.005])
SAMPLER = np.array([0.28, 0.20, 0.02, 0.13, 0.24, 0.05, 0.035, 0.025, 0.01, 0.01])
NUCLEUS = 7  # the sampler's most likely tokens, when it draws from its nucleus
GOOD = 3  # the token that earns the reward

PUSH_COLOUR, REFERENCE_COLOUR = '#2f6f9f', '#222222'


def expected_push(sampler: np.ndarray, adv: np.ndarray, correction: Correction) -> np.ndarray:
  """Returns sum_a q(a) times the descent direction of a's loss, in the logits: [V]."""
  tokens = np.flatnonzero(sampler)
  ids = jnp.tile(tokens, (len(tokens), 1))

  def loss(logits: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits)
    return policy_loss(
      logp_trainer=logp[tokens],
      logp_trainer_candidates=logp[ids],
      logp_sampler=jnp.log(sampler[tokens]),
      logp_sampler_candidates=jnp.log(sampler[np.asarray(ids)]),
      candidate_ids=ids,
      full_support=jnp.ones(len(tokens), bool),
      adv=jnp.asarray(adv[tokens] * sampler[tokens], jnp.float32),
      mask=jnp.ones(len(tokens), bool),
      correction=correction,
      denominator=1.0,
    )[0]

  return -np.asarray(jax.grad(loss)(jnp.log(TRAINER).astype(jnp.float32)))


def main() -> None:
  """Computes and draws."""
  inside = np.where(np.argsort(np.argsort(-SAMPLER)) < NUCLEUS, SAMPLER, 0.0)
  columns = (
    ('on policy', TRAINER, 'grpo'),
    ('stale, no correction', SAMPLER, 'grpo'),
    ('MIS', SAMPLER, 'mis'),
    ('SC', SAMPLER, 'sc'),
    ('SC + MIS', SAMPLER, 'sc_mis'),
    ('SC + MIS + top-p replay', inside / inside.sum(), 'sc_mis_topp'),
  )
  good = (np.arange(len(TRAINER)) == GOOD).astype(float)
  rows = (
    ('same advantage for all:\nall push is drift', np.ones(len(TRAINER))),
    (f'token {GOOD} earns the reward', good - TRAINER[GOOD]),
  )
  plt.rcParams.update({'svg.hashsalt': 'mimo', 'svg.fonttype': 'none', 'font.size': 8})
  figure, axes = plt.subplots(2, len(columns), figsize=(12, 4), sharex=True, sharey='row')
  for r, (label, adv) in enumerate(rows):
    reference = expected_push(TRAINER, adv, arm('grpo').correction)
    for axis, (title, sampler, name) in zip(axes[r], columns, strict=True):
      push = expected_push(sampler, adv, arm(name).correction)
      axis.bar(np.arange(len(push)), push, color=PUSH_COLOUR)
      axis.plot(reference, '_', color=REFERENCE_COLOUR, markersize=9, label='on policy')
      axis.axhline(0, color='#999999', linewidth=0.6)
      axis.spines[['top', 'right']].set_visible(False)
      if r == 0:
        axis.set_title(title, fontsize=9)
      else:
        axis.set_xlabel('token')
        axis.set_xticks(np.arange(len(push)))
    axes[r, 0].set_ylabel(f'{label}\n\npush on the logit')
  axes[0, 0].legend(loc='lower left', frameon=False)
  figure.tight_layout()
  figure.savefig(OUT, metadata={'Date': None})


if __name__ == '__main__':
  main()
