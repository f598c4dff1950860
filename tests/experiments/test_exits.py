"""Everything is closed, and the first error is the one raised."""

import asyncio

import pytest

from mimo.experiments.exits import Exits


def _run(closers, error=None):
  closed = []

  async def body():
    async with Exits() as exits:
      for name, failure in closers:
        exits.own(_closer(closed, name, failure))
      if error is not None:
        raise error

  raised = None
  try:
    asyncio.run(body())
  except BaseException as caught:
    raised = caught
  return closed, raised


def _closer(closed, name, failure):
  if name.startswith('async'):

    async def close():
      await asyncio.sleep(0)
      closed.append(name)
      if failure is not None:
        raise failure

    return close

  def close_now():
    closed.append(name)
    if failure is not None:
      raise failure

  return close_now


def test_last_opened_is_closed_first():
  assert _run([('a', None), ('async b', None), ('c', None)]) == (['c', 'async b', 'a'], None)


def test_one_that_fails_keeps_no_other_open_and_is_raised():
  first, second = OSError('the disk is full'), RuntimeError('it does not end')
  closed, raised = _run([('a', None), ('b', second), ('async c', first), ('d', None)])
  assert closed == ['d', 'async c', 'b', 'a']
  assert raised is first
  assert raised.__notes__ == ['then, while closing: RuntimeError: it does not end']


def test_the_body_s_error_comes_before_all():
  error = ValueError('the update failed')
  closed, raised = _run([('a', OSError('full'))], error)
  assert (closed, raised) == (['a'], error)
  assert raised.__notes__ == ['then, while closing: OSError: full']


def test_a_cancelled_body_is_closed_too():
  closed, raised = _run([('a', None)], asyncio.CancelledError())
  assert closed == ['a']
  assert isinstance(raised, asyncio.CancelledError)


@pytest.mark.parametrize('failure', [KeyboardInterrupt(), SystemExit(3)])
def test_what_is_no_exception_skips_nothing_either(failure):
  closed, raised = _run([('a', None), ('b', failure)])
  assert (closed, raised) == (['b', 'a'], failure)
