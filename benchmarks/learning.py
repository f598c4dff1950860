"""What a run learns, over seeds: held-out pass@k before and after, and what each run took.

    python -m benchmarks.learning [--config=configs/mixed.py] [--seeds=5] [--workdir=runs/learning]

Runs the training command once a seed, one after another, and prints a table. A seed whose run is
already complete in the work directory is not run again. Wall time and peak memory are the training
process's own, installation left out; a run that an earlier call began shows a dash.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np

from mimo.telemetry import writers

_SPLITS = ('heldout', 'hard')


def evaluations(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a run's evaluations, in order of updates."""
  records = writers.read(workdir / 'metrics.jsonl')
  return [record for record in records if 'eval/heldout/pass@1' in record]


def complete(workdir: pathlib.Path) -> bool:
  """Returns whether a run reached its last update and evaluated it."""
  if not (workdir / 'config.json').exists():
    return False
  updates = json.loads((workdir / 'config.json').read_text(encoding='utf-8'))['updates']
  return any(record['step'] == updates for record in evaluations(workdir))


def run(config: str, seed: int, workdir: pathlib.Path) -> float | None:
  """Trains one seed. Returns its wall time in seconds, or None where it was already complete."""
  if complete(workdir):
    return None
  begin = time.perf_counter()
  command = [sys.executable, '-m', 'mimo.experiments.train', f'--config={config}']
  subprocess.run([*command, f'--config.seed={seed}', f'--workdir={workdir}'], check=True)
  return time.perf_counter() - begin


def row(seed: int, records: list[dict[str, Any]], secs: float | None) -> str:
  """Returns one line of the table: the first evaluation and the last."""
  first, last = records[0], records[-1]
  cells = [str(seed), str(last['step'])]
  for split in _SPLITS:
    before, after = (record[f'eval/{split}/pass@1'] for record in (first, last))
    cells += [f'{before:.3f}', f'{after:.3f}', f'{after - before:+.3f}']
  cells += [f'{record["eval/heldout/pass@4"]:.3f}' for record in (first, last)]
  return '| ' + ' | '.join([*cells, '-' if secs is None else f'{secs:.0f} s']) + ' |'


def main() -> None:
  """Reads the flags, runs and prints."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--config', default='configs/mixed.py')
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--workdir', default='runs/learning')
  given = parser.parse_args()
  header = ['seed', 'updates']
  header += [f'{split} pass@1 {when}' for split in _SPLITS for when in ('base', 'after', 'gain')]
  header += ['heldout pass@4 base', 'after', 'time']
  lines, gains = ['| ' + ' | '.join(header) + ' |', '|---' * len(header) + '|'], []
  for seed in range(given.seeds):
    workdir = pathlib.Path(given.workdir) / f'seed{seed}'
    secs = run(given.config, seed, workdir)
    records = evaluations(workdir)
    lines.append(row(seed, records, secs))
    gains.append(records[-1]['eval/heldout/pass@1'] - records[0]['eval/heldout/pass@1'])
  peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
  print('\n'.join(lines))
  spread = np.std(gains, ddof=1) if len(gains) > 1 else float('nan')
  print(
    f'mean gain {np.mean(gains):+.3f}, standard deviation {spread:.3f}, least {min(gains):+.3f}'
  )
  print(f'peak resident memory of a run: {peak / 2**30:.2f} GiB')


if __name__ == '__main__':
  main()
