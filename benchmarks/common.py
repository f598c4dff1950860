"""What the benchmarks share: the dense head to compare with, timing, sizes of programs."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mimo.objectives import candidate_logps

Head = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@jax.custom_vjp
def _matmul(hidden: jax.Array, head: jax.Array) -> jax.Array:
  """hidden @ head in float32, whose gradient is rounded to the operands' dtype.

  Plain autodiff would multiply a float32 gradient with bfloat16 operands, which costs a GPU more:
  the comparison is of memory and recomputation, so both versions multiply the same types.
  """
  return jnp.dot(hidden, head, preferred_element_type=jnp.float32)


def _matmul_backward(
  operands: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  hidden, head = operands
  gradient = gradient.astype(hidden.dtype)
  dhidden = jnp.dot(gradient, head.T, preferred_element_type=jnp.float32)
  dhead = jnp.dot(hidden.T, gradient, preferred_element_type=jnp.float32)
  return dhidden.astype(hidden.dtype), dhead.astype(head.dtype)


_matmul.defvjp(lambda hidden, head: (_matmul(hidden, head), (hidden, head)), _matmul_backward)


def dense_logps(hidden: jax.Array, head: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The obvious version of `candidate_logps`: a softmax over [N, V], and autodiff."""
  logp = jax.nn.log_softmax(_matmul(hidden, head))
  picked = jnp.take_along_axis(logp, jnp.maximum(ids, 0), axis=-1)
  entropy = jax.lax.stop_gradient(-jnp.sum(jnp.exp(logp) * logp, axis=-1))
  return jnp.where(ids >= 0, picked, 0.0), entropy


def chunked_logps(chunk: int) -> Head:
  """Returns `candidate_logps` at temperature 1 with `chunk` tokens at a time."""
  return lambda hidden, head, ids: candidate_logps(hidden, head, ids, temperature=1.0, chunk=chunk)


def forward_backward(logps: Head) -> Any:
  """Returns a jitted function of (hidden, head, ids, weights): value, entropy, both gradients."""
  return jax.jit(jax.value_and_grad(_loss(logps), argnums=(0, 1), has_aux=True))


def gradients_only(logps: Head) -> Any:
  """Returns a jitted function of (hidden, head, ids, weights): both gradients, nothing else."""
  return jax.jit(jax.grad(lambda *args: _loss(logps)(*args)[0], argnums=(0, 1)))


def _loss(logps: Head) -> Callable[..., tuple[jax.Array, jax.Array]]:
  def loss(
    hidden: jax.Array, head: jax.Array, ids: jax.Array, weights: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    picked, entropy = logps(hidden, head, ids)
    return jnp.sum(picked * weights), entropy

  return loss


def head_shapes(
  tokens: int, width: int, vocab: int, candidates: int, dtype: Any = jnp.float32
) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Shapes of (hidden, head, ids, weights)."""
  return (
    jax.ShapeDtypeStruct((tokens, width), dtype),
    jax.ShapeDtypeStruct((width, vocab), dtype),
    jax.ShapeDtypeStruct((tokens, 1 + candidates), jnp.int32),
    jax.ShapeDtypeStruct((tokens, 1 + candidates), jnp.float32),
  )


def head_arrays(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
  """Random arrays of `head_shapes`."""
  hidden, head, ids, weights = shapes
  keys = jax.random.split(jax.random.key(0), 4)
  return (
    jax.random.normal(keys[0], hidden.shape, hidden.dtype),
    jax.random.normal(keys[1], head.shape, head.dtype) * 0.02,
    jax.random.randint(keys[2], ids.shape, 0, head.shape[1]),
    jax.random.normal(keys[3], weights.shape),
  )


class Timings(NamedTuple):
  """Seconds of each round: `wall` on the clock, `cpu` over all threads of this process."""

  wall: list[float]
  cpu: list[float]


def interleaved(programs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, Timings]:
  """Runs each program once to warm up, then all of them in turn, `rounds` times.

  Taking turns spreads whatever else the machine does over all of them. CPU seconds say more than
  the clock where a machine is never quiet.
  """
  for program in programs.values():
    jax.block_until_ready(program())
  timings = {name: Timings([], []) for name in programs}
  for _ in range(rounds):
    for name, program in programs.items():
      wall, cpu = time.perf_counter(), time.process_time()
      jax.block_until_ready(program())
      timings[name].wall.append(time.perf_counter() - wall)
      timings[name].cpu.append(time.process_time() - cpu)
  return timings


def median_ratio(ours: list[float], theirs: list[float]) -> float:
  """Returns the median over rounds of one program's time over another's in the same round."""
  return statistics.median(x / y for x, y in zip(ours, theirs, strict=True))


def print_timings(timings: Mapping[str, Timings], base: str) -> None:
  """Prints one Markdown table row per program: medians, and ratios to `base` in the same round."""
  print(f'| version | median ms | / {base} | median CPU ms | / {base} |')
  print('|---|---|---|---|---|')
  for name, ours in timings.items():
    cells = []
    for values, theirs in zip(ours, timings[base], strict=True):
      ratio = median_ratio(values, theirs)
      cells += [f'{statistics.median(values) * 1e3:.0f}', f'{ratio:.2f}']
    print(f'| {name} | {" | ".join(cells)} |')


def largest_in_jaxpr(jaxpr: Any) -> int:
  """Returns the element count of the largest array in a jaxpr, inner jaxprs included."""
  return max(_jaxpr_sizes(jaxpr))


def _jaxpr_sizes(jaxpr: Any) -> Iterator[int]:
  for eqn in jaxpr.eqns:
    for var in (*eqn.invars, *eqn.outvars):
      yield int(np.prod(var.aval.shape))
    for param in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, 'eqns')):
      inner = param.jaxpr if hasattr(param, 'jaxpr') else param
      if hasattr(inner, 'eqns'):
        yield from _jaxpr_sizes(inner)


def largest_in_program(text: str) -> int:
  """Returns the element count of the largest array that a compiled program names."""
  shapes = re.findall(r'\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]', text)
  return max(int(np.prod([int(dim) for dim in dims.split(',')])) for dims in set(shapes))


def machine() -> str:
  """Returns one line on where this runs."""
  device = jax.devices()[0]
  return (
    f'{device.device_kind} ({len(jax.devices())} of {device.platform}), '
    f'{os.cpu_count()} CPU cores ({platform.machine()}), jax {jax.__version__}'
  )
