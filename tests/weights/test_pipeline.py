"""Many at once, in order, within a budget."""

import threading

import pytest

from mimo.weights import pipeline


def test_results_come_in_the_order_of_items():
  first = threading.Event()

  def work(i):
    if i == 0:
      first.wait(1)  # until item 1 is done, where there are two cores
    if i == 1:
      first.set()
    return i * i

  assert list(pipeline.ordered(work, ((i, 1) for i in range(20)))) == [i * i for i in range(20)]


@pytest.mark.parametrize(('size', 'most'), [(40, 2), (60, 1), (200, 1), (1, 100)])
def test_items_begun_and_not_taken_stay_within_the_budget(monkeypatch, size, most):
  monkeypatch.setattr(pipeline, 'BUDGET_BYTES', 100)
  begun, seen = [], []

  def items():
    for i in range(30):
      begun.append(i)
      yield i, size

  for taken, _ in enumerate(pipeline.ordered(lambda i: i, items())):
    seen.append(len(begun) - taken)
  # The item that would be one too many is asked for, and waits.
  assert max(seen) <= most + 1


def test_the_first_failure_is_raised_and_the_rest_given_up():
  done = []

  def work(i):
    if i in (3, 5):
      raise ValueError(f'item {i}')
    done.append(i)
    return i

  got = []
  with pytest.raises(ValueError, match='item 3'):
    for result in pipeline.ordered(work, ((i, 2**27) for i in range(1000))):
      got.append(result)
  assert got == [0, 1, 2] and len(done) < 20
