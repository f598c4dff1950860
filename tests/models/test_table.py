import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo.models import decoder
from mimo.models.table import (
  from_named_tensors,
  fuse_key,
  hf_params,
  leaf,
  named_tensors,
  nest,
  table,
)

# Written out by hand: Hugging Face name -> [out, in] of the tiny model of conftest.
LAYER = {
  'input_layernorm.weight': (32,),
  'self_attn.q_proj.weight': (64, 32),
  'self_attn.k_proj.weight': (32, 32),
  'self_attn.v_proj.weight': (32, 32),
  'self_attn.o_proj.weight': (32, 64),
  'self_attn.q_norm.weight': (16,),
  'self_attn.k_norm.weight': (16,),
  'post_attention_layernorm.weight': (32,),
  'mlp.gate_proj.weight': (48, 32),
  'mlp.up_proj.weight': (48, 32),
  'mlp.down_proj.weight': (32, 48),
}
SHAPES = {
  'model.embed_tokens.weight': (48, 32),
  **{f'model.layers.{i}.{name}': shape for i in (0, 1) for name, shape in LAYER.items()},
  'model.norm.weight': (32,),
  'lm_head.weight': (48, 32),
}


@pytest.fixture(scope='module')
def tensors(config, params):
  return dict(named_tensors(config, params))


def row_of(config, hf_name):
  return next(row for row in table(config) if row.hf_name == hf_name)


def test_names_shapes_and_order(tensors):
  assert {name: x.shape for name, x in tensors.items()} == SHAPES
  assert list(tensors) == list(SHAPES)


@pytest.mark.parametrize('tied', [True, False])
def test_holds_every_parameter_once(config, tied):
  config = dataclasses.replace(config, tie_embeddings=tied)
  params = jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(1))
  rows = table(config)
  assert len({row.path for row in rows}) == len(rows) == len(jax.tree.leaves(params))
  for row in rows:
    lead = () if row.layers is None else (config.num_layers,)
    assert leaf(params, row.path).shape == row.leaf_shape == (*lead, *row.shape)
    assert leaf(params, row.path).dtype == np.float32
    assert len(row.axes) == len(row.shape)


def test_llama_has_no_head_norms(config):
  config = dataclasses.replace(config, family='llama', qk_norm=False)
  assert not [row for row in table(config) if 'q_norm' in row.path or 'k_norm' in row.path]
  assert len(table(config)) == len(
    jax.tree.leaves(jax.eval_shape(functools.partial(decoder.init, config), jax.random.key(1)))
  )


def test_projections_are_transposed(params, tensors):
  """Head h, dimension n of layer 1's queries reads feature d through row 16 h + n, column d."""
  ours = params['layers']['attention']['q_proj']['kernel']
  theirs = tensors['model.layers.1.self_attn.q_proj.weight']
  assert theirs[16 * 3 + 5, 7] == ours[1, 7, 3, 5]
  ours = params['layers']['attention']['o_proj']['kernel']
  assert tensors['model.layers.1.self_attn.o_proj.weight'][7, 16 * 3 + 5] == ours[1, 3, 5, 7]
  assert tensors['lm_head.weight'][9, 4] == params['head']['kernel'][4, 9]
  assert tensors['model.embed_tokens.weight'][9, 4] == params['embed']['embedding'][9, 4]


def test_what_is_quantised_and_fused(config):
  groups = {}
  for row in table(config):
    if row.quantisable:
      groups.setdefault(row.fuse_group, set()).add(row.path[-2])
  assert groups == {
    'qkv': {'q_proj', 'k_proj', 'v_proj'},
    'gate_up': {'gate_proj', 'up_proj'},
    None: {'o_proj', 'down_proj'},
  }


def test_embedding_and_head_are_sharded_on_one_axis(config):
  for path in (('embed', 'embedding'), ('head', 'kernel')):
    row = next(row for row in table(config) if row.path == path)
    assert [axis for axis in row.axes if axis] == ['vocab']


