"""The experts that the tokens in an engine's slots were sent to, as they were first run."""

from __future__ import annotations

import numpy as np

from mimo.types import ROUTE_DTYPE, Routes, RouteShape


class RouteBook:
  """Holds the routes of the turns that run in slots. Without a shape it holds none, at no cost."""

  def __init__(self, shape: RouteShape | None, slots: int, max_tokens: int) -> None:
    self._ids: np.ndarray | None = None
    if shape is not None:
      size = (slots, max_tokens, shape.layers, shape.per_token)
      self._ids = np.full(size, -1, ROUTE_DTYPE)

  def begin(self, slot: int) -> None:
    """Forgets what is known of a slot: another turn starts in it."""
    if self._ids is not None:
      self._ids[slot] = -1

  def add(self, slot: int, start: int, ids: np.ndarray) -> None:
    """Takes the routes of tokens from `start` on, [N, L, k].

    A token that is run again, since its cache was dropped, keeps the routes of its first pass: of
    that one its successor was drawn.
    """
    if self._ids is not None:
      held = self._ids[slot, start : start + len(ids)]
      np.copyto(held, ids, where=held < 0)

  def told(self, slot: int, start: int, end: int) -> Routes | None:
    """Returns what is known of tokens `[start, end)`."""
    return None if self._ids is None else Routes(start, self._ids[slot, start:end].copy())
