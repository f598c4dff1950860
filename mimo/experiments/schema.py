"""The schema of a configuration: what an experiment states, section by section.

`Experiment` is made of frozen dataclasses, each of the room that uses it and checked where it is
made. `parse` makes one from a ConfigDict and refuses what no section has; `plain` is its inverse;
`leaves` lists every key with its type, default and what it says.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import config_dict

from mimo import checks, fleet, objectives
from mimo.evaluation.evaluate import EvaluationOptions
from mimo.experiments.configuration import UnknownKey
from mimo.experiments.hosts import Cluster
from mimo.objectives import RatioRange
from mimo.rollouts.base import RolloutOptions
from mimo.rollouts.schedules import schedule_of
from mimo.samplers.base import SamplingOptions
from mimo.trainer.state import TrainerConfig
from mimo.weights.checkpoints import CheckpointOptions
from mimo.weights.formats import BLOCK_SCALES
from mimo.weights.views import ViewSpec

SEEDS = 2**32

# In the name of a leaf, what stands for the name of a pool.
ANY = 'NAME'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
  """One experiment: all that a run is told, and what the sections of the rest are.

  Attributes:
    arm: grpo, tis, mis, mis_mean, sc, sc_tis or sc_mis, each also with _topp.
    seed: of the order of prompts and of what is drawn, in [0, 2**32).
    updates: updates of the run.
    policy: a Hugging Face directory or an Orbax checkpoint; empty is the task's own.
    task: 'repair' or 'arithmetic'.
    objective: the range of the ratio.
    sampling: how the pools draw.
    rollouts: how batches are sampled.
    trainer: the update.
    pools: the samplers, by name.
    evaluation: when the policy is evaluated.
    checkpoints: when the run is saved.
    distributed: the processes of the trainer.
    drift_every_updates: updates between two measures of a batch's drift, 2 more passes; 0: never.
    emulate_activations: native samplers round what their format has a server round.
    block_scale: how nvfp4 block scales are chosen, 'amax' or 'four_over_six'.
    wandb_project: where Weights & Biases logs too; empty: nowhere but the work directory.
  """

  arm: str
  seed: int = 0
  updates: int = 60
  policy: str = ''
  task: str = 'repair'
  objective: RatioRange = dataclasses.field(default_factory=RatioRange)
  sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
  rollouts: RolloutOptions = dataclasses.field(default_factory=RolloutOptions)
  trainer: TrainerConfig = dataclasses.field(default_factory=TrainerConfig)
  pools: Mapping[str, fleet.Pool]
  evaluation: EvaluationOptions = dataclasses.field(default_factory=EvaluationOptions)
  checkpoints: CheckpointOptions = dataclasses.field(default_factory=CheckpointOptions)
  distributed: Cluster = dataclasses.field(default_factory=Cluster)
  drift_every_updates: int = 0
  emulate_activations: bool = True
  block_scale: str = ViewSpec.block_scale
  wandb_project: str = ''

  def __post_init__(self) -> None:
    checks.one_of('arm', self.arm, objectives.ARMS)
    checks.whole('seed', self.seed, least=0, most=SEEDS - 1)
    checks.whole('updates', self.updates, least=0, most=10**9)
    checks.whole('drift_every_updates', self.drift_every_updates, least=0)
    checks.one_of('block_scale', self.block_scale, BLOCK_SCALES)
    if not self.pools:
      raise ValueError('pools is empty; expected at least one pool')
    for pool in self.pools.values() if schedule_of(self.rollouts).virtual else ():
      if pool.server != 'native':
        raise ValueError(
          f'pools.{pool.name}.server is {pool.server!r}; '
          "expected 'native', which alone can be simulated"
        )
      if pool.turns_per_hour is None:
        raise ValueError(
          f'pools.{pool.name}.turns_per_hour is not stated; expected how fast the simulated pool is'
        )

  @property
  def fleet(self) -> tuple[fleet.Pool, ...]:
    """The pools in the order of their names."""
    return tuple(pool for _, pool in sorted(self.pools.items()))


class Leaf(NamedTuple):
  """One key of a configuration that holds a value.

  Attributes:
    name: dotted; a pool's name is `NAME` in it.
    type: 'int', 'float', 'bool', 'str', or one of them with ' or None'.
    default: as a configuration holds it; None where `required`, too.
    doc: one sentence.
    required: whether it has no default.
  """

  name: str
  type: str
  default: Any
  doc: str
  required: bool


class _Field(NamedTuple):
  """A field of a section.

  Attributes:
    hint: its type.
    default: None where it is required.
    required: whether it has no default.
    doc: what its section's docstring says of it.
  """

  hint: Any
  default: Any
  required: bool
  doc: str


def parse(config: config_dict.ConfigDict) -> Experiment:
  """Returns the experiment that a configuration states; what it leaves out has its default.

  Raises:
    UnknownKey: it states a key that there is not; the message names the nearest.
    ValueError: a value has the wrong type, or cannot be meant.
  """
  stated = config.to_dict()
  pools = stated['pools'] if isinstance(stated.get('pools'), Mapping) else {}
  _refuse_unknown(Experiment, stated, '', tuple(pools))
  return _section(Experiment, stated, '')


def plain(experiment: Experiment) -> dict[str, Any]:
  """Returns nested dicts of JSON values that `parse` takes: what config.json holds."""
  tree: dict[str, Any] = _plain(experiment)
  return tree


def flat(experiment: Experiment) -> dict[str, Any]:
  """Returns the value of every leaf by dotted name."""
  return dict(_walk(plain(experiment), ''))


def leaves() -> list[Leaf]:
  """Returns every key that holds a value, section by section."""
  return list(_leaves(Experiment, ''))


def defaults(section: Any, **stated: Any) -> config_dict.ConfigDict:
  """Returns a section as a configuration holds it, unlocked: its defaults, and what is stated.

  What is required and not stated is left out; pools are none; None is a placeholder, so that flags
  can set it.
  """
  config = config_dict.ConfigDict()
  for name, field in _fields(section).items():
    inner = _inner(field.hint)
    if name in stated:
      config[name] = stated[name]
    elif _pools_of(field.hint):
      config[name] = config_dict.ConfigDict()
    elif dataclasses.is_dataclass(inner):
      config[name] = defaults(inner)
    elif field.required:
      continue
    elif field.default is None:
      config[name] = config_dict.placeholder(inner)
    else:
      config[name] = _plain(field.default)
  return config


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return {name: _plain(getattr(value, name)) for name in _fields(value.__class__)}
  if isinstance(value, Mapping):
    return {name: _plain(inner) for name, inner in sorted(value.items())}
  return ','.join(value) if isinstance(value, tuple) else value


def _walk(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
  for name, value in tree.items():
    if isinstance(value, Mapping):
      yield from _walk(value, f'{prefix}{name}.')
    else:
      yield f'{prefix}{name}', value


def _leaves(section: Any, prefix: str) -> Iterator[Leaf]:
  for name, field in _fields(section).items():
    inner = _inner(field.hint)
    if pool := _pools_of(field.hint):
      yield from _leaves(pool, f'{prefix}{name}.{ANY}.')
    elif dataclasses.is_dataclass(inner):
      yield from _leaves(inner, f'{prefix}{name}.')
    else:
      kind = 'str' if typing.get_origin(inner) is tuple else inner.__name__
      optional = ' or None' if inner is not field.hint else ''
      yield Leaf(f'{prefix}{name}', kind + optional, field.default, field.doc, field.required)


@functools.cache
def _fields(section: Any) -> dict[str, _Field]:
  """Returns a section's fields; `name` is none, which is the key of the section itself."""
  hints, docs = typing.get_type_hints(section), _docs(section)
  fields = {}
  for field in dataclasses.fields(section):
    stated = field.default is not dataclasses.MISSING
    required = not stated and field.default_factory is dataclasses.MISSING
    default = _plain(field.default) if stated else None
    fields[field.name] = _Field(hints[field.name], default, required, docs.get(field.name, ''))
  fields.pop('name', None)
  return fields


