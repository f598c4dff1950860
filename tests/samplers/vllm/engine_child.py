"""Runs a real vLLM engine on two views in one process, and writes what it drew to a file.

    python engine_child.py JOB.json

The job holds `first`, `second` (view directories) and `out` (an npz file). vLLM keeps state in its
process, so each test of an engine has a process of its own.
"""

import json
import pathlib
import sys

import numpy as np

PROMPTS, PROMPT_TOKENS, TURN_TOKENS, TOP = 8, 12, 16, 64


def engine(directory):
  from vllm import LLM

  return LLM(
    directory,
    dtype='float32',
    max_model_len=128,
    max_num_seqs=16,
    enforce_eager=True,
    skip_tokenizer_init=True,
    generation_config='vllm',
    logprobs_mode='processed_logprobs',
    max_logprobs=-1,
    enable_prefix_caching=False,
    distributed_executor_backend='uni',
    worker_extension_cls='mimo.samplers.vllm.internals.WorkerExtension',
  )


def probe(llm, prompts):
  """Returns tokens [P, S], and the ids and log-probs [P, S, 1 + n] that came with them."""
  from vllm import SamplingParams

  params = SamplingParams(
    temperature=1.0,
    max_tokens=TURN_TOKENS,
    logprobs=TOP,
    flat_logprobs=True,
    detokenize=False,
    ignore_eos=True,
  )
  outputs = llm.generate(
    [{'prompt_token_ids': prompt.tolist()} for prompt in prompts],
    [params_of(params, seed) for seed in range(len(prompts))],
    use_tqdm=False,
  )
  turns = [output.outputs[0] for output in outputs]
  shape = (len(turns), TURN_TOKENS, -1)
  return {
    'tokens': np.array([turn.token_ids for turn in turns], np.int32),
    'ids': np.array([turn.logprobs.token_ids for turn in turns], np.int32).reshape(shape),
    'logps': np.array([turn.logprobs.logprobs for turn in turns], np.float32).reshape(shape),
  }


def params_of(params, seed):
  params = params.clone()
  params.seed = seed
  return params


def load(llm, directory):
  return llm.collective_rpc('mimo_load', args=(directory,))[0]


def checksums(llm):
  (digests,) = llm.collective_rpc('compute_weight_checksums')
  return digests


def under_traffic(llm, prompts, directories):
  """Loads each directory in turn while requests are decoded; returns checksums after each."""
  from vllm import SamplingParams

  engine = llm.llm_engine
  for i, prompt in enumerate(prompts):
    params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False)
    engine.add_request(f'traffic-{i}', {'prompt_token_ids': prompt.tolist()}, params)
  digests, finished = [], 0
  for directory in directories:
    for _ in range(5):
      finished += sum(output.finished for output in engine.step())
    load(llm, directory)
    digests.append(checksums(llm))
  while engine.has_unfinished_requests():
    finished += sum(output.finished for output in engine.step())
  assert finished == len(prompts)
  return digests


def main():
  job = json.loads(pathlib.Path(sys.argv[1]).read_text())
  first, second = job['first'], job['second']
  rng = np.random.default_rng(0)
  prompts = rng.integers(0, job['vocab'], (PROMPTS, PROMPT_TOKENS), dtype=np.int32)
  out = {'prompts': prompts}

  # A cold start of each. The engine of the second goes before the first's starts.
  llm = engine(second)
  cold_second, digests_second = probe(llm, prompts), checksums(llm)
  del llm
  llm = engine(first)
  cold_first, digests_first = probe(llm, prompts), checksums(llm)

  count = load(llm, first)
  reloaded = probe(llm, prompts)
  moved = under_traffic(llm, prompts, [second, first, second])
  swapped = probe(llm, prompts)
  load(llm, first)
  back = probe(llm, prompts)

  # What fails must say so, and leave room for the next load.
  failures = []
  for directory in job['bad']:
    try:
      load(llm, directory)
      failures.append('')
    except Exception as error:
      failures.append(f'{type(error).__name__}: {error}')
  load(llm, first)
  healed = probe(llm, prompts)

  for name, found in {
    'cold_first': cold_first,
    'cold_second': cold_second,
    'reloaded': reloaded,
    'swapped': swapped,
    'back': back,
    'healed': healed,
  }.items():
    out |= {f'{name}.{key}': value for key, value in found.items()}
  facts = {
    'tensors': count,
    'same_second': [moved[0] == digests_second, moved[2] == digests_second],
    'same_first': moved[1] == digests_first,
    'differ': digests_first != digests_second,
    'failures': failures,
  }
  np.savez(job['out'], facts=json.dumps(facts), **out)


if __name__ == '__main__':
  main()
