import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from mimo.models import decoder
from mimo.models.table import (
  from_named_tensors,
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
