"""A run's directory: its resolved configuration, its lock, and how often it was started.

config.json     the resolved configuration
policy          the hash of the policy that it began from
starts          updates applied to the weights that each start went on from, one a line
metrics.jsonl   one record per update (telemetry)
tensorboard/    event files (telemetry)
checkpoints/    resumable state (weights)
store/          published views (weights)
report.html     the report (telemetry)
"""

from __future__ import annotations

import fcntl
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TextIO

# What a resumed run may change: how long it goes on, what is written meanwhile, on which machines
# and how it is laid out there. Sums in another order are equal up to rounding, not bit for bit.
_MAY_CHANGE = (
  'updates',
  'evaluation',
  'checkpoints',
  'wandb_project',
  'distributed',
  'trainer.mesh',
  'trainer.offload',
  'trainer.remat',
)


_POLICY = 'policy'


def differing_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = '') -> list[str]:
  """Returns the dotted keys whose values differ, in order."""
  keys = []
  for key in sorted({*a, *b}):
    name = f'{prefix}{key}'
    if key not in a or key not in b:
      keys.append(name)
    elif isinstance(a[key], Mapping) and isinstance(b[key], Mapping):
      keys += differing_keys(a[key], b[key], f'{name}.')
    elif a[key] != b[key]:
      keys.append(name)
  return keys


def _has(config: Any, key: str) -> bool:
  """Returns whether a configuration states something under a dotted key."""
  first, _, rest = key.partition('.')
  return first in config and (not rest or _has(config[first], rest))


def _stated(config: Mapping[str, Any], key: str) -> str:
  """Says what a configuration has under a dotted key: another fleet may have no such pool."""
  if not _has(config, key):
    return 'is not stated'
  value: Any = config
  for part in key.split('.'):
    value = value[part]
  return f'is {value!r}'


def _others(count: int) -> str:
  return f' ({count} more differ)' if count else ''


def _write_atomically(path: pathlib.Path, text: str) -> None:
  temporary = path.with_name(f'.{path.name}.{os.getpid()}.tmp')
  with open(temporary, 'w', encoding='utf-8') as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(temporary, path)


class Workdir:
  """Owns a run's directory while the process lives.

  Raises ValueError when another process runs in it, when it holds a run of another configuration or
  from another policy, or when it is some other directory with files in it; OSError when it cannot
  be written.
  """

  def __init__(
    self, path: str | os.PathLike[str], config: Mapping[str, Any], policy_digest: str
  ) -> None:
    """Takes the directory.

    Args:
      path: of the directory, made where it is missing.
      config: the resolved configuration.
      policy_digest: of the policy that a fresh run begins from, as hexadecimal digits.
    """
    self.path = pathlib.Path(path).resolve()
    known = _existing(self.path, config)
    if known is not None:
      _check_policy(self.path, config, policy_digest)
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = take_lock(self.path)
    if known is None:
      # Before the configuration: what has one has both.
      _write_atomically(self.path / _POLICY, f'{policy_digest}\n')
    if known != dict(config):
      _write_atomically(self.path / 'config.json', json.dumps(config, indent=2) + '\n')
    self._starts_file = self.path / 'starts'
    self.starts: tuple[int, ...] = ()
    if self._starts_file.exists():
      self.starts = tuple(int(line) for line in self._starts_file.read_text().split())

  @property
  def incarnation(self) -> int:
    """Which start of the run this is, from 0; known once it has begun."""
    return len(self.starts) - 1

  def begin(self, update: int) -> None:
    """Records that this start goes on from weights with `update` updates applied."""
    self.starts = (*self.starts, update)
    _write_atomically(self._starts_file, ''.join(f'{start}\n' for start in self.starts))

  def close(self) -> None:
    self._lock.close()


def check_workdir(
  path: str | os.PathLike[str], config: Mapping[str, Any], digest: Callable[[], str]
) -> str:
  """Checks that a run could work in a directory, and writes nothing.

  Args:
    path: of the directory.
    config: the resolved configuration.
    digest: returns that of the policy; asked for where the directory holds a run.

  Returns:
    The directory's absolute path.

  Raises:
    ValueError: it could not; as `Workdir` says it.
  """
  path = pathlib.Path(path).resolve()
  if _existing(path, config) is not None:
    _check_policy(path, config, digest())
  nearest = next(parent for parent in (path, *path.parents) if parent.exists())
  if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
    raise ValueError(f'{nearest} is no directory that can be written; expected one for {path}')
  if (path / 'lock').exists():
    take_lock(path).close()
  return str(path)


def _existing(path: pathlib.Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
  """Returns the configuration of the run that a directory holds, None where it holds none.

  Raises ValueError for a directory that a run of `config` must not write in.
  """
  if path.exists() and not path.is_dir():
    raise ValueError(f'{path} is a file; expected a directory to work in')
  file = path / 'config.json'
  if not file.exists():
    # Only what a start that died before its configuration was written can have left.
    found = [p.name for p in path.iterdir()] if path.is_dir() else []
    stray = [name for name in found if name not in ('lock', _POLICY) and name[0] != '.']
    if stray:
      raise ValueError(
        f'{path} holds {sorted(stray)[0]!r} and no config.json; expected an empty directory '
        'or that of an earlier start of this run'
      )
    return None
  try:
    known: dict[str, Any] = json.loads(file.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{file} is not JSON ({error}); expected the configuration of a run') from None
  differing = [
    key
    for key in differing_keys(known, config)
    if not f'{key}.'.startswith(tuple(f'{name}.' for name in _MAY_CHANGE))
  ]
  # The schema of a release has the same keys for every run, but for the names of pools.
  unknown = [
    key
    for key in differing
    if not (key.startswith('pools.') and key.count('.') == 1)
    and _has(known, key) != _has(config, key)
  ]
  if unknown:
    began, where = ('another', 'here') if _has(known, unknown[0]) else ('an earlier', 'there')
    raise ValueError(
      f'{path} holds the configuration of {began} release of mimo: {unknown[0]} is no key '
      f'{where}; expected the release that began the run, or another --workdir'
    )
  if differing:
    raise ValueError(
      f'{path} holds a run whose {differing[0]} {_stated(known, differing[0])} and '
      f'here {_stated(config, differing[0])}{_others(len(differing) - 1)}; expected the same '
      'configuration, or another --workdir'
    )
  return known


def _check_policy(path: pathlib.Path, config: Mapping[str, Any], digest: str) -> None:
  """Refuses to go on from a checkpoint under a policy path that holds other weights by now."""
  file = path / _POLICY
  if not file.exists():
    raise ValueError(
      f'{path} holds a run that another release of mimo began: it keeps no hash of its '
      'policy; expected that release, or another --workdir'
    )
  began = file.read_text(encoding='utf-8').strip()
  if began != digest:
    named = config['policy'] or "the task's own"
    raise ValueError(
      f'policy {named!r} holds other weights (sha256 {digest[:12]}) than those that the run in '
      f'{path} began from ({began[:12]}); expected the same ones, or another --workdir'
    )


def take_lock(path: pathlib.Path) -> TextIO:
  """Returns the lock of a directory, held until it is closed.

  Raises ValueError where another process holds it.
  """
  lock = open(path / 'lock', 'a', encoding='utf-8')  # noqa: SIM115 (held until close)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    lock.close()
    raise ValueError(f'{path} is in use by another process; expected a free one') from None
  return lock
