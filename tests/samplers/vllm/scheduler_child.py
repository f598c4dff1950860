"""Draws the same turns through vLLM's own scheduler and through the one that holds outputs back.

    python scheduler_child.py JOB.json

The job holds `view` (a directory) and `out` (an npz file): per engine and request, the tokens, all
that came with them, why it ended and how many outputs brought it; and what the second engine told
of its statistics, step by step.
"""

import collections
import json
import pathlib
import sys

import numpy as np
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState

from mimo.samplers.vllm.internals import scheduler as scheduler_module
from mimo.samplers.vllm.internals.scheduler import IN_BLOCKS
from mimo.samplers.vllm.launch import SCHEDULER

VOCAB, PROMPT, REQUESTS, TURN, ABORTED, STOCK = 512, 12, 8, 100, 2, 5


def params(index, stop, in_blocks):
  """All but one in blocks; of several widths; one stops at an id, one has a nucleus."""
  return SamplingParams(
    temperature=1.0,
    top_p=0.2 if index == 3 else 1.0,
    seed=index,
    max_tokens=TURN - index,
    logprobs=129 - 20 * index if index < 6 else 1,
    stop_token_ids=[stop] if stop is not None and index == 1 else [],
    flat_logprobs=True,
    detokenize=False,
    ignore_eos=True,
    output_kind=RequestOutputKind.FINAL_ONLY,
    extra_args=dict(IN_BLOCKS) if in_blocks and index != STOCK else None,
  )


def start(view, scheduler):
  return LLM(
    view,
    dtype='float32',
    max_model_len=256,
    max_num_seqs=16,
    block_size=32,
    num_gpu_blocks_override=16,  # too few for all requests at once
    enforce_eager=True,
    skip_tokenizer_init=True,
    generation_config='vllm',
    logprobs_mode='processed_logprobs',
    max_logprobs=-1,
    enable_prefix_caching=False,
    distributed_executor_backend='uni',
    disable_log_stats=False,
    scheduler_cls=scheduler,
  )


def draw(llm, in_blocks, stop):
  """Returns what each request brought, the outputs that it took and how many were preempted.

  One request is aborted on the way, and then all are paused: tokens that were held must come before
  the engine stands still.
  """
  engine = llm.llm_engine
  scheduler, processor = engine.engine_core.engine_core.scheduler, engine.output_processor
  counts, process = collections.Counter(), processor.process_outputs

  def counted(outputs, *args, **kwargs):
    counts.update(output.request_id.split('-')[0] for output in outputs)
    return process(outputs, *args, **kwargs)

  processor.process_outputs = counted
  prompts = np.random.default_rng(0).integers(0, VOCAB, (REQUESTS, PROMPT)).tolist()
  for index, prompt in enumerate(prompts):
    chosen = params(index, stop, in_blocks)
    engine.add_request(str(index), {'prompt_token_ids': prompt}, chosen)
  found, preempted, steps = {}, set(), 0
  while engine.has_unfinished_requests():
    for output in engine.step():
      found[int(output.request_id)] = output.outputs[0]
    preempted |= {r.request_id for r in scheduler.requests.values() if r.num_preemptions}
    steps += 1
    if steps == 20:
      engine.abort_request([str(ABORTED)])
    if steps == 30:
      scheduler.set_pause_state(PauseState.PAUSED_ALL)
      while scheduler.has_requests():
        engine.step()
      drawn = {r.request_id: r.num_output_tokens for r in scheduler.requests.values()}
      came = {
        name: processor.request_states[name].detokenizer.num_output_tokens() for name in drawn
      }
      assert drawn == came, (drawn, came)
      scheduler.set_pause_state(PauseState.UNPAUSED)
  processor.process_outputs = process
  return found, counts, len(preempted)


def statistics(llm, secs):
  """Returns, per step, (how many run as told or -1, how many outputs) of two turns in blocks.

  One of them is aborted after ten steps. `secs` is how often is told without outputs.
  """
  scheduler_module.STATS_SECS, scheduler_module.BLOCK_SECS = secs, 1e9
  engine = llm.llm_engine
  scheduler, steps = engine.engine_core.engine_core.scheduler, []
  update = scheduler.update_from_output
  assert not list(scheduler._held.release({}))  # from here on it is `BLOCK_SECS` to the next one

  def recorded(*args):
    found = update(*args)
    told = [m.scheduler_stats for m in found.values() if m.scheduler_stats is not None]
    running = told[0].num_running_reqs if told else -1
    steps.append((running, sum(len(m.outputs) for m in found.values())))
    return found

  scheduler.update_from_output = recorded
  for name in ('a', 'b'):
    engine.add_request(name, {'prompt_token_ids': [1] * PROMPT}, params(TURN - 40, None, True))
  while engine.has_unfinished_requests():
    engine.step()
    if len(steps) == 10:
      engine.abort_request(['b'])
  scheduler.update_from_output = update
  return steps


def main():
  job = json.loads(pathlib.Path(sys.argv[1]).read_text())
  llm = start(job['view'], None)
  stop = draw(llm, False, None)[0][1].token_ids[70]  # an id that comes late in a turn
  draws = {'stock': draw(llm, False, stop)}
  del llm
  llm = start(job['view'], SCHEDULER)
  draws['blocks'] = draw(llm, True, stop)
  out = {f'told.{secs}': np.array(statistics(llm, secs)) for secs in (1e9, 0)}
  for name, (found, counts, preempted) in draws.items():
    for index, turn in found.items():
      key = f'{name}.{index}'
      out[f'{key}.tokens'] = np.array(turn.token_ids)
      out[f'{key}.finish'] = np.array([turn.finish_reason, str(turn.stop_reason)])
      out[f'{key}.outputs'] = np.array(counts[str(index)])
      for field in ('token_ids', 'logprobs', 'ranks', 'start_indices', 'end_indices'):
        out[f'{key}.{field}'] = np.array(getattr(turn.logprobs, field))
    out[f'{name}.preempted'] = np.array(preempted)
  np.savez(job['out'], **out)


if __name__ == '__main__':
  main()
