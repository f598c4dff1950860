import functools
import json
import pathlib
import random

import jax
import numpy as np
import pytest

from mimo.experiments import pretrain
from mimo.models import decoder
from mimo.models.table import named_tensors
from mimo.tasks.repair import POLICY_DIR, demonstrations, vocabulary
from mimo.weights.huggingface import read_model, read_tokenizer_files, write_model

TINY = pretrain.Recipe(
  stages=(pretrain.Stage(2, pretrain.CAREFUL), pretrain.Stage(1, demonstrations.HABITS)),
  rows=2,
  row_tokens=64,
)


@pytest.fixture(scope='module')
def batch() -> pretrain.Batch:
  return pretrain.fill(random.Random(0), demonstrations.HABITS, 4, 96)


def test_a_row_holds_whole_demonstrations_end_to_end(batch: pretrain.Batch):
  rng = random.Random(0)
  problems, habits = pretrain.problems, demonstrations.HABITS
  for row in range(4):
    count = batch.segment_ids[row].max()
    assert count >= 1
    for segment in range(1, count + 1):
      shown = demonstrations.demonstrate(problems.generate('train', rng), rng, habits)
      here = batch.segment_ids[row] == segment
      np.testing.assert_array_equal(batch.tokens[row][here], shown.tokens)
      np.testing.assert_array_equal(batch.agent[row][here], shown.agent)
      np.testing.assert_array_equal(batch.positions[row][here], np.arange(len(shown.tokens)))
    # What did not fit opens the next row in `fill`; here it has to be drawn again.
    if row < 3:
      rng = _replay(batch, row + 1)
  assert not batch.agent[batch.segment_ids == 0].any()


def _replay(batch: pretrain.Batch, rows: int) -> random.Random:
  """A generator in the state in which `fill` draws the first demonstration of row `rows`."""
  rng = random.Random(0)
  for _ in range(int(batch.segment_ids[:rows].max(axis=1).sum())):
    demonstrations.demonstrate(pretrain.problems.generate('train', rng), rng, demonstrations.HABITS)
  return rng


def test_the_loss_is_that_of_agent_tokens_alone(batch: pretrain.Batch):
  params = decoder.init(pretrain.MODEL, jax.random.key(1))
  forward = jax.jit(functools.partial(decoder.forward, pretrain.MODEL))
  hidden = forward(params, batch.tokens, batch.segment_ids, batch.positions)
  logits = np.asarray(hidden, np.float64) @ np.asarray(params['embed']['embedding'], np.float64).T
  logps = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  rows, columns = np.nonzero(batch.agent)
  expected = -logps[rows, columns - 1, batch.tokens[rows, columns]].mean()
  np.testing.assert_allclose(jax.jit(pretrain.loss)(params, batch), expected, rtol=1e-5)


def test_teaching_is_a_function_of_the_seed():
  steps: list[int] = []
  first = pretrain.teach(TINY, 3, lambda step, value: steps.append(step))
  again = pretrain.teach(TINY, 3)
  for one, two in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
    np.testing.assert_array_equal(one, two)
  assert steps == [3]


def test_least_solved_is_the_lowest_quarter():
  rewards = np.array([[1, 1], [0, 0], [0, 1], [1, 1], [0, 1], [1, 1], [1, 1], [1, 1]], float)
  ids = ['h', 'g', 'f', 'e', 'd', 'c', 'b', 'a']
  assert pretrain.least_solved(ids, rewards) == ['d', 'g']  # the tie of d and f by name
  rewards[0, 0] = np.nan
  with pytest.raises(ValueError, match='1 rewards are missing'):
    pretrain.least_solved(ids, rewards)


def test_what_is_written_is_read_back(tmp_path: pathlib.Path):
  params = decoder.init(pretrain.MODEL, jax.random.key(1))
  write_model(tmp_path / 'out', pretrain.MODEL, params, vocabulary.tokenizer_files())
  config, _ = read_model(tmp_path / 'out')
  assert (config.hidden_size, config.vocab_size, config.head_dim) == (128, 128, 32)


@pytest.mark.parametrize(
  ('flags', 'message'),
  [
    (['--out={full}'], 'not empty'),
    (['--out={full}/a/b'], 'no directory'),
    (['--out={full}/a', '--hard_samples=-1'], '--hard_samples is -1'),
    # jax takes the seed modulo 2**32: this one would be seed 0.
    (['--out={full}/a', '--seed=4294967296'], '--seed is 4294967296; expected a whole number'),
  ],
)
def test_mistakes_end_in_one_line(tmp_path: pathlib.Path, flags: list[str], message: str):
  (tmp_path / 'file').touch()
  with pytest.raises(ValueError, match=message):
    given = dict(flag.format(full=tmp_path).removeprefix('--').split('=') for flag in flags)
    pretrain._check(given['out'], int(given.get('hard_samples', 0)), int(given.get('seed', 0)))


def test_another_decoder(tmp_path: pathlib.Path):
  path = tmp_path / 'config.json'
  stated = pretrain.MODEL.to_hf() | {
    'model_type': 'qwen3_moe',
    'num_experts': 4,
    'num_experts_per_tok': 2,
    'moe_intermediate_size': 64,
  }
  path.write_text(json.dumps(stated))
  model = pretrain.read_decoder(str(path))
  assert model.moe is not None and model.moe.num_experts == 4
  assert json.loads(dict(model.extra)['eos_token_id']) == vocabulary.STOP_ID
  path.write_text(json.dumps(stated | {'vocab_size': 5}))
  with pytest.raises(ValueError, match='vocab_size is 5; expected at least'):
    pretrain.read_decoder(str(path))
  path.write_text(json.dumps(stated | {'model_type': 'gpt2'}))
  with pytest.raises(ValueError, match=r"--model: .*config.json: model_type is 'gpt2'"):
    pretrain.read_decoder(str(path))
  with pytest.raises(ValueError, match=r'--model: .*nowhere'):
    pretrain.read_decoder(str(tmp_path / 'nowhere'))


def test_the_command_names_a_mistake(tmp_path: pathlib.Path, run_command):
  (tmp_path / 'file').touch()
  assert run_command(pretrain.COMMAND).returncode == 2
  done = run_command(pretrain.COMMAND, f'--out={tmp_path}')
  assert done.returncode == 1
  assert done.stderr.count('\n') == 1
  assert 'not empty' in done.stderr


def test_the_shipped_policy_is_of_this_recipe():
  config, params = read_model(POLICY_DIR)
  assert config.to_hf() == {**pretrain.MODEL.to_hf(), 'dtype': 'bfloat16'}
  assert sum(x.size for _, x in named_tensors(config, params)) <= 1_000_000
  assert sum(file.stat().st_size for file in POLICY_DIR.iterdir()) <= 4_000_000
  assert read_tokenizer_files(POLICY_DIR) == vocabulary.tokenizer_files()


def test_the_shipped_policy_knows_the_demonstrations():
  """Far below the 2.1 nats of tokens at random among those that a turn allows."""
  _, params = read_model(POLICY_DIR)
  shown = pretrain.fill(random.Random('shipped'), demonstrations.HABITS, 16, 96)
  assert float(jax.jit(pretrain.loss)(params, shown)) < 1.0
