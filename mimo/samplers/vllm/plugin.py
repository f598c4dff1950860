"""The entry points through which vLLM loads mimo: inert unless it is asked for.

`vllm.endpoint_plugins` adds the routes, in the API server, where VLLM_PLUGINS names `mimo`.
`vllm.general_plugins` runs in each of vLLM's processes, and changes something only where
MIMO_VLLM_PATCHES names it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

from mimo.samplers.vllm.launch import PATCHES_VARIABLE, PLUGIN


def general() -> None:
  """The general plugin."""
  if os.environ.get(PATCHES_VARIABLE):
    from mimo.samplers.vllm import internals

    internals.check_version(internals.vllm_version())
    internals.apply_patches()


class EndpointPlugin:
  """The endpoint plugin: an `EndpointPlugin` of vLLM's, by its methods."""

  name = PLUGIN
  required_tasks = ('generate',)

  def __init__(self) -> None:
    from mimo.samplers.vllm import internals, routes

    internals.check_version(internals.vllm_version())
    internals.check_internals()
    self._routes = routes.Routes()

  def attach_router(self, app: Any) -> None:
    """Adds the routes to a FastAPI app; they answer `not_ready` until `init_state`."""
    for path, method, endpoint in self._routes.endpoints():
      app.add_route(path, endpoint, methods=[method])

  async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
    """Connects the routes to the engine. Raises ValueError where a flag of the server forbids."""
    from mimo.samplers.vllm import internals

    if engine_client is None:
      return
    count = getattr(args, 'api_server_count', None)
    if count not in (None, 1):
      raise ValueError(f'--api-server-count is {count}; expected 1: what is served is its state')
    self._routes.connect(internals.VllmEngine(engine_client))
