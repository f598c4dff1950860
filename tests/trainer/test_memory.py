"""Counts of memory against sums by hand."""

import json
import pathlib

import pytest

from mimo.models.config import ModelConfig
from mimo.trainer import memory
from mimo.trainer.packing import Bucket, empty_micro_batch
from mimo.trainer.state import TrainerConfig, replayed_routes

_QWEN = pathlib.Path(__file__).parents[2] / 'configs' / 'qwen3_6_35b_a3b' / 'config.json'


@pytest.fixture(scope='module')
def qwen() -> ModelConfig:
  return ModelConfig.from_hf(json.loads(_QWEN.read_text()))


def test_parameters_of_the_studys_policy(qwen):
  d, vocabulary = 2048, 248_320
  # q and its gate, k, v, o, two norms of heads.
  attention = d * 16 * 512 + 2 * d * 2 * 256 + 16 * 256 * d + 2 * 256
  # q, k and v end to end, z, a and b, the convolution, dt_bias and A_log, a norm, out.
  channels = 2 * 16 * 128 + 32 * 128
  delta = d * channels + d * 4096 + 2 * d * 32 + 4 * channels + 2 * 32 + 128 + 4096 * d
  expert = 3 * d * 512
  outside = d * 256 + expert + d  # router, the shared expert and its gate
  norms = 40 * 2 * d + d
  rest = 2 * vocabulary * d + norms + 10 * attention + 30 * delta + 40 * outside
  assert memory.parameter_count(qwen) == rest + 40 * 256 * expert
  assert memory.active_parameter_count(qwen) == rest + 40 * 8 * expert


def test_a_dense_model_by_hand(model):
  """Two layers of 16 features, 4 heads of 8, 2 key heads, mlp 24, vocabulary 24, on 4 devices."""
  parallel = memory.make_parallel({'fsdp': 2, 'context': 2})
  bucket = Bucket(tokens=32, trained=8, rows=4)
  config = TrainerConfig(learning_rate=1.0, remat=True, head_chunk_tokens=4)
  plan = memory.make_plan(model, config, bucket, num_candidates=3, parallel=parallel)
  # Matrices are split over all four devices, norms over none.
  layer = 16 * (4 + 2 + 2) * 8 + 4 * 8 * 16 + 3 * 16 * 24
  stored = (24 * 16 + 2 * layer) // 4 + 2 * (2 * 16 + 2 * 8) + 16
  lines = {line.name: line for line in (*plan.state, *plan.step)}
  assert lines['parameters'].device == 4 * stored
  assert lines['moments'].device == 8 * stored
  assert lines['gradient sums'].device == lines['gradient of the micro-step'].device == 4 * stored
  # Two of four rows and half of each row's tokens; the inputs of two blocks.
  assert lines['inputs of blocks'].device == 2 * (2 * 16) * 16 * 4
  assert lines['embedding gathered, and its gradient'].device == 2 * 4 * 24 * 16
  assert plan.device == sum(line.device for line in lines.values()) and plan.host == 0


def test_what_goes_to_the_host(qwen):
  parallel = memory.make_parallel({'fsdp': 4, 'context': 8})
  bucket = Bucket(tokens=262_144, trained=1024, rows=4)

  def plan(**changes):
    config = TrainerConfig(learning_rate=1.0, compute_dtype='bfloat16', **changes)
    return memory.make_plan(qwen, config, bucket, num_candidates=1, parallel=parallel)

  remat, away = plan(remat=True), plan(remat=True, offload=('residuals', 'moments'))
  kept = 40 * (262_144 // 8) * 2048 * 2
  moments = {line.name: line for line in remat.state}['moments'].device
  assert away.host == kept + moments
  assert remat.device - away.device == away.host
  assert plan().device > 5 * remat.device


def test_a_micro_batch_with_the_routes_that_are_replayed(qwen):
  """40 layers, 8 experts each, 2 bytes an id."""
  bucket, parallel = Bucket(tokens=16, trained=8, rows=2), memory.make_parallel({})
  for replayed in (False, True):
    config = TrainerConfig(learning_rate=1.0, replay_routes=replayed)
    plan = memory.make_plan(qwen, config, bucket, num_candidates=3, parallel=parallel)
    micro = empty_micro_batch(bucket, 3, replayed_routes(qwen, config))
    counted = {line.name: line for line in plan.step}['micro-batch'].device
    assert counted == sum(leaf.nbytes for leaf in micro if leaf is not None)
    assert (micro.routes is None) != replayed
  assert micro.routes.nbytes == 32 * 40 * 8 * 2
