"""A full-width checkpoint of Qwen3.6-35B-A3B, cut to a few layers, in and out: memory and speed.

    python -m benchmarks.export_at_size [--rounds 3] [--directory DIR] [--small]

Hugging Face -> Orbax -> bf16, fp8 (fp8_block) and nvfp4 (nvfp4_w4a16) views. Each stage runs in a
process of its own, whose peak resident memory is shown (files are read by read(2), so the page
cache is not in it) beside the bound: the largest layer, or embedding, plus 2 GiB. Beside each stage
the plain way writes the same tensors: mapped from files in the page cache, so that reading them
costs nothing, they are cast by numpy, each in one piece, and saved in shards by the safetensors
library. Both take turns, and both find their input in the page cache; MB/s are bytes written over
seconds. Needs four times the checkpoint's size of disk.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
import safetensors.numpy

from benchmarks import common
from mimo.models.config import ModelConfig
from mimo.models.table import fuse_key, hf_params
from mimo.weights import huggingface, layouts
from mimo.weights.checkpoints import open_policy, write_policy
from mimo.weights.encoder import Encoding, write_checkpoint
from mimo.weights.shards import SHARD_BYTES, write_tensors
from mimo.weights.tensors import TensorReader
from mimo.weights.views import ViewSpec, write_view

STAGES = {'import': 'bf16', 'bf16': 'bf16', 'fp8': 'fp8_block', 'nvfp4': 'nvfp4_w4a16'}
_POOL = 1 << 24
_GIB = 2**30
_GROUP_SIZES = {'qkv': 3, 'in_proj': 2, 'gate_up': 2}

FULL = {
  'num_hidden_layers': 4,
  'hidden_size': 2048,
  'vocab_size': 248_320,
  'num_attention_heads': 16,
  'num_key_value_heads': 2,
  'head_dim': 256,
  'num_experts': 256,
  'num_experts_per_tok': 8,
  'moe_intermediate_size': 512,
  'shared_expert_intermediate_size': 512,
  'linear_num_key_heads': 16,
  'linear_num_value_heads': 32,
  'linear_key_head_dim': 128,
  'linear_value_head_dim': 128,
  'linear_conv_kernel_dim': 4,
}
SMALL = FULL | {'hidden_size': 512, 'vocab_size': 16_384, 'num_experts': 32}


def raw_config(sizes: dict[str, int]) -> dict[str, object]:
  """Returns config.json's content."""
  text = {
    **sizes,
    'model_type': 'qwen3_5_moe_text',
    'max_position_embeddings': 262_144,
    'rms_norm_eps': 1e-6,
    'full_attention_interval': 4,
    'rope_parameters': {
      'rope_theta': 1e7,
      'rope_type': 'default',
      'partial_rotary_factor': 0.25,
    },
  }
  vision = {'model_type': 'qwen3_5_moe', 'hidden_size': 1152}
  return {
    'model_type': 'qwen3_5_moe',
    'text_config': text,
    'vision_config': vision,
    'tie_word_embeddings': False,
  }


