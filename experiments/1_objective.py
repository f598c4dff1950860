# %% [markdown]
"""
# The objective at one prefix

A sampler draws a token from q; the trainer's distribution is p. This notebook follows one position
through every correction, with `mimo.objectives.policy_loss` itself, and checks each number against
a float64 sum over the vocabulary. `docs/objective.md` has the derivation. Seconds on a CPU.
"""

# %%
import jax
import jax.numpy as jnp
import lesson
import numpy as np

from mimo.objectives import Correction, arm, policy_loss

# %% [markdown]
# ## Two distributions
#
# Since the sampler's weights were published the trainer has moved on. It likes token 2 nine times
# more than the sampler does, and token 4 a quarter as much.

# %%
TRAINER = np.array([0.30, 0.22, 0.18, 0.10, 0.06, 0.05, 0.04, 0.03, 0.015, 0.005])
SAMPLER = np.array([0.28, 0.20, 0.02, 0.13, 0.24, 0.05, 0.035, 0.025, 0.012, 0.008])
TOKENS = np.arange(len(TRAINER))
GOOD = 3  # the token that earns the reward

SAME = np.ones(len(TRAINER))  # an advantage that does not depend on the token
REWARD = (TOKENS == GOOD) - SAMPLER[GOOD]  # one that does, less its mean over the draws

lesson.table(
  ['token', 'trainer p', 'sampler q', 'ratio p / q'],
  [[int(v), float(TRAINER[v]), float(SAMPLER[v]), float(TRAINER[v] / SAMPLER[v])] for v in TOKENS],
)

# %% [markdown]
# ## The push on each logit
#
# One gradient step moves the logits by what the loss pushes on average over the sampler's draws:
# the negative gradient of each token's loss, weighted by q. What the sampler cannot draw is masked,
# and with `head` only so many candidates are recorded: ids of -1 hold nothing.


# %%
def push(q: np.ndarray, adv: np.ndarray, correction: Correction, head: int = 0) -> np.ndarray:
  """Returns the expected push on each logit, [V], out of `policy_loss`."""
  size = len(q)
  recorded = np.argsort(np.argsort(-q)) < head if head else q > 0
  logq = jnp.log(jnp.asarray(q, jnp.float32))

  def loss(logits: jax.Array) -> jax.Array:
    logp = jax.nn.log_softmax(logits)
    return policy_loss(
      logp_trainer=logp,
      logp_trainer_candidates=jnp.tile(logp, (size, 1)),
      logp_sampler=logq,
      logp_sampler_candidates=jnp.tile(logq, (size, 1)),
      candidate_ids=jnp.tile(np.where(recorded, TOKENS, -1), (size, 1)),
      full_support=jnp.full(size, not head),
      adv=jnp.asarray(adv * q, jnp.float32),
      mask=jnp.asarray(q > 0),
      correction=correction,
      denominator=1.0,
    )[0]

  return -np.asarray(jax.grad(loss)(jnp.log(TRAINER).astype(jnp.float32)))


# %% [markdown]
# The same from the formulas, in float64, token by token and with no shortcut:
#
#     g(a) = A(a) ( f(r_a) s_a  -  sum_v q(v) f(r_v) s_v ),   r = p / q
#
# where s_v, the score of token v in the logits, is the unit vector of v minus p. With replay, p is
# first renormalised over what the sampler can draw, and the logits outside do not move.


# %%
def weight(ratio: np.ndarray, correction: Correction) -> np.ndarray:
  """Returns f(r)."""
  if correction.importance == 'masked':
    return np.where((ratio >= correction.low) & (ratio <= correction.high), ratio, 0.0)
  return np.minimum(ratio, correction.high) if correction.importance == 'truncated' else ratio**0


def enumerated(
  q: np.ndarray, adv: np.ndarray, correction: Correction, p: np.ndarray = TRAINER
) -> np.ndarray:
  """Returns the expected push on each logit, [V], by the definition."""
  inside = q > 0
  if correction.replay:
    p = np.where(inside, p, 0.0) / p[inside].sum()
  scores = np.eye(len(p)) - p  # row v: the score of token v
  f = np.where(inside, weight(p / np.where(inside, q, 1.0), correction), 0.0)
  mean = (q * f) @ scores if correction.center else np.zeros(len(p))
  return (q * adv) @ (f[:, None] * scores - mean)


