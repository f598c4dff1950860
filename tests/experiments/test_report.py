"""`mimo report` draws again what a work directory holds."""

import json

from mimo.experiments import report


def _workdir(path, records):
  path.mkdir()
  stated = {'task': 'repair', 'arm': 'grpo', 'seed': 4, 'pools': {}}
  (path / 'config.json').write_text(json.dumps(stated))
  lines = [json.dumps({'step': step, 'rollout/reward': 0.25 * step}) for step in records]
  (path / 'metrics.jsonl').write_text(''.join(f'{line}\n' for line in lines))
  return path


def test_it_draws_each_directory(tmp_path, run_command):
  runs = [_workdir(tmp_path / name, [1, 2]) for name in ('a', 'b')]
  done = run_command(report.COMMAND, *map(str, runs))
  assert (done.returncode, done.stderr) == (0, '')
  assert done.stdout == ''.join(f'report: {run}/report.html\n' for run in runs)
  for run in runs:
    assert '<title>repair, grpo, seed 4</title>' in (run / 'report.html').read_text()


def test_what_is_no_run_is_named(tmp_path, run_command):
  empty = _workdir(tmp_path / 'empty', [])
  for arguments, code, words in [
    ([], 2, 'no directory is given; expected the work directory of a run'),
    ([str(tmp_path)], 1, f'{tmp_path} holds no config.json; expected the work directory of a run'),
    ([str(empty)], 1, f'{empty} holds no record; expected a run with an update or more'),
  ]:
    done = run_command(report.COMMAND, *arguments)
    assert (done.returncode, done.stdout) == (code, '')
    assert done.stderr == f'mimo report: {words}\n'
