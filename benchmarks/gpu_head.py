"""The chunked head against a dense one on one GPU: time, FLOP/s and peak memory.

    python -m benchmarks.gpu_head [--tokens 8192 --width 1024 --vocab 151936 --chunks 512 1024 2048]

bfloat16 hidden states and head, float32 logits. Times come from one process in which the versions
take turns; each peak comes from a process of its own, since a peak never falls. FLOP/s count the
matmuls that a version really does (dense 3, chunked 4, of 2 N D V each), beside a plain matmul of
hidden [N, D] and head [D, V]. Under 3 minutes at the default size.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp

from benchmarks import common

_MATMULS = {'matmul': 1, 'dense': 3}
_CHUNKED_MATMULS = 4


def _versions(chunks: list[int]) -> dict[str, common.Head]:
  versions: dict[str, common.Head] = {'dense': common.dense_logps}
  return versions | {f'chunk {chunk}': common.chunked_logps(chunk) for chunk in chunks}


def _peak_bytes() -> int | None:
  stats = jax.local_devices()[0].memory_stats()
  return stats['peak_bytes_in_use'] if stats else None


def _measure_peak(name: str, args: argparse.Namespace) -> None:
  """Runs one version twice and prints its peak, less the arguments, as JSON."""
  shapes = common.head_shapes(args.tokens, args.width, args.vocab, args.candidates, jnp.bfloat16)
  arrays = jax.block_until_ready(common.head_arrays(shapes))
  step = common.forward_backward(_versions(args.chunks)[name])
  compiled = step.lower(*arrays).compile()
  for _ in range(2):
    jax.block_until_ready(compiled(*arrays))
  held = sum(x.nbytes for x in arrays)
  peak = _peak_bytes()
  print(
    json.dumps(
      {
        'peak': None if peak is None else peak - held,
        'temporary': compiled.memory_analysis().temp_size_in_bytes,
      }
    )
  )


def _peak_in_own_process(name: str) -> dict[str, int | None]:
  # Without preallocation, and with each allocation given back, the peak is what the program needs.
  environment = {**os.environ, 'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  command = [sys.executable, '-m', 'benchmarks.gpu_head', *sys.argv[1:], '--peak-of', name]
  done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
  if done.returncode:
    print(f'{name}: peak not measured: {done.stderr.strip().splitlines()[-1:]}')
    return {'peak': None, 'temporary': None}
  result: dict[str, int | None] = json.loads(done.stdout.splitlines()[-1])
  return result


def _gigabytes(count: int | None) -> str:
  return 'n/a' if count is None else f'{count / 1e9:.2f}'


def main() -> None:
  """Prints one Markdown table row per version."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--tokens', type=int, default=8192)
  parser.add_argument('--width', type=int, default=1024)
  parser.add_argument('--vocab', type=int, default=151936)
  parser.add_argument('--candidates', type=int, default=128)
  parser.add_argument('--chunks', type=int, nargs='+', default=[512, 1024, 2048])
  parser.add_argument('--rounds', type=int, default=10)
  parser.add_argument('--peak-of', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.peak_of:
    _measure_peak(args.peak_of, args)
    return

  versions = _versions(args.chunks)
  peaks = {name: _peak_in_own_process(name) for name in versions}  # before this one takes memory
  shapes = common.head_shapes(args.tokens, args.width, args.vocab, args.candidates, jnp.bfloat16)
  arrays = common.head_arrays(shapes)
  matmul = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.bfloat16))
  programs = {'matmul': functools.partial(matmul, arrays[0], arrays[1])}
  programs |= {
    name: functools.partial(common.forward_backward(logps), *arrays)
    for name, logps in versions.items()
  }
  secs = {name: both.wall for name, both in common.interleaved(programs, args.rounds).items()}
  print(common.machine())
  print(f'N={args.tokens} D={args.width} V={args.vocab} K={args.candidates}, bfloat16')
  print('| version | median ms | / dense | TFLOP/s | of matmul | peak GB | temporary GB |')
  print('|---|---|---|---|---|---|---|')
  one = 2 * args.tokens * args.width * args.vocab
  plain = one / statistics.median(secs['matmul'])
  for name, values in secs.items():
    median = statistics.median(values)
    rate = _MATMULS.get(name, _CHUNKED_MATMULS) * one / median
    peak = peaks.get(name, {'peak': None, 'temporary': None})
    print(
      f'| {name} | {median * 1e3:.2f} | {common.median_ratio(values, secs["dense"]):.2f} '
      f'| {rate / 1e12:.1f} | {rate / plain:.0%} '
      f'| {_gigabytes(peak["peak"])} | {_gigabytes(peak["temporary"])} |'
    )


if __name__ == '__main__':
  main()
