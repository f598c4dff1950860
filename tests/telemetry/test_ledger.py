import json
import math

import pytest

from mimo.telemetry import ledger


def _book(book, turns=(10, 20), modelled=(1.0, 0.5), billed=(2.0, 3.0)):
  names = ('a', 'b')
  return book.add(
    turns=dict(zip(names, turns, strict=True)),
    modelled_usd=dict(zip(names, modelled, strict=True)),
    billed_usd=dict(zip(names, billed, strict=True)),
  )


def test_per_update_and_cumulative():
  book = ledger.Ledger(['a', 'b'])
  _book(book)
  got = _book(book, turns=(1, 0), modelled=(0.25, 0.0), billed=(2.0, 1.0))
  want = {
    'cost/turns/a': 1,
    'cost/turns': 1,
    'cost/turns_total/a': 11,
    'cost/turns_total': 31,
    'cost/modelled_usd/a': 0.25,
    'cost/modelled_usd': 0.25,
    'cost/modelled_usd_total/a': 1.25,
    'cost/modelled_usd_total/b': 0.5,
    'cost/modelled_usd_total': 1.75,
    'cost/billed_usd': 3.0,
    'cost/billed_usd_total': 8.0,
    'cost/billed_usd_total/b': 4.0,
  }
  assert {name: got[name] for name in want} == pytest.approx(want)


def test_a_pool_without_throughput_leaves_no_modelled_total():
  book = ledger.Ledger(['a', 'b'])
  got = _book(book, modelled=(1.0, None))
  assert got['cost/modelled_usd/a'] == 1.0
  assert math.isnan(got['cost/modelled_usd/b']) and math.isnan(got['cost/modelled_usd'])
  assert got['cost/billed_usd'] == 5.0
  # Once unknown, the sum stays unknown.
  assert math.isnan(_book(book)['cost/modelled_usd_total/b'])


def test_state_goes_through_json_and_resumes():
  straight, first = ledger.Ledger(['a', 'b']), ledger.Ledger(['a', 'b'])
  _book(straight), _book(first, modelled=(1.0, 0.5))
  resumed = ledger.Ledger(['a', 'b'])
  resumed.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
  assert _book(resumed) == _book(straight)


def test_a_pool_that_left_keeps_its_cost():
  book = ledger.Ledger(['a', 'b'])
  _book(book, modelled=(1.0, None))
  resumed = ledger.Ledger(['a'])
  resumed.restore(json.loads(json.dumps(book.state(), allow_nan=False)))
  got = resumed.add(turns={'a': 1}, modelled_usd={'a': 1.0}, billed_usd={'a': 0.0})
  assert got['cost/billed_usd_total'] == 5.0 and got['cost/modelled_usd_total/a'] == 2.0
  assert math.isnan(got['cost/modelled_usd_total'])


def test_refusals():
  book = ledger.Ledger(['a'])
  with pytest.raises(ValueError, match=r"turns: pool 'c' has no books; expected one of \['a'\]"):
    book.add(turns={'c': 1}, modelled_usd={}, billed_usd={})
  with pytest.raises(ValueError, match='billed_usd of a is -1'):
    book.add(turns={}, modelled_usd={}, billed_usd={'a': -1.0})
  assert book.state()['turns'] == {'a': 0.0}
  with pytest.raises(ValueError, match='expected turns, modelled_usd, billed_usd'):
    book.restore({'turns': {}})
