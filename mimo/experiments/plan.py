r"""Says what an update takes of each device's memory, before there is a device.

    mimo plan --config=qwen3_6_35b_a3b/mixed [--model=CONFIG.JSON] [--compile=remat,...]
        [--limit_gib=180]

Prints an analytic table, counted from shapes, for each variant of what the backward pass needs:

    keep               every block keeps what its backward pass reads
    remat              keeps the inputs of blocks, and computes the rest again
    remat_offload      the same, with those inputs on the host, and the moments of AdamW

and what the compiled update says, for the variants that --compile names ('' for none). No parameter
is allocated: the update is compiled for shapes, on as many simulated CPU devices as the mesh has.
That backend computes bf16 in float32, has none of the fused kernels of a GPU, and counts what is
offloaded to the host as its own memory, so its temporary memory is an upper bound in most places.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mimo import checks, objectives
from mimo.experiments import cli, command, factories
from mimo.experiments.schema import Experiment
from mimo.models.config import ModelConfig
from mimo.telemetry import console
from mimo.trainer import memory, sharding
from mimo.trainer.packing import empty_micro_batch
from mimo.trainer.update import Trainer

VARIANTS: Mapping[str, dict[str, Any]] = {
  'keep': {'remat': False, 'offload': ()},
  'remat': {'remat': True, 'offload': ()},
  'remat_offload': {'remat': True, 'offload': ('residuals', 'moments')},
}
_GIB = 2**30
_LARGEST = 6
_ITEM_BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 'f32': 4, 's32': 4, 'u32': 4}


class Compiled(NamedTuple):
  """What a compiled program takes of one device, in bytes.

  Attributes:
    beside: what lives on the device meanwhile and is not given to it: the moments of AdamW.
    arguments: what it is given.
    results: what it returns beside what it updates in place.
    temporary: what else it needs at its peak.
    largest: (bytes, type and shape, what makes it) of the largest arrays it names.
  """

  beside: int
  arguments: int
  results: int
  temporary: int
  largest: tuple[tuple[int, str, str], ...]


def read_model(experiment: Experiment, config_file: pathlib.Path, stated: str) -> ModelConfig:
  """Returns the model of the config.json stated, else the policy's, else that beside the config.

  Raises ValueError where there is none.
  """
  places = [pathlib.Path(stated)]
  if not stated:
    places = [config_file.parent / 'config.json']
    if experiment.policy:
      places.insert(0, pathlib.Path(experiment.policy) / 'config.json')
  for place in places:
    if place.is_file():
      return ModelConfig.from_hf(json.loads(place.read_text(encoding='utf-8')))
  if not experiment.policy and not stated:
    return factories.make_policy(experiment.policy, experiment.task).model
  raise ValueError(f'no {" nor ".join(map(str, places))}; expected the config.json of a model')


def make_trainer(experiment: Experiment, model: ModelConfig, changes: Mapping[str, Any]) -> Trainer:
  """Returns the experiment's update with some settings of `TrainerConfig` changed."""
  return Trainer(
    model,
    dataclasses.replace(experiment.trainer, **changes),
    correction=objectives.arm(experiment.arm, experiment.objective).correction,
    temperature=experiment.sampling.temperature,
    num_sources=len(experiment.pools),
    mesh=sharding.make_mesh(**experiment.trainer.mesh_sizes()),
  )


