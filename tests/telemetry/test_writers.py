import importlib.util
import json

import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from mimo.telemetry import writers


def _events(directory):
  # TFRecord framing: length (8), its crc (4), the event, its crc (4).
  out = []
  for path in sorted(directory.glob('events.*')):
    data = path.read_bytes()
    while data:
      length = int.from_bytes(data[:8], 'little')
      body, crc = data[12 : 12 + length], data[12 + length : 16 + length]
      assert int.from_bytes(crc, 'little') == masked_crc32c(body)
      out.append(event_pb2.Event.FromString(body))
      data = data[16 + length :]
  return out


def test_histogram_counts_by_hand():
  h = writers.Histogram.of(np.array([0, 0, 1, 2.5, 9]), [0, 1, 2, 3])
  # 9 lies outside, and is counted in the last bin; sums keep its value.
  assert h.counts == (2, 1, 2)
  assert (h.total, h.squares) == (12.5, 1 + 6.25 + 81)


def test_jsonl_appends_and_writes_null_for_non_finite(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  writer = writers.JsonlWriter(path, keep_through=None)
  writer.scalars(1, {'reward': 0.25, 'all/kl': float('nan')})
  writer.histograms(1, {'staleness': writers.Histogram.of(np.array([1, 1]), [0, 1, 2])})
  writer.flush()
  assert [json.loads(line) for line in path.read_text().splitlines()] == [
    {'step': 1, 'reward': 0.25, 'all/kl': None},
    {'step': 1, 'staleness': {'edges': [0.0, 1.0, 2.0], 'counts': [0, 2]}},
  ]
  writer.close()
  writer.close()


def test_jsonl_resume_drops_later_records_and_a_torn_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3, "a": 3}\n{"step": 2, "b')
  writer = writers.JsonlWriter(path, keep_through=2)
  writer.scalars(3, {'a': 30.0})
  writer.close()
  assert writers.read(path) == [
    {'step': 1, 'a': 1},
    {'step': 2, 'a': 2},
    {'step': 3, 'a': 30.0},
  ]
  writers.JsonlWriter(path, keep_through=None).close()
  assert writers.read(path) == []


def test_read_names_a_broken_line(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: got 'nonsense'; expected a JSON"):
    writers.read(path)
  assert writers.read(tmp_path / 'absent.jsonl') == []


def test_tensorboard_events(tmp_path):
  writer = writers.TensorBoardWriter(tmp_path, keep_through=4)
  writer.scalars(5, {'all/kl': 0.125})
  writer.histograms(
    5, {'staleness': writers.Histogram.of(np.array([0.0, 2, 2]), [0, 1, 2, 3]),
        'empty': writers.Histogram.of(np.zeros(0), [0, 1])}
  )  # fmt: skip
  writer.flush()
  writer.close()
  events = _events(tmp_path)
  values = {v.tag: (e.step, v) for e in events for v in e.summary.value}
  assert set(values) == {'all/kl', 'staleness'}
  step, value = values['all/kl']
  assert (step, value.simple_value) == (5, 0.125)
  step, value = values['staleness']
  assert step == 5
  assert list(value.histo.bucket) == [1, 0, 2]
  assert list(value.histo.bucket_limit) == [1, 2, 3]
  assert (value.histo.num, value.histo.sum, value.histo.sum_squares) == (3, 4, 8)
  # The purge: viewers forget records of step 5 and later in earlier files.
  assert any(e.session_log.status == event_pb2.SessionLog.START and e.step == 5 for e in events)


@pytest.mark.skipif(importlib.util.find_spec('wandb') is not None, reason='wandb is installed')
def test_wandb_missing_is_one_clear_error(tmp_path):
  with pytest.raises(ValueError, match=r"wandb isn't installed; expected `pip install"):
    writers.WandbWriter(project='p', name='n', run_id='r', directory=tmp_path, config={})


def test_wandb_through_a_fake(tmp_path, monkeypatch):
  class Fake:
    def __init__(self):
      self.logged, self.finished, self.started = [], False, None

    def init(self, **kwargs):
      self.started = kwargs
      return self

    def log(self, values, step):
      self.logged.append((step, values))

    def finish(self):
      self.finished = True

    def Histogram(self, np_histogram):
      return [list(part) for part in np_histogram]

  fake = Fake()
  monkeypatch.setitem(__import__('sys').modules, 'wandb', fake)
  writer = writers.WandbWriter(
    project='p', name='n', run_id='r', directory=tmp_path, config={'a': 1}
  )
  writer.scalars(2, {'x': 1.0})
  writer.histograms(2, {'h': writers.Histogram((0.0, 1.0), (3,), 0.0, 0.0)})
  writer.close()
  assert fake.started['id'] == 'r' and fake.started['resume'] == 'allow'
  assert fake.logged == [(2, {'x': 1.0}), (2, {'h': [[3], [0.0, 1.0]]})]
  assert fake.finished


def test_multi_hands_to_all(tmp_path):
  a, b = (writers.JsonlWriter(tmp_path / name, keep_through=None) for name in ('a', 'b'))
  writer = writers.MultiWriter([a, b])
  writer.scalars(1, {'x': 2.0})
  writer.histograms(1, {'h': writers.Histogram.of(np.array([0.0]), [0, 1])})
  writer.flush()
  writer.close()
  assert writers.read(tmp_path / 'a') == writers.read(tmp_path / 'b')
  assert len(writers.read(tmp_path / 'a')) == 2
