# %% [markdown]
"""
# One arm, trained live

A small policy learns to repair programs from three pools of samplers that serve bf16, fp8 and nvfp4
weights, some updates old. The run is the command of the README in a process of its own; this
notebook watches the file that it writes. On 2 cores, about 3 minutes to make the base policy and 4
to train it. Change `ARM` and run again: each arm has a directory of its own.
"""

# %%
import subprocess
import sys
import time

import lesson

from mimo.experiments import base_policy
from mimo.telemetry import figures, names, writers

ARM = 'sc_mis_topp'  # or grpo, mis, sc, sc_mis, ...: mimo.objectives.ARMS
UPDATES = 2 if lesson.SHORT else 120
WORKDIR = lesson.OUT / f'training-{ARM}'

# %% [markdown]
# ## The base policy
#
# 0.12M parameters, taught by demonstrations once and kept. The short form takes the larger one that
# ships with the task, and few prompts.

# %%
if lesson.SHORT:
  options = {
    'rollouts.prompts_per_update': 2,
    'rollouts.group_size': 4,
    'evaluation.samples': 1,
    'evaluation.every_updates': 0,
    'drift_every_updates': 0,
    'trainer.rows': 2,
    **{f'pools.{pool}.sessions': 8 for pool in ('a100_bf16', 'b200_nvfp4', 'h100_fp8')},
  }
else:
  policy = base_policy.make(lesson.OUT, lambda step, value: print(f'step {step}: loss {value:.3f}'))
  options = {'policy': policy}

# %% [markdown]
# ## The run
#
# `configs/ablation.py` is the configuration of the study: a simulated fleet, so that staleness is a
# result. Interrupting the cell stops the run, which saves; the cell then goes on from there.

# %%
command = [
  *(sys.executable, '-m', 'mimo.experiments.train'),
  f'--config=configs/ablation.py:mixed/{ARM}/usual',
  f'--workdir={WORKDIR}',
  f'--config.updates={UPDATES}',
  *(f'--config.{name}={value}' for name, value in options.items()),
]
print(' '.join(map(str, command)))


# %%
def read() -> figures.Series:
  """Returns what the run has measured so far."""
  return figures.to_series(writers.read(WORKDIR / 'metrics.jsonl'))


def redraw() -> None:
  """Draws pass@k on tasks that are never trained on, in place of what was drawn before."""
  figure = figures.pass_at_k(read())
  if figure is not None:
    lesson.show(figure, f'training-{ARM}', again=True)


WORKDIR.parent.mkdir(parents=True, exist_ok=True)
log = WORKDIR.with_suffix('.txt')
with log.open('a', encoding='utf-8') as output:
  process = subprocess.Popen(command, cwd=lesson.ROOT, stdout=output, stderr=subprocess.STDOUT)
  try:
    seen = -1
    while process.poll() is None:
      time.sleep(1)
      size = len(writers.read(WORKDIR / 'metrics.jsonl'))
      if size != seen:
        seen = size
        redraw()
  finally:
    process.terminate()
    process.wait()
if process.returncode:
  raise RuntimeError(log.read_text(encoding='utf-8')[-2000:])
redraw()

# %% [markdown]
# ## What the mismatch was
#
# By pool: how far its samples were from the trainer's policy, how many tokens MIS zeroed, how old
# the weights were that drew them.

# %%
for name, draw in {'kl': figures.kl, 'masked': figures.masked, 'rewards': figures.reward}.items():
  figure = draw(read())
  if figure is not None:
    lesson.show(figure, f'training-{ARM}-{name}')

# %%
series = read()
numbers = (names.KL, names.MASKED_SHARE, names.STALENESS.removeprefix('rollout/'), 'reward')
lesson.table(
  ['pool, mean over updates', *numbers],
  [
    [pool, *(float(series[names.of_source(pool, number)][1].mean()) for number in numbers)]
    for pool in names.sources(series)
  ],
)
steps, scores = series[names.of_eval('heldout', 'pass@1')]
print(f'held-out pass@1: {scores[0]:.3f} at the start, {scores[-1]:.3f} after {steps[-1]} updates')
print(f'report: {WORKDIR / "report.html"}')
