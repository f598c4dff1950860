# %% [markdown]
"""
# The grid's results, redrawn

`mimo ablate --config=ablation` runs a grid of fleets, arms and seeds and keeps each finished cell
as CSV in `experiments/results`. This notebook loads whatever cells there are and draws them again,
in seconds: nothing is run. It starts from those of the commit `ff4595f`, which docs/study.md is
about.
"""

# %%
import runpy

import lesson
import numpy as np

from mimo.experiments import cells
from mimo.experiments.results import Kept, Results
from mimo.telemetry import study, study_data

# %% [markdown]
# ## Loading
#
# `cells.json` says what each file is of: its cell, the policy that its runs began from, and the
# values that differ from the defaults. Where a kind of cell has files of several configurations,
# the one of `configs/ablation.py` as it is now counts, else the one with the most rows: two
# configurations are never mixed in one curve.

# %%
stated = runpy.run_path(str(lesson.ROOT / 'configs' / 'ablation.py'))
results = Results(lesson.RESULTS)


def is_current(kept: Kept) -> bool:
  """Returns whether a file is of the configuration as it is now."""
  try:
    experiment = cells.resolve(stated['get_config'], cells.Cell(kept.kind, 0))
  except ValueError:  # a kind that it has no longer
    return False
  return results.find(kept.kind, experiment) == kept


found: dict[str, list[tuple[bool, int, Kept]]] = {}
for kept in results.kept:
  found.setdefault(kept.kind, []).append((is_current(kept), len(results.rows(kept)), kept))
points = []
for kind, files in found.items():
  current, count, kept = max(files, key=lambda file: file[:2])
  points += results.rows(kept)
  print(f'{kind}: {count} points' + ('' if current else f', of other values ({kept.file})'))
if not points:
  print(
    f'{lesson.RESULTS} holds no finished cell, so there is nothing to draw. To make some:\n'
    '  mimo ablate --config=ablation --grid=quick'
  )

# %% [markdown]
# ## The table
#
# Held-out scores at the end as mean ± standard error over seeds, how many runs collapsed (fell
# below the base policy less three standard errors, for good), and means over the run of what
# separates samplers from the trainer.

# %%
conditions = study_data.conditions(points)
floor = study_data.floor_of(points)
table = []
for condition, own in conditions.items():
  runs = study_data.runs(own)
  collapsed = sum(study_data.collapse(run, floor) is not None for run in runs.values())
  table.append(
    [
      condition,
      study_data.last(own, 'eval/heldout/pass@1').text(),
      study_data.last(own, 'eval/heldout/pass@4').text(),
      f'{collapsed} of {len(runs)}',
      study_data.whole(own, 'train/kl').text('.2e'),
      study_data.whole(own, 'train/masked_share').text(),
      study_data.whole(own, 'train/drift').text('.2f'),
    ]
  )
if points:
  lesson.table(['', 'pass@1', 'pass@4', 'collapsed', 'KL, nats', 'masked', 'drift'], table)
  print('the base policy: pass@1 {:.3f} ± {:.3f}'.format(*study_data.base(points)))

# %% [markdown]
# ## Every run
#
# A mean over seeds hides that one of them collapsed. A dot is one run: what it gained over the
# base.

# %%
if points:
  start, error = study_data.base(points)
  figure = lesson.new_figure(1, 1, width=7, height=1 + 0.25 * len(conditions))
  axis = figure.subplots()
  for row, own in enumerate(conditions.values()):
    gains = [
      run[-1][study_data.PASS_1] - start
      for run in study_data.runs(own).values()
      if study_data.PASS_1 in run[-1]
    ]
    axis.plot(gains, np.full(len(gains), row), 'o', color='C0', alpha=0.7)
  axis.axvspan(-error, error, color='#bbbbbb', alpha=0.5, label='the base ± standard error')
  axis.set_yticks(range(len(conditions)), [str(condition) for condition in conditions])
  axis.invert_yaxis()
  axis.set_xlabel('gain in held-out pass@1 at the end of the run')
  axis.legend()
  lesson.show(figure, 'grid-gains')

# %% [markdown]
# ## The report's figures
#
# Scores over updates, then each diagnostic that the cells measured, by fleet.

# %%
for name, (heading, figure) in study.draw(points).items():
  print(heading)
  lesson.show(figure, f'grid-{name}')
