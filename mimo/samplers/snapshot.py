"""An engine's turns and cache as plain values, from which another engine goes on bit for bit.

The other half of `Engine`: it reads and writes its private fields. Counts are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from mimo.samplers.draw import Draw
from mimo.samplers.engine import Engine
from mimo.samplers.turns import Part, Session, TurnRequest
from mimo.types import SamplingParams

BF16 = np.dtype(ml_dtypes.bfloat16)


def save(engine: Engine) -> dict[str, Any]:
  """Returns the state of an engine between two steps: JSON values and numpy arrays."""
  assert not engine._finished, 'turns that ended are not taken yet'
  return {
    'sessions': [_session(engine, session) for session in engine._sessions.values()],
    'idle': list(engine._idle),
    'queue': [request.session for request in engine._queue],
    'cache': [_narrow(np.asarray(leaf)) for leaf in jax.tree.leaves(engine._cache)],
  }


def load(engine: Engine, state: Mapping[str, Any]) -> None:
  """Fills a fresh engine of the same model and settings with a state."""
  assert not engine._sessions, 'the engine is not fresh'
  fresh, structure = jax.tree.flatten(engine._cache)
  leaves = [_widen(leaf) for leaf in state['cache']]
  if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in fresh]:
    raise ValueError('the state is of an engine of another shape; expected the same settings')
  engine._cache = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])
  for stated in state['sessions']:
    _add(engine, stated)
  engine._idle = {name: engine._sessions[name] for name in state['idle']}
  for name in state['queue']:
    request = engine._sessions[name].request
    assert request is not None
    engine._queue.append(request)


def _session(engine: Engine, session: Session) -> dict[str, Any]:
  request = session.request
  return {
    'name': session.name,
    'tokens': session.tokens,
    'slot': session.slot,
    'written': 0 if session.slot is None else int(engine._written[session.slot]),
    'request': None
    if request is None
    else {
      'tokens': request.tokens,
      'params': dataclasses.asdict(request.params),
      'key': request.key,
    },
    'routes': _told(engine, session),
    'parts': [{'version': p.version, 'draws': p.draws._asdict()} for p in session.parts],
  }


def _told(engine: Engine, session: Session) -> list[Any] | None:
  """What is known of the running turn's routes."""
  if session.request is None or session.slot is None:
    return None
  known = int(engine._known[session.slot])
  told = engine._told.told(session.slot, session.untold, known)
  return None if told is None else [told.start, told.ids]


def _add(engine: Engine, stated: Mapping[str, Any]) -> None:
  session = Session(stated['name'], tokens=stated['tokens'], slot=stated['slot'])
  engine._sessions[session.name] = session
  if stated['request'] is not None:
    params = dict(stated['request']['params'])
    params['stop_ids'] = tuple(params['stop_ids'])
    session.request = TurnRequest(
      session.name, stated['request']['tokens'], SamplingParams(**params), stated['request']['key']
    )
  slot = session.slot
  if slot is None:
    return
  engine._holders[slot] = session
  if session.request is not None:
    engine._begin(session)
  if stated['routes'] is not None:
    engine._told.add(slot, *stated['routes'])
  session.parts = [Part(Draw(**part['draws']), part['version']) for part in stated['parts']]
  for part in session.parts:
    known, num = engine._known[slot], len(part.draws.ids)
    engine._tokens[slot, known : known + num] = part.draws.ids
    engine._known[slot] += num
  engine._written[slot] = engine._absorbed[slot] = stated['written']


def _narrow(leaf: np.ndarray) -> np.ndarray:
  """Halves what a bf16 or fp8 cache takes, where that loses nothing."""
  if leaf.dtype != np.float32:
    return leaf
  narrow = leaf.astype(BF16)
  return narrow.view(np.uint16) if np.array_equal(narrow.astype(np.float32), leaf) else leaf


def _widen(leaf: np.ndarray) -> np.ndarray:
  return leaf.view(BF16).astype(np.float32) if leaf.dtype == np.uint16 else leaf