NUCLEUS = np.where(np.argsort(np.argsort(-SAMPLER)) < 7, SAMPLER, 0.0)
NUCLEUS /= NUCLEUS.sum()

COLUMNS = {
  'on policy': (TRAINER, 'grpo'),
  'stale, no correction': (SAMPLER, 'grpo'),
  'MIS': (SAMPLER, 'mis'),
  'SC': (SAMPLER, 'sc'),
  'SC + MIS': (SAMPLER, 'sc_mis'),
  'SC + MIS + top-p replay': (NUCLEUS, 'sc_mis_topp'),
}
figure = lesson.new_figure(2, len(COLUMNS), width=2.2, height=2.2)
axes = figure.subplots(2, len(COLUMNS), sharex=True, sharey='row')
worst = 0.0
for row, (label, adv) in enumerate({'same advantage': SAME, 'token 3 is good': REWARD}.items()):
  for axis, (title, (q, name)) in zip(axes[row], COLUMNS.items(), strict=True):
    ours = push(q, adv, arm(name).correction)
    right = enumerated(q, adv, arm(name).correction)
    worst = max(worst, float(np.abs(ours - right).max()))
    axis.bar(TOKENS, ours)
    axis.plot(enumerated(TRAINER, adv, arm('grpo').correction), '_', color='black', markersize=9)
    axis.set_title(title, fontsize=9)
  axes[row, 0].set_ylabel(f'{label}\npush on the logit')
lesson.show(figure, 'push')
print(f'largest difference from the float64 enumeration: {worst:.1e}')
assert worst < 1e-6

# %% [markdown]
# The bars are what is pushed, the black marks what would be pushed on policy. In the upper row
# there is nothing to learn: the advantage is the same whatever is drawn. Every push there is
# *drift*.
#
# ## Drift, with and without centering

# %%
NAMES = ('grpo', 'tis', 'mis', 'sc', 'sc_tis', 'sc_mis')
drifts = {name: float(np.linalg.norm(push(SAMPLER, SAME, arm(name).correction))) for name in NAMES}
lesson.table(['arm', 'norm of the drift'], list(drifts.items()))
assert max(drifts[name] for name in NAMES if name.startswith('sc')) < 1e-6

# %% [markdown]
# An advantage is a trajectory's: at one prefix its mean over the draws may be anything, since so
# much was decided before. That mean times the drift is added to what should be learned. So without
# centering the error of the push depends on it, and may be anything from a lucky cancellation to
# more than the push itself; with centering it is what the weights leave.

# %%
MEANS = np.linspace(-1, 1, 41)
target = enumerated(TRAINER, REWARD, arm('grpo').correction)
figure = lesson.new_figure(1, 1, width=6)
axis = figure.subplots()
for name in NAMES:
  errors = [enumerated(SAMPLER, REWARD + mean, arm(name).correction) - target for mean in MEANS]
  axis.plot(MEANS, np.linalg.norm(errors, axis=1), label=name)
axis.set_xlabel('mean advantage at this prefix')
axis.set_ylabel('norm of the error of the push')
axis.legend()
lesson.show(figure, 'error')

# %% [markdown]
# Over many steps drift adds up. Here they are taken, with nothing to learn and a sampler that stays
# as it is. Centred policies stay where they began; of the others, see where they go with each sign.


# %%
def walk(name: str, adv: np.ndarray, steps: int = 200, rate: float = 0.3) -> list[float]:
  """Returns KL(p_0 || p_t) in nats after each step of plain ascent."""
  p, out = TRAINER, []
  for _ in range(steps):
    p = p * np.exp(rate * enumerated(SAMPLER, adv, arm(name).correction, p))
    p /= p.sum()
    out.append(float(TRAINER @ np.log(TRAINER / p)))
  return out


figure = lesson.new_figure(1, 2)
for axis, sign in zip(figure.subplots(1, 2, sharey=True), (1, -1), strict=True):
  for name in NAMES:
    axis.plot(np.maximum(walk(name, sign * SAME), 1e-9), label=name)
  axis.set_title(f'advantage {sign:+d} whatever is drawn')
  axis.set_xlabel('steps')
  axis.set_yscale('log')
axis.legend()
figure.axes[0].set_ylabel('nats from where p began')
lesson.show(figure, 'walk')