def _docs(section: Any) -> dict[str, str]:
  """Returns what the part `Attributes:` of a docstring says, by name."""
  _, _, listed = (inspect.getdoc(section) or '').partition('Attributes:\n')
  listed = re.split(r'^\S', listed, maxsplit=1, flags=re.MULTILINE)[0]
  found = re.findall(r'^  (\w+): (.*(?:\n    .*)*)', listed, flags=re.MULTILINE)
  return {name: ' '.join(text.split()) for name, text in found}


def _inner(hint: Any) -> Any:
  """Returns the type that a field has where it is not None."""
  if isinstance(hint, types.UnionType):
    return next(part for part in typing.get_args(hint) if part is not types.NoneType)
  return hint


def _pools_of(hint: Any) -> Any:
  """Returns the section that a field maps names to; None where it is no mapping."""
  return typing.get_args(hint)[1] if typing.get_origin(hint) is collections.abc.Mapping else None


def _refuse_unknown(
  section: Any, stated: Mapping[str, Any], prefix: str, pools: tuple[str, ...]
) -> None:
  fields = _fields(section)
  for name, value in stated.items():
    if name not in fields:
      hint = checks.nearest(f'{prefix}{name}', _keys(pools))
      raise UnknownKey(f'{prefix}{name} is no key of a configuration{hint}')
    inner, pool = _inner(fields[name].hint), _pools_of(fields[name].hint)
    if not isinstance(value, Mapping):
      continue
    if pool:
      for key, own in value.items():
        if isinstance(own, Mapping):
          _refuse_unknown(pool, own, f'{prefix}{name}.{key}.', pools)
    elif dataclasses.is_dataclass(inner):
      _refuse_unknown(inner, value, f'{prefix}{name}.', pools)


