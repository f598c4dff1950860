"""Keeps the rooms apart: which module of mimo may import which, and what only one room touches."""

import ast
import pathlib

import pytest

_ROOT = pathlib.Path(__file__).parents[1] / 'mimo'

# Ports: the modules through which rooms meet. Importing a port is importing its names only.
_PORTS = frozenset(
  {
    'mimo.types',
    'mimo.checks',
    'mimo.keys',
    'mimo.samplers.base',
    'mimo.tasks.base',
    'mimo.rollouts.base',
    'mimo.weights.store',
  }
)

# room -> the rooms it may import beside itself and `mimo.types`.
_MAY_IMPORT: dict[str, frozenset[str]] = {
  'types': frozenset(),
  'keys': frozenset(),
  'objectives': frozenset(),
  'models': frozenset(),
  'trainer': frozenset({'objectives', 'models'}),
  'weights': frozenset({'models'}),
  'samplers': frozenset({'models'}),
  'tasks': frozenset(),
  'evaluation': frozenset(),
  'fleet': frozenset(),
  'rollouts': frozenset({'fleet'}),
  'telemetry': frozenset(),
}

# (importing module's prefix, imported module): doors that one file needs.
_DOORS = frozenset(
  {
    # They read views, never the trainer's arrays.
    ('mimo.samplers.native', 'mimo.weights.views'),
    ('mimo.samplers.following', 'mimo.weights.views'),
  }
)

# room -> packages that stay out of it.
_FOREIGN: dict[str, frozenset[str]] = {
  'objectives': frozenset({'absl', 'ml_collections', 'orbax', 'vllm', 'flax', 'optax'}),
  'models': frozenset({'absl', 'ml_collections', 'orbax', 'vllm', 'optax'}),
  'trainer': frozenset({'absl', 'ml_collections', 'orbax', 'vllm'}),
  'types': frozenset({'jax', 'absl', 'ml_collections', 'orbax', 'vllm', 'flax', 'optax'}),
  'rollouts': frozenset({'absl', 'ml_collections', 'orbax', 'vllm', 'flax', 'optax'}),
  'tasks': frozenset({'absl', 'ml_collections', 'orbax', 'vllm', 'flax', 'optax', 'jax'}),
  'telemetry': frozenset({'absl', 'ml_collections', 'orbax', 'vllm', 'flax', 'optax', 'jax'}),
  'evaluation': frozenset({'absl', 'ml_collections', 'orbax', 'vllm', 'flax', 'optax'}),
  'fleet': frozenset({'absl', 'ml_collections', 'orbax', 'flax', 'optax', 'jax'}),
  'weights': frozenset({'absl', 'ml_collections', 'vllm', 'optax'}),
  'samplers': frozenset({'absl', 'ml_collections', 'orbax', 'optax'}),
}


def _module_name(path: pathlib.Path) -> str:
  parts = path.relative_to(_ROOT.parent).with_suffix('').parts
  return '.'.join(part for part in parts if part != '__init__')


def _imports(tree: ast.Module) -> set[str]:
  """Every imported module, deferred imports and those for type checking included."""
  found: set[str] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.module is not None
      found |= {f'{node.module}.{alias.name}' for alias in node.names}
  return found


def _room(module: str) -> str:
  return module.split('.')[1] if '.' in module else ''


def _complaints(importer: str, imported: set[str]) -> list[str]:
  room = _room(importer)
  if room in ('', 'experiments'):
    return []
  bad = []
  for name in sorted(imported):
    top = name.split('.')[0]
    if top != 'mimo':
      if top in _FOREIGN.get(room, frozenset()):
        bad.append(f'{importer} imports {top}, which stays out of {room}')
      continue
    if any(name == port or name.startswith(f'{port}.') for port in _PORTS):
      if room == 'types' or (
        room in ('objectives', 'models')
        and not name.startswith(('mimo.types', 'mimo.checks', 'mimo.keys'))
      ):
        bad.append(f'{importer} imports {name}')
      continue
    if _room(name) == room or _room(name) in _MAY_IMPORT[room]:
      continue
    if any(importer.startswith(a) and name.startswith(b) for a, b in _DOORS):
      continue
    bad.append(f'{importer} imports {name}: {room} may import {sorted(_MAY_IMPORT[room])}')
  return bad


_FILES = sorted(_ROOT.rglob('*.py'))


@pytest.mark.parametrize('path', _FILES, ids=[_module_name(path) for path in _FILES])
def test_rooms_are_kept_apart(path: pathlib.Path) -> None:
  assert not _complaints(_module_name(path), _imports(ast.parse(path.read_text())))


def test_one_place_touches_vllm() -> None:
  for path in _FILES:
    module = _module_name(path)
    if not module.startswith('mimo.samplers.vllm.internals'):
      imported = {name.split('.')[0] for name in _imports(ast.parse(path.read_text()))}
      assert 'vllm' not in imported, f'{module} imports vllm; only samplers/vllm/internals may'


def test_every_room_has_a_rule() -> None:
  rooms = {path.name for path in _ROOT.iterdir() if (path / '__init__.py').exists()}
  assert rooms - {'experiments'} == set(_MAY_IMPORT) - {'types', 'keys'}


@pytest.mark.parametrize(
  ('importer', 'imported'),
  [
    ('mimo.objectives.loss', 'mimo.models.decoder'),
    ('mimo.trainer.update', 'mimo.samplers.base_engine'),
    ('mimo.models.decoder', 'orbax.checkpoint'),
    ('mimo.samplers.scripted', 'mimo.weights.views'),
    ('mimo.rollouts.driver', 'mimo.experiments.train'),
    ('mimo.types', 'mimo.samplers.base'),
    ('mimo.keys', 'mimo.fleet.routing'),
  ],
)
def test_a_forbidden_import_is_named(importer: str, imported: str) -> None:
  assert _complaints(importer, {imported})


def test_importing_a_room_parses_no_flags_and_starts_no_backend() -> None:
  """Module level code only defines; a pytree's registration and a gradient rule do."""
  for path in _FILES:
    for node in ast.parse(path.read_text()).body:
      called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
      source = ast.unparse(node)
      defines = source.startswith('jax.tree_util.register_') or '.defvjp(' in source
      assert not called or defines, f'{path.name}:{node.lineno} calls something when it is imported'