def compile_update(trainer: Trainer, micro: Any) -> Iterator[tuple[str, Compiled]]:
  """Compiles the two programs of an update for shapes alone; yields (name, what it takes)."""
  state = trainer.abstract_state()
  everywhere = sharding.replicated(trainer.mesh)

  def placed(x: Any, where: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

  shapes = jax.eval_shape(trainer.zero_total, state.params)
  total = shapes._replace(
    grads=jax.tree.map(lambda x, like: placed(x, like.sharding), shapes.grads, state.params),
    loss=placed(shapes.loss, everywhere),
    aux=jax.tree.map(lambda x: placed(x, everywhere), shapes.aux),
  )
  micro = jax.tree.map(placed, micro, sharding.micro_shardings(micro, trainer.mesh))
  one = jax.ShapeDtypeStruct((), np.float32, sharding=everywhere)
  moments = sum(map(_on_device, jax.tree.leaves(state.opt_state)))
  yield 'micro_step', _measure(trainer.micro_step.lower(state.params, total, micro, one), moments)
  yield 'apply', _measure(trainer.apply.lower(state, total, one), 0)


def _on_device(x: jax.ShapeDtypeStruct) -> int:
  """Bytes of one device's part of an array; 0 for one that the host keeps."""
  if x.sharding.memory_kind == 'pinned_host':
    return 0
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def _measure(lowered: Any, beside: int) -> Compiled:
  compiled = lowered.compile()
  stats = compiled.memory_analysis()
  return Compiled(
    beside,
    stats.argument_size_in_bytes,
    stats.output_size_in_bytes - stats.alias_size_in_bytes,
    stats.temp_size_in_bytes,
    largest_arrays(compiled.as_text(), _LARGEST),
  )


def largest_arrays(text: str, count: int) -> tuple[tuple[int, str, str], ...]:
  """The largest arrays that a compiled program's text names: (bytes, shape, what makes them).

  Each shape once. Arguments and what only renames an array are left out.
  """
  found: dict[str, tuple[int, str]] = {}
  pattern = re.compile(r'= (\w+)\[([\d,]*)\]\S* ([\w-]+)\(.*?(?:op_name="([^"]*)")?[^"]*$', re.M)
  for kind, dims, operation, name in pattern.findall(text):
    if operation in ('parameter', 'get-tuple-element', 'bitcast', 'tuple', 'constant'):
      continue
    if kind in _ITEM_BYTES:
      size = _ITEM_BYTES[kind] * math.prod(int(dim) for dim in dims.split(',') if dim)
      what = '/'.join(part for part in name.split('/')[-3:] if part) or operation
      found.setdefault(f'{kind}[{dims}]', (size, what))
  ranked = sorted(((size, shape, what) for shape, (size, what) in found.items()), reverse=True)
  return tuple(ranked[:count])


def print_analytic(plans: Mapping[str, memory.Plan], limit_gib: float) -> None:
  """Prints one Markdown table: GiB of a device, by variant."""
  console.say(f'| GiB per device | {" | ".join(plans)} |')
  console.say('|---|' + '---|' * len(plans))
  names = dict.fromkeys(line.name for plan in plans.values() for line in (*plan.state, *plan.step))
  for name in names:
    cells = []
    for plan in plans.values():
      lines = [line for line in (*plan.state, *plan.step) if line.name == name]
      device, host = sum(x.device for x in lines), sum(x.host for x in lines)
      cells.append(f'{device / _GIB:.2f}' + (f' (host {host / _GIB:.2f})' if host else ''))
    console.say(f'| {name} | {" | ".join(cells)} |')
  totals = [f'**{plan.device / _GIB:.1f}**' for plan in plans.values()]
  console.say(f'| at the peak | {" | ".join(totals)} |')
  hosts = [f'{plan.host / _GIB:.1f}' for plan in plans.values()]
  console.say(f'| on the host | {" | ".join(hosts)} |')
  fits = ['yes' if plan.device <= limit_gib * _GIB else 'no' for plan in plans.values()]
  console.say(f'| within {limit_gib:g} | {" | ".join(fits)} |')


def print_compiled(name: str, trainer: Trainer, micro: Any) -> None:
  """Compiles a variant and prints what its programs take."""
  begin = time.perf_counter()
  for program, got in compile_update(trainer, micro):
    sizes = (got.beside, got.arguments, got.results, got.temporary, sum(got[:4]))
    cells = ' | '.join(f'{size / _GIB:.2f}' for size in sizes)
    console.say(f'| {name} | {program} | {cells} |')
    for size, shape, what in got.largest if program == 'micro_step' else ():
      console.say(f'| | {shape} of {what} | | | | {size / _GIB:.2f} | |')
  console.say(f'| | compiled in {time.perf_counter() - begin:.0f} s | | | | | |')


def _chosen(flag: str, text: str) -> list[str]:
  return [checks.one_of(flag, name, VARIANTS) for name in filter(None, text.split(','))]


def plan(experiment: Experiment, model: ModelConfig, compiled: list[str], limit_gib: float) -> None:
  """Prints the plan of an experiment."""
  options = experiment.trainer
  (bucket,) = options.buckets
  total, active = memory.parameter_count(model), memory.active_parameter_count(model)
  console.say(
    f'{model.family}: {total / 1e9:.2f} B parameters, {active / 1e9:.2f} B of them for a token; '
    f'mesh {options.mesh or "of one device"}; micro-batches of {bucket.rows} rows of '
    f'{bucket.tokens} tokens, {bucket.trained} of them trained; {options.compute_dtype}\n'
  )
  count = experiment.sampling.candidates
  plans = {
    name: memory.make_plan(
      model,
      dataclasses.replace(options, **changes),
      bucket,
      num_candidates=count,
      parallel=memory.make_parallel(options.mesh_sizes()),
    )
    for name, changes in VARIANTS.items()
  }
  print_analytic(plans, limit_gib)
  if not compiled:
    return
  console.say(f'\nCompiled for {jax.device_count()} simulated {jax.default_backend()} devices:\n')
  console.say('| variant | program | beside it | arguments | results | temporary | in all |')
  console.say('|---|---|---|---|---|---|---|')
  for name in compiled:
    trainer = make_trainer(experiment, model, VARIANTS[name])
    print_compiled(name, trainer, empty_micro_batch(bucket, count, trainer.routes))


def define_flags(flags: cli.Flags) -> None:
  """Defines the command's flags."""
  flags.flag('model', str, '', "a model's config.json; else the policy's", 'FILE')
  flags.flag('compile', str, ','.join(VARIANTS), "variants to compile, '' for none")
  flags.flag('limit_gib', float, 180.0, 'memory of a device')


def main(given: cli.Given) -> None:
  """Runs the command."""
  stated, experiment = command.stated(given)
  with cli.mistakes():
    compiled = _chosen('--compile', given.compile)
    # Before anything asks for a device.
    jax.config.update('jax_platforms', 'cpu')
    devices = math.prod(experiment.trainer.mesh_sizes().values())
    jax.config.update('jax_num_cpu_devices', devices)
    model = read_model(experiment, stated.file, given.model)
    plan(experiment, model, compiled, given.limit_gib)


COMMAND = command.Command('plan', __doc__, define_flags, main, takes_config=True)

if __name__ == '__main__':
  sys.exit(COMMAND.start())
