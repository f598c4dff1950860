"""One process of `test_hosts`: two updates of a tiny model, its weights gathered, a checkpoint.

python tests/experiments/hosts_child.py OUT    (MIMO_COORDINATOR, MIMO_PROCESSES, MIMO_PROCESS)
"""

import pathlib
import sys

import jax
import numpy as np

from benchmarks import sharding_matrix
from mimo import objectives
from mimo.experiments import hosts
from mimo.experiments.learner import Learner
from mimo.trainer import packing, sharding
from mimo.trainer.state import TrainerConfig
from mimo.trainer.update import Trainer
from mimo.weights.checkpoints import Checkpoints

CONFIG = TrainerConfig(
  learning_rate=1e-2, eps=1e-6, max_grad_norm=0.0, warmup_updates=0, head_chunk_tokens=32
)
BUCKET = packing.Bucket(
  tokens=sharding_matrix.TOKENS, trained=sharding_matrix.TRAINED, rows=sharding_matrix.ROWS
)


def make_learner(**sizes: int) -> tuple[Trainer, Learner, packing.Batch]:
  """Returns a trainer and its learner on a mesh, and a batch to learn from."""
  case = sharding_matrix.make_case('dense')
  trainer = Trainer(
    case.model,
    CONFIG,
    correction=objectives.arm('sc_mis').correction,
    temperature=1.0,
    num_sources=2,
    mesh=sharding.make_mesh(**sizes),
  )
  learner = Learner(
    trainer,
    trainer.init_state(case.params),
    advantage='group_mean',
    buckets=[BUCKET],
    num_candidates=sharding_matrix.CANDIDATES,
    sources=['a', 'b'],
    peers=hosts.Peers(),
  )
  micro = case.micro
  batch = packing.Batch((micro,), (), int(micro.mask.sum()), 7, 9)
  return trainer, learner, batch


def main() -> None:
  """Runs one process to its end."""
  out = pathlib.Path(sys.argv[1])
  hosts.start(hosts.from_environment(hosts.Cluster()))
  assert jax.device_count() == 2 * jax.local_device_count() == 4
  trainer, learner, batch = make_learner(fsdp=2, context=2)
  peers = hosts.Peers()
  checkpoints = Checkpoints(out / 'checkpoints', 1)
  if not peers.primary:
    learner.follow(lambda update, state: checkpoints.save(update, state, {}))
    checkpoints.close()
    return
  losses = []
  for _ in range(2):
    peers.send_batch(batch, [BUCKET])
    learner.state, metrics = trainer.update(learner.state, batch)
    losses.append(float(metrics['loss']))
  tensors = {name: x.astype(np.float32) for name, x in learner.snapshot()}
  learner.before_save(2)
  checkpoints.save(2, learner.state, {'said': 'by the first'})
  peers.tell(hosts.STOP)
  checkpoints.close()
  np.savez(out / 'first.npz', losses=losses, **tensors)


if __name__ == '__main__':
  main()
