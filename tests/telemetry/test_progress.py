import io
import math

from mimo.telemetry import progress

SCALARS = {
  'rollout/reward': 0.5,
  'rollout/pass@1': 0.25,
  'source/h100_fp8/kl': 1.24e-3,
  'source/a100_bf16/kl': 0.0,
  'train/masked_share': 0.0123,
  'rollout/staleness_mean_updates': 1.26,
  'speed/sampler_tokens_per_sec': 12345.6,
  'speed/trainer_tokens_per_sec': 9876.0,
  'cost/modelled_usd': 0.01234,
}


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_the_line_of_an_update():
  assert progress.update_line(7, 60, SCALARS) == (
    'update  7/60  reward 0.500  pass@1 0.250  KL a100_bf16 0.0e+00 h100_fp8 1.2e-03  '
    'masked 1.23%  stale 1.3  sampled 12346 tok/s  trained 9876 tok/s  modelled $0.0123'
  )


def test_what_was_not_measured_shows_as_a_dash():
  line = progress.update_line(1, 2, {'rollout/reward': math.nan, 'cost/modelled_usd': math.nan})
  assert 'reward -  pass@1 -  KL -  masked -%' in line and line.endswith('modelled $-')


def test_plain_stream_gets_lines_only():
  stream = io.StringIO()
  bar = progress.Progress(2, done=0, stream=stream)
  bar.update(1, SCALARS)
  bar.note('report: runs/x/report.html')
  bar.close()
  bar.close()
  assert stream.getvalue() == (
    progress.update_line(1, 2, SCALARS) + '\nreport: runs/x/report.html\n'
  )


def test_terminal_gets_a_bar_and_the_lines():
  stream = _Terminal()
  bar = progress.Progress(4, done=1, stream=stream)
  bar.update(2, SCALARS)
  bar.update(3, SCALARS)
  bar.close()
  text = stream.getvalue()
  assert progress.update_line(3, 4, SCALARS) in text
  assert '1/4' in text and '\r' in text


def test_evaluation_line():
  summary = {
    'heldout': {'tasks': 3, 'missing': 0, 'pass@1': 0.5, 'pass@1_error': 0.0125},
    'hard': {'tasks': 1, 'missing': 2, 'pass@1_low': 0.0, 'pass@1_high': 1.0},
  }
  assert progress.evaluation_line('update 20', summary) == (
    'evaluation of update 20  heldout: pass@1 0.500 ± 0.013  |  '
    'hard: incomplete, 2 samples are missing'
  )