def _keys(pools: tuple[str, ...]) -> list[str]:
  """Returns the dotted names of sections and leaves, for pools of these names."""
  names = {leaf.name.replace(ANY, pool) for leaf in leaves() for pool in pools or (ANY,)}
  sections = {name.rsplit('.', depth)[0] for name in names for depth in (1, 2)}
  return sorted(names | sections)


def _section(section: Any, stated: Any, prefix: str, **known: Any) -> Any:
  """Makes a section of what is stated of it; errors of its own get `prefix`."""
  if not isinstance(stated, Mapping):
    raise ValueError(f'{prefix[:-1]} is {stated!r}; expected a section of keys and values')
  for name, field in _fields(section).items():
    if name in stated:
      known[name] = _value(field.hint, stated[name], f'{prefix}{name}')
    elif field.required:
      raise ValueError(f'{prefix}{name} is not stated; expected {_said(field.hint)}')
  try:
    return section(**known)
  except ValueError as error:
    raise ValueError(f'{prefix}{error}') from None


_KINDS = {bool: 'True or False', int: 'a whole number', float: 'a finite number', str: 'a text'}


def _said(hint: Any) -> str:
  inner = _inner(hint)
  said = _KINDS.get(inner, 'a section of keys and values')
  return said if inner is hint else f'{said}, or None'


def _value(hint: Any, value: Any, name: str) -> Any:
  """Returns a stated value as a field of a section holds it. Raises ValueError by `name`."""
  inner, pool = _inner(hint), _pools_of(hint)
  if value is None and inner is not hint:
    return None
  if pool:
    if not isinstance(value, Mapping):
      raise ValueError(f'{name} is {value!r}; expected pools by name')
    return {key: _section(pool, own, f'{name}.{key}.', name=key) for key, own in value.items()}
  if dataclasses.is_dataclass(inner):
    return _section(inner, value, f'{name}.')
  if typing.get_origin(inner) is tuple:
    if not isinstance(value, str):
      raise ValueError(f'{name} is {value!r}; expected a text, with commas between several')
    return tuple(filter(None, map(str.strip, value.split(','))))
  if inner is float and type(value) in (int, float) and math.isfinite(value):
    return float(value)
  if type(value) is not inner or inner is float:
    raise ValueError(f'{name} is {value!r}; expected {_said(hint)}')
  return value
