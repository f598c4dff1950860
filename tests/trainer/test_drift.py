"""The two parts of the gradient against a direct computation, and where one of them vanishes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mimo import objectives
from mimo.trainer import packing, sharding, update
from mimo.trainer.drift import Drift
from mimo.trainer.rounding import policy_params
from mimo.trainer.state import TrainerConfig

K = 24  # the whole vocabulary


@pytest.fixture(scope='module')
def trainer(model):
  return update.Trainer(
    model,
    TrainerConfig(learning_rate=1e-2, head_chunk_tokens=16),
    correction=objectives.arm('grpo').correction,
    temperature=0.7,
    num_sources=1,
    mesh=sharding.make_mesh(),
  )


@pytest.fixture(scope='module')
def batch(make_trajectories):
  trajectories = make_trajectories([9, 12, 7, 8], candidates=4, pools=('a',), temperature=0.7)
  return packing.pack(
    trajectories,
    np.array([1.0, -0.5, 0.25, 2.0], np.float32),
    buckets=(packing.Bucket(rows=2, tokens=24, trained=20),),
    num_candidates=K,
    sources=('a',),
    temperature=0.7,
  )


def _gradient(trainer, params, batch, center):
  correction = dataclasses.replace(trainer.spec.correction, center=center)
  spec = trainer.spec._replace(correction=correction)

  def loss(policy):
    parts = (
      update.objective(
        spec, micro, *update.token_logps(spec, policy, micro), jnp.float32(batch.trained)
      )[0]
      for micro in batch.micro
    )
    return sum(parts)

  return jax.grad(loss)(policy_params(params))


def test_the_parts_are_those_of_the_gradient(trainer, params, batch):
  got = Drift(trainer).measure(params, batch)
  plain, centred = (_gradient(trainer, params, batch, center) for center in (False, True))
  difference = jax.tree.map(lambda a, b: a - b, plain, centred)
  norm, drift = float(optax.tree.norm(centred)), float(optax.tree.norm(difference))
  assert got['covariance_norm'] == pytest.approx(norm, rel=1e-4)
  assert got['mean_score_norm'] == pytest.approx(drift, rel=1e-4)
  assert got['drift'] == pytest.approx(drift / norm, rel=1e-4) and got['drift'] > 0.1
  cosine = float(optax.tree.vdot(centred, difference)) / norm / drift
  assert got['drift_cosine'] == pytest.approx(cosine, rel=1e-3)


def test_there_is_no_drift_where_the_sampler_is_the_trainer(trainer, params, batch):
  """Records of the trainer's own distribution over the whole vocabulary."""
  measure = Drift(trainer).measure
  micro_batches = []
  for micro in batch.micro:
    ids = np.broadcast_to(np.arange(K, dtype=np.int32), micro.candidate_ids.shape)
    whole = micro._replace(candidate_ids=ids)
    logps, _ = update.token_logps(trainer.spec, policy_params(params), whole)
    logps = np.asarray(logps)
    micro_batches.append(
      whole._replace(
        candidate_logps=logps[..., 1:],
        logp_sampler=logps[..., 0],
        full_support=np.ones_like(micro.full_support),
      )
    )
  got = measure(params, dataclasses.replace(batch, micro=micro_batches))
  assert got['drift'] < 1e-4 and got['covariance_norm'] > 0.01