def write_source(directory: pathlib.Path, sizes: dict[str, int]) -> None:
  """Writes the Hugging Face checkpoint: random weights, and some that are carried along."""
  config = ModelConfig.from_hf(raw_config(sizes))
  rng = np.random.default_rng(0)
  pool = (rng.standard_normal(_POOL, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

  def tensors() -> Iterator[tuple[str, np.ndarray]]:
    for i, (name, row, _) in enumerate(hf_params(config)):
      count = math.prod(row.hf_shape)
      begin = 7919 * i % (_POOL - count) if count < _POOL else 0
      x = pool[begin : begin + count] if count < _POOL else np.resize(pool, count)
      yield name, x.reshape(row.hf_shape)

  width = sizes['hidden_size']
  extra = {
    'model.visual.blocks.0.attn.qkv.weight': pool[: 3456 * 1152].reshape(3456, 1152),
    'mtp.fc.weight': pool[: 2 * width * width].reshape(width, 2 * width),
  }
  with huggingface.new_directory(directory) as temporary:
    carried_from = temporary / 'carried'
    carried_from.mkdir()
    write_tensors(carried_from, extra.items())
    carried = layouts.Carried(TensorReader(carried_from), tuple(sorted(extra)))
    origin = layouts.Origin(layouts.Layout.published(config), carried)
    write_checkpoint(temporary, config, tensors(), Encoding('bf16'), origin)
    shutil.rmtree(carried_from)
    huggingface.write_config(temporary, config.to_hf())


def largest_layer_bytes(config: ModelConfig) -> int:
  """Returns the bytes in bf16 of the largest layer, or of the embedding."""
  sizes: dict[object, int] = {}
  for name, row, index in hf_params(config):
    layer = None if row.layers is None else row.layers[index[0]]
    key = name if layer is None else layer
    sizes[key] = sizes.get(key, 0) + 2 * math.prod(row.hf_shape)
  return max(sizes.values())


def ours(stage: str, root: pathlib.Path, out: pathlib.Path) -> float:
  """Runs a stage. Returns its seconds."""
  begin = time.perf_counter()
  if stage == 'import':
    write_policy(out, huggingface.open_model(root / 'source'))
  else:
    source = open_policy(root / 'orbax')
    write_view(
      out,
      source.config,
      source.tensors(ml_dtypes.bfloat16),
      ViewSpec(STAGES[stage]),
      tokenizer_files=source.tokenizer_files,
      origin=source.origin,
    )
  return time.perf_counter() - begin


class _Shards:
  """Collects tensors, and saves a shard when it is full."""

  def __init__(self, out: pathlib.Path) -> None:
    self._out = out
    self._held: dict[str, np.ndarray] = {}
    self._shards = 0

  def add(self, tensors: dict[str, np.ndarray]) -> None:
    """Adds tensors."""
    self._held |= tensors
    if sum(x.nbytes for x in self._held.values()) >= SHARD_BYTES:
      self.save()

  def save(self) -> None:
    """Saves what is held."""
    path = self._out / f'{self._shards}.safetensors'
    safetensors.numpy.save_file(self._held, path, metadata={'format': 'pt'})
    self._held = {}
    self._shards += 1


def plain(stage: str, root: pathlib.Path, out: pathlib.Path) -> float:
  """Writes what `ours` writes in the plain way. Returns its seconds."""
  out.mkdir()
  source = huggingface.open_model(root / 'source')
  layout = source.origin.layout
  mapped = {
    path: np.memmap(path, np.uint8, 'r') for path in (root / 'source').glob('*.safetensors')
  }
  reader = TensorReader(root / 'source')

  def view(name: str) -> np.ndarray:
    """A tensor in the page cache, not copied."""
    info = reader.info(name)
    size = 2 * math.prod(info.shape)
    bits = mapped[info.file][info.offset : info.offset + size]
    return np.asarray(bits).view(ml_dtypes.bfloat16).reshape(info.shape)

  begin = time.perf_counter()
  shards = _Shards(out)
  encode = {'fp8': plain_fp8_block, 'nvfp4': plain_nvfp4}.get(stage)
  groups: dict[object, dict[str, np.ndarray]] = {}
  if encode is None:
    for name in reader.names():
      shards.add({name: view(name)})
  else:
    for name, row, index in hf_params(source.config):
      place = layout.place(row, index)
      x = view(place.name)[place.index]
      x = x if place.rows is None else x[place.rows]
      if not row.quantisable:
        shards.add({name: x})
        continue
      key = fuse_key(row, index) or name
      groups.setdefault(key, {})[name] = x
      if len(groups[key]) == _GROUP_SIZES.get(row.fuse_group, 1):
        shards.add(encode(groups.pop(key)))
    assert not groups and source.origin.carried is not None
    for name in source.origin.carried.names:
      shards.add({name: view(name)})
  shards.save()
  return time.perf_counter() - begin


def plain_fp8_block(group: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Scales of 128 x 128 blocks, whose rows and columns are multiples of 128 here."""
  parts = {}
  for name, x in group.items():
    rows, columns = x.shape
    blocks = x.astype(np.float32).reshape(rows // 128, 128, columns // 128, 128)
    amax = np.abs(blocks).max(axis=(1, 3))
    scale = np.where(amax > 0, amax / np.float32(448), np.float32(1))
    scaled = np.clip(blocks / scale[:, None, :, None], -448, 448).reshape(rows, columns)
    parts[name] = scaled.astype(ml_dtypes.float8_e4m3fn)
    parts[f'{name}_scale_inv'] = scale
  return parts


def plain_nvfp4(group: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Scales of 16 elements under one of the group."""
  parts = {}
  values = {name: x.astype(np.float32) for name, x in group.items()}
  shared = np.float32(2688) / max(np.abs(x).max() for x in values.values())
  for name, x in values.items():
    blocks = x.reshape(x.shape[0], -1, 16)
    scale = np.clip(np.abs(blocks).max(axis=2) / np.float32(6) * shared, 2**-9, 448)
    scale = scale.astype(ml_dtypes.float8_e4m3fn)
    scaled = blocks / (scale.astype(np.float32) / shared)[:, :, None]
    codes = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).reshape(x.shape)
    parts[f'{name}_packed'] = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    parts[f'{name}_scale'] = scale
    parts[f'{name}_global_scale'] = np.array([shared], np.float32)
  return parts


def stage_in_process(way: str, stage: str, root: pathlib.Path, out: pathlib.Path) -> None:
  """Runs one stage and prints what it took."""
  begin = time.process_time()
  seconds = {'ours': ours, 'plain': plain}[way](stage, root, out)
  status = pathlib.Path('/proc/self/status').read_text()
  peak = int(status.split('VmHWM:')[1].split()[0]) * 1024
  cpu = time.process_time() - begin
  print(json.dumps({'seconds': seconds, 'cpu': cpu, 'peak_bytes': peak}))


def run(way: str, stage: str, root: pathlib.Path, out: pathlib.Path) -> dict[str, float]:
  """Runs one stage in a process of its own: its input in memory, and nothing owed to the disk."""
  shutil.rmtree(out, ignore_errors=True)
  read_from = root / ('source' if way == 'plain' or stage == 'import' else 'orbax')
  for path in root.iterdir():
    if path != read_from:
      forget(path)
  warm(read_from)
  command = [sys.executable, '-m', 'benchmarks.export_at_size', '--stage', way, stage]
  command += ['--directory', str(root), '--out', str(out)]
  done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
  result = json.loads(done.stdout.splitlines()[-1])
  return result | {'bytes': sum(p.stat().st_size for p in out.rglob('*') if p.is_file())}


def warm(root: pathlib.Path) -> None:
  """Reads every file once, so that the page cache has it."""
  os.sync()
  for path in root.rglob('*'):
    if path.is_file():
      with path.open('rb', buffering=0) as file:
        while file.read(1 << 24):
          pass


def forget(root: pathlib.Path) -> None:
  """Has the page cache forget every file."""
  os.sync()
  for path in root.rglob('*'):
    if path.is_file():
      with path.open('rb') as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(root: pathlib.Path, sizes: dict[str, int], rounds: int) -> None:
  """Prints a table of the stages."""
  begin = time.perf_counter()
  write_source(root / 'source', sizes)
  config = ModelConfig.from_hf(raw_config(sizes))
  size = sum(p.stat().st_size for p in (root / 'source').iterdir())
  bound = largest_layer_bytes(config) + 2 * _GIB
  print(
    f'{common.machine()}; checkpoint of {size / _GIB:.2f} GiB made in '
    f'{time.perf_counter() - begin:.0f} s; bound {bound / _GIB:.2f} GiB',
    flush=True,
  )
  print(
    '| stage | GiB written | peak GiB | MB/s | plain MB/s | ratio | rounds | CPU s | plain CPU s |'
  )
  print('|---|---|---|---|---|---|---|---|---|')
  for stage in STAGES:
    pairs = []
    for _ in range(rounds):
      out = {'ours': root / ('orbax' if stage == 'import' else stage), 'plain': root / 'plain'}
      pairs.append({way: run(way, stage, root, path) for way, path in out.items()})
      shutil.rmtree(out['plain'])
      if stage != 'import':
        shutil.rmtree(out['ours'])
    speeds = {way: [p[way]['bytes'] / p[way]['seconds'] for p in pairs] for way in pairs[0]}
    ratios = [a / b for a, b in zip(speeds['ours'], speeds['plain'], strict=True)]
    median = {way: statistics.median(x) / 1e6 for way, x in speeds.items()}
    print(
      f'| {stage} | {pairs[0]["ours"]["bytes"] / _GIB:.2f} '
      f'| {max(p["ours"]["peak_bytes"] for p in pairs) / _GIB:.2f} '
      f'| {median["ours"]:.0f} | {median["plain"]:.0f} | {statistics.median(ratios):.2f} '
      f'| {", ".join(f"{ratio:.2f}" for ratio in ratios)} '
      f'| {statistics.median(p["ours"]["cpu"] for p in pairs):.1f} '
      f'| {statistics.median(p["plain"]["cpu"] for p in pairs):.1f} |',
      flush=True,
    )


def main() -> None:
  """Reads the flags."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--small', action='store_true', help='1/4 of the width, 1/8 of the experts')
  parser.add_argument('--directory', default=None, help='where the files go; removed afterwards')
  parser.add_argument('--stage', nargs=2, default=None, help=argparse.SUPPRESS)
  parser.add_argument('--out', default=None, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.stage:
    stage_in_process(*args.stage, pathlib.Path(args.directory), pathlib.Path(args.out))
    return
  with tempfile.TemporaryDirectory(dir=args.directory, prefix='at-size-') as root:
    measure(pathlib.Path(root), SMALL if args.small else FULL, args.rounds)


if __name__ == '__main__':
  main()
