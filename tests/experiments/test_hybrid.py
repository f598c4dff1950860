"""A tiny policy of delta nets, gated attention and experts goes through the whole loop."""

import jax
import numpy as np

from mimo.experiments import learner, train
from mimo.models import decoder
from mimo.models.config import ModelConfig
from mimo.models.table import ROUTER, leaf, table
from mimo.tasks.repair import vocabulary
from mimo.telemetry import writers
from mimo.weights.checkpoints import load_policy
from mimo.weights.huggingface import write_model
from mimo.weights.publication import ViewFollower
from mimo.weights.store import FileStore
from mimo.weights.views import read_view

_MODEL = {
  'model_type': 'qwen3_5_moe_text',
  'vocab_size': 128,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'layer_types': ['linear_attention', 'full_attention'],
  'num_attention_heads': 2,
  'num_key_value_heads': 1,
  'head_dim': 16,
  'max_position_embeddings': 256,
  'num_experts': 4,
  'num_experts_per_tok': 2,
  'moe_intermediate_size': 16,
  'shared_expert_intermediate_size': 16,
  'linear_num_key_heads': 1,
  'linear_num_value_heads': 2,
  'linear_key_head_dim': 8,
  'linear_value_head_dim': 8,
  'linear_conv_kernel_dim': 4,
  'rope_parameters': {'rope_theta': 1e4, 'rope_type': 'default'},
  'tie_word_embeddings': False,
}
_FORMATS = {'a100_bf16': 'bf16', 'h100_fp8': 'fp8_channel', 'b200_nvfp4': 'nvfp4_w4a16'}


def test_two_updates_from_three_views(tiny_config, tmp_path, monkeypatch) -> None:
  model = ModelConfig.from_hf(_MODEL)
  before = decoder.init(model, jax.random.key(0))
  write_model(tmp_path / 'policy', model, before, vocabulary.tokenizer_files())
  with tiny_config.unlocked():
    tiny_config.policy = str(tmp_path / 'policy')
    tiny_config.updates = 2
    tiny_config.trainer.freeze_router = True
    tiny_config.trainer.replay_routes = True
    for name, form in _FORMATS.items():
      tiny_config.pools[name].format = form
      tiny_config.pools[name].kv_cache_dtype = 'bf16'  # pools that compute alike compile once
  # A random policy earns nothing: so that it learns all the same, every other episode is praised.
  monkeypatch.setattr(
    learner, 'advantages', lambda rewards, rule: np.resize([1.0, -1.0], len(rewards))
  )
  train.train(tiny_config, str(tmp_path / 'run'))

  records = writers.read(tmp_path / 'run' / 'metrics.jsonl')
  first = next(record for record in records if 'rollout/reward' in record)
  kl = {
    form: first[f'source/{pool}/kl']
    for pool, form in _FORMATS.items()
    if f'source/{pool}/kl' in first
  }
  # The bf16 pool serves the trainer's very policy, through another code path and rounded caches.
  assert kl['bf16'] < 1e-5
  assert all(1e-5 < kl[form] < 0.5 for form in kl if form != 'bf16')
  # Its routes are the trainer's own; experts that were rounded are chosen a little differently.
  other = {
    form: first[f'source/{pool}/route_difference'] for pool, form in _FORMATS.items() if form in kl
  }
  assert other['bf16'] < 0.01 and all(0 < other[form] < 0.5 for form in other if form != 'bf16')
  assert 0 < first['train/route_difference'] < 0.5

  config, after, _ = load_policy(tmp_path / 'run')
  assert config.family == 'qwen3_5_moe_text' and config.pattern == model.pattern
  for row in table(model):
    old = np.asarray(leaf(before, row.path)).astype('bfloat16').astype(np.float32)
    new = np.asarray(leaf(after, row.path))
    frozen = row.path[-2:] == ROUTER
    assert np.array_equal(old, new) == frozen, row.hf_name

  store = FileStore(tmp_path / 'run' / 'store')
  for form in _FORMATS.values():
    follower = ViewFollower(store, form)
    version = follower.latest()
    assert version is not None and version.update == 2
    view = read_view(follower.open(version))
    assert (view.config.family, view.format) == (config.family, form)
    for row in table(model):
      served, held = (np.asarray(leaf(tree, row.path)) for tree in (view.params, after))
      lost = np.linalg.norm(served - held) / np.linalg.norm(held)
      assert lost < (0.2 if row.quantisable and form != 'bf16' else 0.01), (form, row.hf_name)
