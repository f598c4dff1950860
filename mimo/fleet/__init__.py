"""What samplers a run has, what they cost, and which of them takes a session.

Records and pure functions: nothing here starts a process or holds a connection.
"""

from mimo.fleet.cost import billed_usd, modelled_usd, usd_per_turn
from mimo.fleet.pools import CPU, LIST_PRICES_USD_PER_GPU_HOUR, Pool, list_price
from mimo.fleet.routing import fixed, least_loaded, table

__all__ = [
  'CPU',
  'LIST_PRICES_USD_PER_GPU_HOUR',
  'Pool',
  'billed_usd',
  'fixed',
  'least_loaded',
  'list_price',
  'modelled_usd',
  'table',
  'usd_per_turn',
]