def test_to_hf_takes_jax_arrays_too(config, params):
  row = row_of(config, 'model.layers.{layer}.self_attn.o_proj.weight')
  x = leaf(params, row.path)[0]
  there = row.to_hf(x)
  assert isinstance(there, jax.Array)
  assert there.shape == row.hf_shape == (32, 64)
  np.testing.assert_array_equal(row.from_hf(there), x)


def test_round_trip_keeps_every_bit(config, params, tensors):
  there = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
  back = from_named_tensors(config, there.__getitem__)
  assert jax.tree.structure(back) == jax.tree.structure(params)
  for name, x in named_tensors(config, back):
    assert x.dtype == np.float32
    assert x.astype(ml_dtypes.bfloat16).tobytes() == there[name].tobytes()


def test_tensors_are_made_one_at_a_time(config, params):
  """The second tensor is not touched before it is asked for."""
  stream = named_tensors(config, {'embed': params['embed']})
  assert next(stream)[0] == 'model.embed_tokens.weight'
  with pytest.raises(KeyError, match='layers'):
    next(stream)


def test_place_gets_each_leaf_and_its_row(config, tensors):
  seen = {}

  def place(row, x):
    seen[row.path] = x.dtype
    return row.axes

  placed = from_named_tensors(config, tensors.__getitem__, np.float16, place=place)
  assert placed['embed']['embedding'] == ('vocab', None)
  assert set(seen) == {row.path for row in table(config)}
  assert set(seen.values()) == {np.dtype(np.float16)}


def test_missing_tensor(config, tensors):
  name = 'model.layers.1.mlp.up_proj.weight'
  fewer = {key: x for key, x in tensors.items() if key != name}
  with pytest.raises(ValueError, match=rf'tensor {name} is missing; expected shape \[48, 32\]'):
    from_named_tensors(config, fewer.__getitem__)


def test_wrong_shape(config, tensors):
  name = 'model.layers.0.self_attn.k_proj.weight'
  wrong = tensors | {name: tensors[name][:16]}
  with pytest.raises(ValueError, match=rf'{name} has shape \[16, 32\]; expected \[32, 32\]'):
    from_named_tensors(config, wrong.__getitem__)


def test_nest_and_leaf():
  nested = nest({('a', 'b'): 1, ('a', 'c'): 2, ('d',): 3})
  assert nested == {'a': {'b': 1, 'c': 2}, 'd': 3}
  assert leaf(nested, ('a', 'c')) == 2


def test_layers_are_named_in_order(config):
  assert [name for name, _, _ in hf_params(config)] == list(SHAPES)
  indices = [index for _, _, index in hf_params(config)]
  assert indices == [()] + [(0,)] * 11 + [(1,)] * 11 + [()] * 2


EXPERT = {'gate_proj.weight': (16, 32), 'up_proj.weight': (16, 32), 'down_proj.weight': (32, 16)}
SHARED = {'gate_proj.weight': (32, 32), 'up_proj.weight': (32, 32), 'down_proj.weight': (32, 32)}
MOE = {
  'post_attention_layernorm.weight': (32,),
  'mlp.gate.weight': (6, 32),
  **{f'mlp.experts.{e}.{name}': shape for e in range(6) for name, shape in EXPERT.items()},
  **{f'mlp.shared_expert.{name}': shape for name, shape in SHARED.items()},
  'mlp.shared_expert_gate.weight': (1, 32),
}
DELTA_LAYER = {
  'input_layernorm.weight': (32,),
  'linear_attn.in_proj_qkv.weight': (80, 32),  # 2 x 2 heads of 8, and 4 of 12
  'linear_attn.in_proj_z.weight': (48, 32),
  'linear_attn.in_proj_b.weight': (4, 32),
  'linear_attn.in_proj_a.weight': (4, 32),
  'linear_attn.conv1d.weight': (80, 1, 4),
  'linear_attn.dt_bias': (4,),
  'linear_attn.A_log': (4,),
  'linear_attn.norm.weight': (12,),
  'linear_attn.out_proj.weight': (32, 48),
  **MOE,
}
GATED_LAYER = {
  'input_layernorm.weight': (32,),
  'self_attn.q_proj.weight': (128, 32),  # queries and gates
  'self_attn.k_proj.weight': (32, 32),
  'self_attn.v_proj.weight': (32, 32),
  'self_attn.o_proj.weight': (32, 64),
  'self_attn.q_norm.weight': (16,),
  'self_attn.k_norm.weight': (16,),
  **MOE,
}
HYBRID_SHAPES = {
  'model.embed_tokens.weight': (48, 32),
  **{
    f'model.layers.{i}.{name}': shape
    for i, layer in enumerate((DELTA_LAYER, GATED_LAYER) * 2)
    for name, shape in layer.items()
  },
  'model.norm.weight': (32,),
  'lm_head.weight': (48, 32),
}


