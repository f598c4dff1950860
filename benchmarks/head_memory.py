"""Memory of the chunked head against a dense one, from the compiled programs: nothing is run.

    python -m benchmarks.head_memory [--tokens 8192 --width 1024 --vocab 151936 --candidates 128]

For each version: the largest array in the jaxpr and in the compiled program (as a share of [N, V]),
and the program's temporary memory, forward and backward in one program.
"""

from __future__ import annotations

import argparse

from benchmarks import common


def main() -> None:
  """Prints one Markdown table row per version."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--tokens', type=int, default=8192)
  parser.add_argument('--width', type=int, default=1024)
  parser.add_argument('--vocab', type=int, default=151936)
  parser.add_argument('--candidates', type=int, default=128)
  parser.add_argument('--chunks', type=int, nargs='+', default=[128, 256, 512])
  args = parser.parse_args()

  print(common.machine())
  print(f'N={args.tokens} D={args.width} V={args.vocab} K={args.candidates}, float32')
  print('| version | program | in jaxpr / NV | compiled / NV | temporary GB | dense / this |')
  print('|---|---|---|---|---|---|')
  shapes = common.head_shapes(args.tokens, args.width, args.vocab, args.candidates)
  logits = args.tokens * args.vocab
  versions: dict[str, common.Head] = {'dense': common.dense_logps}
  versions |= {f'chunk {chunk}': common.chunked_logps(chunk) for chunk in args.chunks}
  programs = {
    'value, entropy, gradients': common.forward_backward,
    'gradients only': common.gradients_only,
  }
  for program, make in programs.items():
    dense_bytes = 0
    for name, logps in versions.items():
      traced = make(logps).trace(*shapes)
      compiled = traced.lower().compile()
      temporary = compiled.memory_analysis().temp_size_in_bytes
      dense_bytes = dense_bytes or temporary
      in_jaxpr = common.largest_in_jaxpr(traced.jaxpr.jaxpr) / logits
      in_program = common.largest_in_program(compiled.as_text()) / logits
      print(
        f'| {name} | {program} | {in_jaxpr:.3f} | {in_program:.3f} | {temporary / 1e9:.2f} '
        f'| {dense_bytes / temporary:.1f} |',
        flush=True,
      )


if __name__ == '__main__':
  main()
