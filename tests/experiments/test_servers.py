"""What each pool's server is started with; nothing is started here."""

import dataclasses
import importlib.util
import pathlib
import runpy

import pytest

from mimo import fleet
from mimo.experiments import factories, schema, servers
from mimo.models.config import ModelConfig
from mimo.models.parts import MoEConfig
from mimo.types import RouteShape, SamplingParams
from mimo.weights.store import FileStore

_ROOT = pathlib.Path(__file__).parents[2]

_PARAMS = SamplingParams(1.0, 0.97, 8, 16, 32, (2,))


def _config(name: str):
  return runpy.run_path(str(_ROOT / 'configs' / name))['get_config']()


def _pools(name: str):
  return schema.parse(_config(name)).fleet


@pytest.fixture
def installed(monkeypatch):
  """Whether vLLM is here or not, it seems to be."""
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: object())


def _servers(tmp_path, pools, tiny_policy, *, moe=None, routes=False):
  model = factories.make_policy(tiny_policy, 'repair').model
  assert isinstance(model, ModelConfig)
  if moe is not None:
    model = dataclasses.replace(model, family='qwen3_moe', intermediate_size=0, moe=moe)
  return servers.Servers(
    FileStore(tmp_path / 'store'),
    model,
    _PARAMS,
    max_tokens=96,
    directory=tmp_path / 'servers',
    routes=routes,
    pools=pools,
  )


def test_what_is_missing_is_named(monkeypatch) -> None:
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r"pools\.cpu_bf16\.server is 'vllm', which needs vllm and"):
    servers.check_pool(_pools('mixed_vllm.py')[0])


@pytest.mark.parametrize(
  ('key', 'value', 'words'),
  [
    ('format', 'fp8_block', "format is 'fp8_block'; expected one of bf16, fp8_channel, nvfp4_w4a4"),
    ('kv_cache_dtype', 'fp8', "kv_cache_dtype is 'fp8'; expected 'bf16'"),
    ('server', 'vlm', "server is 'vlm'; expected one of native, vllm; did you mean 'vllm'"),
    ('accelerator', '0xH100', "accelerator is '0xH100'; expected 1 to 64 GPUs"),
  ],
)
def test_what_no_server_here_can_be_is_refused(installed, key, value, words) -> None:
  config = _config('mixed_vllm.py')
  config.pools.cpu_fp8[key] = value
  with pytest.raises(ValueError, match=f'pools.cpu_fp8.{words}'):
    for pool in schema.parse(config).fleet:
      servers.check_pool(pool)


def test_a_server_on_cores(installed, tmp_path, tiny_policy, monkeypatch) -> None:
  monkeypatch.setattr(servers.os, 'cpu_count', lambda: 8)
  pools = _pools('mixed_vllm.py')
  assert {pool.replica_usd_per_hour for pool in pools} == {0.0}
  made = _servers(tmp_path, pools, tiny_policy)
  by_format = {pool.format: made._settings(pool, tmp_path / 'view', 8000) for pool in pools}
  bf16, nvfp4 = by_format['bf16'], by_format['nvfp4_w4a4']
  assert (bf16.device, bf16.dtype, bf16.cpu_threads) == ('cpu', 'float32', 2)
  assert (bf16.max_tokens, bf16.max_candidates, bf16.max_sessions) == (96, 16, 8)
  assert bf16.patches == ('fast_topk',)
  assert nvfp4.patches == ('fast_topk', 'nvfp4_emulation')
  assert not made._visible(pools[0])
  contract = made.sampler(pools[0]).contract
  assert (contract.source, contract.max_tokens) == (pools[0].source, 96)
  assert (contract.logprob_mode, contract.logits_dtype) == ('processed', 'float32')


def test_what_a_server_says_of_itself_becomes_scalars(installed, tmp_path, tiny_policy) -> None:
  pools = _pools('mixed_vllm.py')
  sampler = _servers(tmp_path, pools, tiny_policy).sampler(pools[0])
  scalars = servers.replica_metrics([sampler])
  assert scalars['replica/cpu_bf16/serving'] == 0.0
  assert scalars['replica/cpu_bf16/version'] == -1.0
  assert scalars['replica/cpu_bf16/starts'] == 0.0


def test_servers_on_gpus_share_none(installed, tmp_path, tiny_policy, monkeypatch) -> None:
  config = _config('mixed_vllm_gpu.py')
  config.pools.h100_fp8.accelerator = '2xH100'
  pools = schema.parse(config).fleet
  assert [(pool.gpu, pool.gpus_per_replica) for pool in pools] == [
    ('H100', 1),
    ('H100', 2),
    ('H100', 1),
  ]
  assert pools[1].replica_usd_per_hour == 2 * fleet.list_price('H100')
  made = _servers(tmp_path, pools, tiny_policy)
  monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
  visible = [made._visible(pool)['CUDA_VISIBLE_DEVICES'] for pool in pools]
  assert visible == ['0', '1,2', '3']
  monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5,7')
  assert made._visible(pools[1])['CUDA_VISIBLE_DEVICES'] == '5,7'
  with pytest.raises(ValueError, match='h100_nvfp4: 3 GPUs are visible; expected at least 4'):
    made._visible(pools[2])
  stated = made._settings(pools[1], tmp_path / 'view', 8000)
  assert (stated.device, stated.dtype, stated.kv_cache_dtype) == ('gpu', 'bfloat16', 'fp8')
  assert stated.sampling_mask
  assert stated.extra == ('--tensor-parallel-size', '2')
  whole = dataclasses.replace(_PARAMS, top_k=0)
  made._sampling = whole
  assert not made._settings(pools[1], tmp_path / 'view', 8000).sampling_mask


def test_servers_on_gpus_tell_routes_where_there_are_experts(
  installed, tmp_path, tiny_policy
) -> None:
  moe = MoEConfig(8, 2, 64, 0, True)
  for name, told in (('mixed_vllm_gpu.py', True), ('mixed_vllm.py', False)):
    pool = _pools(name)[0]
    made = _servers(tmp_path, [pool], tiny_policy, moe=moe, routes=True)
    shape = RouteShape(made._model.num_layers, 8, 2) if told else None
    assert made.sampler(pool).contract.routes == shape
    assert made._settings(pool, tmp_path / 'view', 8000).routes == told
    dense = _servers(tmp_path, [pool], tiny_policy, routes=True)
    assert dense.sampler(pool).contract.routes is None
    assert not dense._settings(pool, tmp_path / 'view', 8000).routes
