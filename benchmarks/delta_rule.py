"""Time of the chunked delta rule against token scans, one after another in one run.

    python -m benchmarks.delta_rule [--tokens 4096 --kv-heads 2 --heads 4 --dim 128 --chunks 64]

Two token scans: `products` multiplies and sums elementwise, as the recurrence is written;
`matvec` is `delta.step`, whose matrix-vector products keep a head's state in cache. The backward
pass of a token scan holds a state per token (and more): the sizes here take it to 3 GB. So versions
do not take turns: memory that one frees would be new again, and not yet mapped, to the next.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import common
from mimo.models import delta

Rule = Callable[..., jax.Array]


def products_step(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  log_decay: jax.Array,
  beta: jax.Array,
  state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """`delta.step`, without matmuls."""
  group = v.shape[1] // k.shape[1]
  q, k = (jnp.repeat(x, group, axis=1)[..., None] for x in (q, k))
  state = state * jnp.exp(log_decay)[..., None, None]
  added = beta[..., None] * (v - jnp.sum(state * k, axis=-2))
  state = state + k * added[..., None, :]
  return jnp.sum(state * q, axis=-2), state


def token_scan(step: Any) -> Rule:
  """Returns a scan of `step` over the tokens of q, k, v, log_decay and beta."""

  def run(q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> jax.Array:
    def one(state: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
      out, state = step(*token, state)
      return state, out

    start = jnp.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1]))
    tokens = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, *rest))
    return jnp.moveaxis(jax.lax.scan(one, start, tokens)[1], 0, 1)

  return run


def chunked(chunk: int) -> Rule:
  """Returns `delta.chunked` over rows of one segment."""

  def run(*args: jax.Array) -> jax.Array:
    segment_ids = jnp.ones(args[0].shape[:2], jnp.int32)
    return delta.chunked(*args, segment_ids, chunk=chunk)[0]

  return run


def arrays(tokens: int, kv_heads: int, heads: int, dim: int) -> tuple[jax.Array, ...]:
  """One row: q, k, v, log_decay, beta, as a mixer makes them."""
  keys = jax.random.split(jax.random.key(0), 5)
  q, k = (delta.unit(jax.random.normal(key, (1, tokens, kv_heads, dim))) for key in keys[:2])
  v = jax.random.normal(keys[2], (1, tokens, heads, dim))
  gate, beta = (jax.random.normal(key, (1, tokens, heads)) for key in keys[3:])
  return q * dim**-0.5, k, v, -0.1 * jax.nn.softplus(gate), jax.nn.sigmoid(beta)


def gradients(rule: Rule) -> Any:
  """The gradients of q, k, v, log_decay and beta of a weighted sum of the results."""
  loss = lambda *args: jnp.sum(rule(*args[:-1]) * args[-1])
  return jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4))


def main() -> None:
  """Prints one Markdown table for each of forward, and forward and backward."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
  parser.add_argument('--tokens', type=int, default=4096)
  parser.add_argument('--kv-heads', type=int, default=2)
  parser.add_argument('--heads', type=int, default=4)
  parser.add_argument('--dim', type=int, default=128)
  parser.add_argument('--chunks', type=int, nargs='+', default=[64])
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--only-memory', action='store_true', help='compile, run nothing')
  args = parser.parse_args()

  print(common.machine())
  print(
    f'T={args.tokens} Hk={args.kv_heads} Hv={args.heads} Dk=Dv={args.dim}, float32; '
    f'{args.rounds} rounds'
  )
  inputs = arrays(args.tokens, args.kv_heads, args.heads, args.dim)
  rules = {f'chunk {chunk}': chunked(chunk) for chunk in args.chunks}
  rules |= {'products': token_scan(products_step), 'matvec': token_scan(delta.step)}
  base = f'chunk {args.chunks[0]}'
  weights = jax.random.normal(jax.random.key(1), inputs[2].shape)
  cases = {'forward': (lambda rule: rule, inputs)}
  cases['forward and backward'] = (gradients, (*inputs, weights))
  for title, (make, given) in cases.items():
    compiled = {name: jax.jit(make(rule)).lower(*given).compile() for name, rule in rules.items()}
    temporary = {
      n: round(c.memory_analysis().temp_size_in_bytes / 1e6) for n, c in compiled.items()
    }
    print(f'\n{title}; temporary MB: {temporary}\n')
    if args.only_memory:
      continue
    timings: dict[str, common.Timings] = {}
    for name, program in compiled.items():
      timings |= common.interleaved({name: functools.partial(program, *given)}, args.rounds)
    common.print_timings(timings, base)


if __name__ == '__main__':
  main()
