"""What a configuration asks for, checked before anything is written, and where a run goes on."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import config_dict

from mimo import fleet
from mimo.experiments import factories, hosts, settings
from mimo.experiments.learner import Learner
from mimo.rollouts.base import RolloutSettings
from mimo.rollouts.schedules import Schedule, schedule_of
from mimo.tasks.base import Task
from mimo.trainer.drift import Drift
from mimo.types import SamplingParams
from mimo.weights.checkpoints import Checkpoints, stacks_of
from mimo.weights.views import ViewSpec

_KEPT_CHECKPOINTS = 2


@dataclasses.dataclass(frozen=True)
class Plan:
  """What a configuration asks for, checked: nothing is written yet."""

  config: config_dict.ConfigDict
  task: Task
  policy: factories.Policy
  pools: tuple[fleet.Pool, ...]
  sampling: SamplingParams
  views: dict[str, ViewSpec]
  rollouts: RolloutSettings
  schedule: Schedule
  learner_of: Callable[[Any], Learner]
  abstract_state: Any
  init_state: Callable[[Any], Any]
  peers: hosts.Peers


def plan(config: config_dict.ConfigDict) -> Plan:
  """Reads what the configuration names. Raises ValueError or OSError for what cannot be meant."""
  settings.check(config)
  policy = factories.make_policy(config.policy, config.task)
  task = factories.make_task(config.task, policy)
  for split in ('train', 'heldout'):
    if not task.size(split):
      raise ValueError(f'task {task.name}: split {split!r} holds no tasks; expected at least one')
  factories.check_extras(config)
  arm = factories.make_arm(config)
  sampling = factories.make_sampling(config, arm, task)
  pools = factories.make_pools(config)
  if config.trainer.row_tokens < task.max_tokens:
    raise ValueError(
      f'trainer.row_tokens is {config.trainer.row_tokens}; expected at least '
      f'{task.max_tokens}, the longest trajectory of {task.name}'
    )
  if config.trainer.row_trained_tokens < task.max_sampled_tokens:
    raise ValueError(
      f'trainer.row_trained_tokens is {config.trainer.row_trained_tokens}; expected at least '
      f'{task.max_sampled_tokens}, the most that {task.name} lets a policy draw'
    )
  rollouts = factories.make_rollout_settings(config, sampling)
  trainer = factories.make_trainer(config, policy.model, arm, len(pools))
  peers = hosts.Peers()

  def learner_of(state: Any) -> Learner:
    return Learner(
      trainer,
      state,
      advantage=arm.advantage,
      buckets=factories.make_buckets(config),
      num_candidates=config.sampling.candidates,
      sources=[pool.name for pool in pools],
      peers=peers,
      drift=Drift(trainer) if config.drift_every_updates else None,
    )

  return Plan(
    config=config,
    task=task,
    policy=policy,
    pools=pools,
    sampling=sampling,
    views=factories.make_views(config, pools, policy, task),
    rollouts=rollouts,
    schedule=schedule_of(rollouts.options),
    learner_of=learner_of,
    abstract_state=trainer.abstract_state(),
    init_state=trainer.init_state,
    peers=peers,
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
