"""What an experiment asks for, checked before anything is written, and where a run goes on."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from mimo import objectives
from mimo.experiments import factories, hosts
from mimo.experiments.learner import Learner
from mimo.experiments.schema import Experiment
from mimo.rollouts.base import RolloutSettings
from mimo.rollouts.schedules import Schedule, schedule_of
from mimo.tasks.base import Task
from mimo.trainer.drift import Drift
from mimo.trainer.sharding import make_mesh
from mimo.trainer.state import TrainerConfig
from mimo.trainer.update import Trainer
from mimo.types import SamplingParams
from mimo.weights.checkpoints import Checkpoints, stacks_of
from mimo.weights.views import ViewSpec

_KEPT_CHECKPOINTS = 2


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What an experiment names, read and checked: no device has been asked for."""

  policy: factories.Policy
  task: Task
  arm: objectives.Arm
  sampling: SamplingParams


@dataclasses.dataclass(frozen=True)
class Plan:
  """What an experiment asks for, checked: nothing is written yet."""

  experiment: Experiment
  task: Task
  policy: factories.Policy
  sampling: SamplingParams
  views: dict[str, ViewSpec]
  rollouts: RolloutSettings
  schedule: Schedule
  learner_of: Callable[[Any], Learner]
  abstract_state: Any
  init_state: Callable[[Any], Any]
  peers: hosts.Peers


def read(experiment: Experiment) -> Inputs:
  """Reads what the experiment names. Raises ValueError or OSError for what cannot be meant."""
  factories.check_extras(experiment.wandb_project)
  policy = factories.make_policy(experiment.policy, experiment.task)
  task = factories.make_task(experiment.task, policy)
  for split in ('train', 'heldout'):
    if not task.size(split):
      raise ValueError(f'task {task.name}: split {split!r} holds no tasks; expected at least one')
  _check_sizes(experiment.sampling.candidates, experiment.trainer, task, policy)
  factories.check_pools(experiment.fleet, policy)
  arm = objectives.arm(experiment.arm, experiment.objective)
  sampling = experiment.sampling.params(
    nucleus=arm.topp, max_turn_tokens=task.max_turn_tokens, stop_ids=task.stop_ids
  )
  return Inputs(policy, task, arm, sampling)


def plan(experiment: Experiment) -> Plan:
  """Reads an experiment and makes its update. Raises ValueError or OSError as `read` does."""
  inputs = read(experiment)
  policy, task, arm, sampling = inputs.policy, inputs.task, inputs.arm, inputs.sampling
  options, pools = experiment.trainer, experiment.fleet
  trainer = Trainer(
    policy.model,
    options,
    correction=arm.correction,
    temperature=sampling.temperature,
    num_sources=len(pools),
    mesh=make_mesh(**options.mesh_sizes()),
  )
  peers = hosts.Peers()

  def learner_of(state: Any) -> Learner:
    return Learner(
      trainer,
      state,
      advantage=arm.advantage,
      buckets=options.buckets,
      num_candidates=sampling.candidates,
      sources=[pool.name for pool in pools],
      peers=peers,
      drift=Drift(trainer) if experiment.drift_every_updates else None,
    )

  return Plan(
    experiment=experiment,
    task=task,
    policy=policy,
    sampling=sampling,
    views=factories.make_views(pools, policy, task, block_scale=experiment.block_scale),
    rollouts=RolloutSettings(
      options=experiment.rollouts, sampling=sampling, seed=experiment.seed, incarnation=0
    ),
    schedule=schedule_of(experiment.rollouts),
    learner_of=learner_of,
    abstract_state=trainer.abstract_state(),
    init_state=trainer.init_state,
    peers=peers,
  )


def _check_sizes(
  candidates: int, options: TrainerConfig, task: Task, policy: factories.Policy
) -> None:
  """Raises ValueError naming what is too small for the task, or too large for the policy."""
  if candidates > policy.model.vocab_size:
    raise ValueError(
      f'sampling.candidates is {candidates}; expected at most {policy.model.vocab_size}, the '
      "policy's vocabulary"
    )
  if options.row_tokens < task.max_tokens:
    raise ValueError(
      f'trainer.row_tokens is {options.row_tokens}; expected at least {task.max_tokens}, the '
      f'longest trajectory of {task.name}'
    )
  if options.row_trained_tokens < task.max_sampled_tokens:
    raise ValueError(
      f'trainer.row_trained_tokens is {options.row_trained_tokens}; expected at least '
      f'{task.max_sampled_tokens}, the most that {task.name} lets a policy draw'
    )


def start(plan: Plan, workdir: pathlib.Path) -> tuple[Checkpoints, int | None, Any, dict[str, Any]]:
  """Restores the newest checkpoint, or starts from the policy.

  Returns:
    (the checkpoints, the step restored or None, the training state, the step's meta).
  """
  origin = plan.policy.origin
  checkpoints = Checkpoints(
    workdir / 'checkpoints',
    _KEPT_CHECKPOINTS,
    stacks=stacks_of(plan.policy.model),
    carried=origin.carried if origin else None,
  )
  step = checkpoints.latest()
  if step is None:
    state = plan.init_state(plan.policy.placed(plan.abstract_state.params))
    return checkpoints, step, state, {'rollouts': None, 'ledger': None}
  return checkpoints, step, *checkpoints.restore(step, plan.abstract_state)


def follow(plan: Plan, workdir: pathlib.Path) -> None:
  """What every process but the first does: its part of updates, publications and saves."""
  if plan.peers.hear()[0] != hosts.BEGIN:
    return
  checkpoints, _, state, _ = start(plan, workdir)
  learner = plan.learner_of(state)
  # The first process writes what there is to say beside the arrays.
  learner.follow(lambda update, state: checkpoints.save(update, state, {}))
  checkpoints.wait()
  checkpoints.close()
