"""How fast a replica is: for a sampler that stands for an accelerator which is not there."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib

from mimo import checks
from mimo.samplers.engine import EngineStats
from mimo.samplers.following import ViewFeed
from mimo.types import Version


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpeed:
  """How long a replica of a pool takes.

  A decode step of n sessions takes max(1 / session, n / replica) seconds: few sessions are as slow
  as one, many share what the replica can do. Known tokens that are not cached take no time of
  their own: they are a part of what a turn costs, and a stated throughput counts them in.

  Attributes:
    session_tokens_per_sec: of one session, at most.
    replica_tokens_per_sec: of all sessions together, at most.
  """

  session_tokens_per_sec: float
  replica_tokens_per_sec: float

  def __post_init__(self) -> None:
    checks.number('session_tokens_per_sec', self.session_tokens_per_sec, above=0)
    checks.number('replica_tokens_per_sec', self.replica_tokens_per_sec, above=0)

  def secs(self, before: EngineStats, after: EngineStats, slots: int) -> float:
    """Returns how long the steps between two counts of an engine of so many slots take."""
    steps = after.decode_steps - before.decode_steps
    fed_tokens = steps * slots - (after.idle_row_steps - before.idle_row_steps)
    return max(steps / self.session_tokens_per_sec, fed_tokens / self.replica_tokens_per_sec)


class DelayedFeed:
  """A feed whose versions arrive a while after they are announced; several may be under way."""

  def __init__(self, feed: ViewFeed, publication_secs: float) -> None:
    """Nothing has arrived yet.

    Args:
      feed: where the directories of versions are.
      publication_secs: how long an announced version takes, on the event loop's clock.
    """
    self._feed = feed
    self._publication_secs = publication_secs
    self._latest: Version | None = None

  def announce(self, version: Version) -> None:
    """Has a version arrive after `publication_secs`."""
    asyncio.get_running_loop().call_later(self._publication_secs, self.arrive, version)

  def arrive(self, version: Version) -> None:
    """Makes a version the newest."""
    self._latest = version

  def latest(self) -> Version | None:
    return self._latest

  def open(self, version: Version) -> pathlib.Path:
    return self._feed.open(version)