def test_hybrid_names_shapes_and_order(hybrid, hybrid_params):
  tensors = dict(named_tensors(hybrid, hybrid_params))
  assert {name: x.shape for name, x in tensors.items()} == HYBRID_SHAPES
  assert list(tensors) == list(HYBRID_SHAPES)
  # Layers 1 and 3 attend; expert 4 of the second of them.
  stack = hybrid_params['layers']['1']['moe']['experts']['up_proj']['kernel']
  assert stack.shape == (2, 6, 32, 16)
  np.testing.assert_array_equal(
    tensors['model.layers.3.mlp.experts.4.up_proj.weight'], stack[1, 4].T
  )


def test_hybrid_holds_every_parameter_once(hybrid, hybrid_params):
  rows = table(hybrid)
  assert len({row.path for row in rows}) == len(rows) == len(jax.tree.leaves(hybrid_params))
  for row in rows:
    assert leaf(hybrid_params, row.path).shape == row.leaf_shape
    assert len(row.leaf_axes) == len(row.leaf_shape)
    names = dict(row.hf_names())
    assert len(names) == max(1, int(np.prod(row.lead_shape)))
  assert {name for row in rows for name, _ in row.hf_names()} == set(HYBRID_SHAPES)


def test_hybrid_round_trip(hybrid, hybrid_params):
  tensors = dict(named_tensors(hybrid, hybrid_params))
  back = from_named_tensors(hybrid, tensors.__getitem__)
  jax.tree.map(np.testing.assert_array_equal, back, hybrid_params)


def test_what_is_fused_in_a_hybrid(hybrid):
  groups, alone = {}, set()
  for name, row, index in hf_params(hybrid):
    if row.quantisable:
      key = fuse_key(row, index)
      if key is None:
        alone.add(name.split('.', 3)[3])
      else:
        groups.setdefault(key, []).append(name.removesuffix('.weight'))
  fused = {frozenset(group) for group in groups.values()}
  at = 'model.layers'
  assert frozenset(f'{at}.2.linear_attn.in_proj_{n}' for n in ('qkv', 'z')) in fused
  assert frozenset(f'{at}.3.self_attn.{n}_proj' for n in 'qkv') in fused
  assert frozenset(f'{at}.3.mlp.experts.5.{n}_proj' for n in ('gate', 'up')) in fused
  assert frozenset(f'{at}.3.mlp.shared_expert.{n}_proj' for n in ('gate', 'up')) in fused
  assert len(fused) == 2 + 2 + 4 * 6 + 4  # delta nets, attention, experts, shared experts
  assert alone == {
    'linear_attn.out_proj.weight',
    'self_attn.o_proj.weight',
    'mlp.shared_expert.down_proj.weight',
    *(f'mlp.experts.{e}.down_proj.weight' for e in range(6)),
  }


def test_what_stays_plain_in_a_hybrid(hybrid):
  plain = {row.hf_name.split('.')[-2] for row in table(hybrid) if not row.quantisable}
  assert {'gate', 'shared_expert_gate', 'in_proj_a', 'in_proj_b', 'conv1d', 'norm'} <= plain
