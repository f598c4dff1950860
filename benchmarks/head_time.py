"""Time of the chunked head against a dense one, forward and backward, taking turns in one run.

    python -m benchmarks.head_time [--tokens 1024 --width 1024 --vocab 151936 --candidates 128]

The dense version holds several [N, V] float32 arrays: choose --tokens so that they fit.
"""

from __future__ import annotations

import argparse
import functools

from benchmarks import common


def main() -> None:
  """Prints one Markdown table row per version."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--tokens', type=int, default=1024)
  parser.add_argument('--width', type=int, default=1024)
  parser.add_argument('--vocab', type=int, default=151936)
  parser.add_argument('--candidates', type=int, default=128)
  parser.add_argument('--chunks', type=int, nargs='+', default=[128, 256, 512])
  parser.add_argument('--rounds', type=int, default=5)
  args = parser.parse_args()

  print(common.machine())
  print(
    f'N={args.tokens} D={args.width} V={args.vocab} K={args.candidates}, float32; '
    f'{args.rounds} rounds'
  )
  arrays = common.head_arrays(
    common.head_shapes(args.tokens, args.width, args.vocab, args.candidates)
  )
  versions: dict[str, common.Head] = {'dense': common.dense_logps}
  versions |= {f'chunk {chunk}': common.chunked_logps(chunk) for chunk in args.chunks}
  programs = {
    name: functools.partial(common.forward_backward(logps), *arrays)
    for name, logps in versions.items()
  }
  common.print_timings(common.interleaved(programs, args.rounds), 'dense')


if __name__ == '__main__':
  main()
