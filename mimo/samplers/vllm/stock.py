"""vLLM's own route for token ids, for a server without the plugin: the same turns, slowly.

Candidates come as JSON objects, which costs a server most of its speed. There is no version gate
before a turn is drawn: what was drawn by an older version is refused afterwards. Versions are the
labels that `/update_weight_version` set, read as publication numbers.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mimo.samplers.vllm import records
from mimo.samplers.vllm.messages import CorruptError, from_json
from mimo.samplers.vllm.wire import GenerateRequest
from mimo.types import FinishReason, Routes, TurnSample

PATH = '/inference/v1/generate'


def encode(request: GenerateRequest) -> bytes:
  """Returns the JSON body of a turn."""
  sampling = request.sampling
  stated = {
    'temperature': sampling.temperature,
    'top_p': sampling.top_p,
    'top_k': sampling.top_k,
    'max_tokens': sampling.max_turn_tokens,
    'stop_token_ids': list(sampling.stop_ids),
    'ignore_eos': True,  # the policy's own stop ids and no others
    'detokenize': False,
    # Ids are rendered n at most, the sampled token beside them; one more than K tells a support
    # of K tokens from one that K cuts.
    'logprobs': sampling.candidates + 1,
    'seed': request.seed,
  }
  if request.routes_from is not None:
    stated['routed_experts_prompt_start'] = request.routes_from
  return json.dumps(
    {
      'request_id': request.request,
      'token_ids': request.tokens.tolist(),
      'sampling_params': stated,
      'stream': False,
    }
  ).encode()


def decode(body: bytes, request: GenerateRequest) -> TurnSample:
  """Returns the turn that an answer holds.

  Raises CorruptError: it is not one that the route gives, contradicts itself, or was drawn by an
  older version than the request's minimum.
  """
  return from_json(body, lambda raw: _sample(raw, request))


def _sample(raw: Mapping[str, Any], request: GenerateRequest) -> TurnSample:
  (choice,) = raw['choices']
  tokens = np.array(choice['token_ids'], np.int32)
  content = choice['logprobs']['content']
  spans = [(int(span['version']), span['start'], span['end']) for span in choice['weight_versions']]
  if request.min_version is not None and spans and spans[0][0] < request.min_version:
    raise CorruptError(f'version {spans[0][0]} drew it; expected at least {request.min_version}')
  # The drawn token, then the most likely ones: vLLM's flat form, padded with excluded ids.
  width = 1 + max((len(entry['top_logprobs']) for entry in content), default=0)
  ids = np.full((len(content), width), -1, np.int32)
  logps = np.full((len(content), width), -np.inf, np.float32)
  for row, entry in enumerate(content):
    ids[row, 0], logps[row, 0] = entry['token_id'], entry['logprob']
    top = _most_likely(entry['top_logprobs'])
    ids[row, 1 : 1 + len(top)] = [i for i, _ in top]
    logps[row, 1 : 1 + len(top)] = [logp for _, logp in top]
  try:
    routes = _routes(choice, request)
    record = records.FlatRecord(tokens, ids, logps, _finish(choice), spans, routes=routes)
    return records.turn_sample(record, candidates=request.sampling.candidates)
  except records.RecordError as error:
    raise CorruptError(str(error)) from None


def _routes(choice: Mapping[str, Any], request: GenerateRequest) -> Routes | None:
  """Reads the routes, which come as a base64 of an .npy file, where they were asked for."""
  if request.routes_from is None:
    return None
  told = choice['routed_experts']
  ids = None if told is None else np.load(io.BytesIO(base64.b64decode(told)), allow_pickle=False)
  end = len(request.tokens) + len(choice['token_ids']) - 1
  return records.told_routes(ids, start=request.routes_from, end=end)


def _most_likely(entries: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
  """Returns distinct (id, log-prob) in falling order; the route names the drawn token first."""
  distinct = {entry['token_id']: float(entry['logprob']) for entry in entries}
  return sorted(distinct.items(), key=lambda item: -item[1])


def _finish(choice: Mapping[str, Any]) -> FinishReason:
  known = {'stop': FinishReason.STOP, 'length': FinishReason.LENGTH, 'abort': FinishReason.ABORT}
  if choice['finish_reason'] not in known:
    raise CorruptError(f'finish reason {choice["finish_reason"]!r}')
  return known[choice['finish_reason']]
