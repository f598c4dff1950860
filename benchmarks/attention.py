"""Time and memory of blockwise attention against a dense one, taking turns in one run.

    python -m benchmarks.attention [--tokens 2048 --heads 4 --kv-heads 2 --dim 64 --blocks 256]

`dense` holds the scores of all pairs, as a softmax over a [T, T] mask does; choose --tokens so that
they fit. With --only-memory nothing is run: temporary memory of the compiled programs alone.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common
from mimo.models import blockwise

Attend = Callable[..., jax.Array]


def gradients(attend: Attend) -> Any:
  """The gradients of q, k and v of a sum of squares."""
  loss = lambda *args: jnp.sum(attend(*args).astype(jnp.float32) ** 2)
  return jax.grad(loss, argnums=(0, 1, 2))


def main() -> None:
  """Prints tables of memory and, unless told not to, of time."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--tokens', type=int, default=2048)
  parser.add_argument('--segments', type=int, default=1)
  parser.add_argument('--heads', type=int, default=4)
  parser.add_argument('--kv-heads', type=int, default=2)
  parser.add_argument('--dim', type=int, default=64)
  parser.add_argument('--blocks', type=int, nargs='+', default=[blockwise.BLOCK])
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--only-memory', action='store_true')
  args = parser.parse_args()

  print(common.machine())
  print(
    f'T={args.tokens} in {args.segments} segments, H={args.heads} Hkv={args.kv_heads} '
    f'Dh={args.dim}, float32; {args.rounds} rounds'
  )
  ids = 1 + np.arange(args.tokens, dtype=np.int32)[None] * args.segments // args.tokens
  shapes = [(1, args.tokens, heads, args.dim) for heads in (args.heads,) + (args.kv_heads,) * 2]
  versions: dict[str, Attend] = {
    name: functools.partial(blockwise.attend, segment_ids=ids, block=block)
    for name, block in [('dense', args.tokens)] + [(f'block {b}', b) for b in args.blocks]
  }
  for title, make in (('forward', lambda attend: attend), ('gradients', gradients)):
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = {name: jax.jit(make(a)).lower(*inputs).compile() for name, a in versions.items()}
    print(f'\n{title}\n\n| version | temporary MB |\n|---|---|')
    for name, program in compiled.items():
      print(f'| {name} | {program.memory_analysis().temp_size_in_bytes / 1e6:.0f} |')
    if not args.only_memory:
      keys = jax.random.split(jax.random.key(0), 3)
      arrays = [jax.random.normal(*pair) for pair in zip(keys, shapes, strict=True)]
      programs = {name: functools.partial(c, *arrays) for name, c in compiled.items()}
      print()
      common.print_timings(common.interleaved(programs, args.rounds), 'dense')


if __name__ == '__main__':
  main()