# %% [markdown]
# ## The range of MIS
#
# A wide range keeps more tokens, and with them more of the right push; it also lets larger ratios
# in, and one of them can be an update by itself. The range also decides how much drift is left
# without centering: none where nothing is cut, and none where everything is.

# %%
WIDTHS = np.geomspace(1.05, 20, 60)
measured = []
for width in WIDTHS:
  plain, centred = (
    Correction(importance='masked', low=1 / width, high=width, center=center)
    for center in (False, True)
  )
  f = weight(TRAINER / SAMPLER, plain)
  measured.append(
    [
      SAMPLER[f == 0].sum(),
      np.linalg.norm(enumerated(SAMPLER, SAME, plain)),
      np.linalg.norm(enumerated(SAMPLER, SAME, centred)),
      SAMPLER @ f**2,
    ]
  )
figure = lesson.new_figure(1, 3, width=3.6)
masked, drift, left, square = np.array(measured).T
for axis, (label, lines) in zip(
  figure.subplots(1, 3),
  {
    'share of draws masked': {'': masked},
    'drift': {'MIS': drift, 'SC + MIS': left},
    'mean squared weight': {'': square},
  }.items(),
  strict=True,
):
  for name, values in lines.items():
    axis.plot(WIDTHS, values, label=name)
  axis.set_xscale('log')
  axis.set_xlabel('range [1/x, x]')
  axis.set_ylabel(label)
figure.axes[1].legend()
lesson.show(figure, 'range')

middle = Correction(importance='masked', low=0.4, high=2.5)
np.testing.assert_allclose(
  push(SAMPLER, SAME, middle), enumerated(SAMPLER, SAME, middle), atol=1e-6
)

# %% [markdown]
# ## A head instead of a vocabulary
#
# A sampler records its K most likely tokens, not all 150,000. The rest is taken as the trainer's,
# rescaled: q(v) = rho p(v). The loss folds that tail into the head; here it is summed out, to see
# that the fold is exact, and the drift that the model of the tail leaves is drawn over K.
#
# With MIS that drift is token 2's, which is masked: until it is recorded, the model of the tail
# knows nothing of its ratio of 9.


# %%
def enumerated_head(q: np.ndarray, adv: np.ndarray, correction: Correction, k: int) -> np.ndarray:
  """Returns the expected push, [V], with q's tail modelled and summed token by token."""
  scores = np.eye(len(TRAINER)) - TRAINER
  head = np.isin(TOKENS, np.argsort(-q)[:k])
  rho = q[~head].sum() / TRAINER[~head].sum()
  model = np.where(head, q, rho * TRAINER)
  mean = (model * weight(TRAINER / model, correction)) @ scores
  return (q * adv) @ (weight(TRAINER / q, correction)[:, None] * scores - mean)


heads = range(1, len(TRAINER) - 1)
figure = lesson.new_figure(1, 1)
axis = figure.subplots()
for name in ('sc', 'sc_mis'):
  correction = arm(name).correction
  pushes = [push(SAMPLER, SAME, correction, k) for k in heads]
  for k, ours in zip(heads, pushes, strict=True):
    np.testing.assert_allclose(ours, enumerated_head(SAMPLER, SAME, correction, k), atol=1e-6)
  axis.plot(heads, [np.linalg.norm(ours) for ours in pushes], marker='o', label=name)
axis.axhline(np.linalg.norm(push(SAMPLER, SAME, arm('grpo').correction)), ls='--', label='grpo')
axis.set_xlabel('recorded candidates K')
axis.set_ylabel('drift')
axis.legend()
lesson.show(figure, 'head')

# %% [markdown]
# ## Top-p replay
#
# This sampler draws from its seven most likely tokens only. Outside them q is 0, so the trainer's
# mass there makes every ratio inside too small: their mean under q, sum_v q(v) p(v) / q(v), is what
# p keeps inside. Replay renormalises p over the same seven: the mean is 1, and centering is exact.

# %%
inside = NUCLEUS > 0
kept = TRAINER[inside].sum()
lesson.table(
  ['', 'mean ratio under q', 'push outside the nucleus'],
  [
    [
      label,
      float(p[inside].sum()),
      float(np.abs(push(NUCLEUS, REWARD, arm(name).correction)[~inside]).sum()),
    ]
    for label, name, p in (
      ('as it is', 'sc_mis', TRAINER),
      ('replayed', 'sc_mis_topp', TRAINER / kept),
    )
  ],
)
