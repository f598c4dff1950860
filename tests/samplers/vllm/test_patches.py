"""Changes to vLLM give what vLLM gives."""

import numpy as np
import pytest

from mimo.samplers.vllm.internals import patches


def _logprobs(rows, vocab, seed=0):
  logits = np.random.default_rng(seed).normal(size=(rows, vocab)) * 3
  return (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)


@pytest.mark.parametrize('num', [1, 7, 40])
def test_the_most_likely_are_those_of_a_stable_sort(num):
  logprobs = _logprobs(5, 40)
  logprobs[1, ::3] = -np.inf
  logprobs[2] = np.round(logprobs[2])  # ties, of which the lower id comes first
  logprobs[3, 4] = 0.0
  logprobs[4, 4:9] = [0.5, 2.0, 0.25, 1e-30, -1e-30]  # any floats
  ids, values = patches.most_likely(logprobs, num)
  expected = np.argsort(-logprobs, axis=-1, kind='stable')[:, :num]
  np.testing.assert_array_equal(ids, expected)
  np.testing.assert_array_equal(values, np.take_along_axis(logprobs, expected, axis=-1))
  assert (ids.dtype, values.dtype) == (np.int32, np.float32)


def test_more_than_there_are_is_a_mistake():
  with pytest.raises(ValueError, match='num is 9; expected 1 to 8'):
    patches.most_likely(_logprobs(2, 8), 9)


@pytest.mark.vllm
@pytest.mark.parametrize('num', [2, 33, 128])
def test_vllm_gets_the_candidates_that_it_had(num, monkeypatch):
  torch = pytest.importorskip('torch')
  from vllm.v1.sample.sampler import Sampler

  original = Sampler.gather_logprobs
  monkeypatch.setattr(Sampler, 'gather_logprobs', staticmethod(original))  # put back at the end
  logprobs = torch.from_numpy(_logprobs(6, 512, seed=num))
  drawn = torch.arange(6) * 3
  want = original(logprobs, num, drawn)
  asked = []

  def watched(logprobs, num, ids):
    asked.append(num)
    return original(logprobs, num, ids)

  monkeypatch.setattr(Sampler, 'gather_logprobs', staticmethod(watched))
  patches._patch_topk()
  got = Sampler.gather_logprobs(logprobs, num, drawn)
  # Few of many are left to torch.
  assert asked == [num if num * 64 <= 512 else 0]
  for ours, theirs in zip(got, want, strict=True):
    if theirs is not None:
      assert ours.dtype == theirs.dtype
      np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
  patched = Sampler.gather_logprobs
  patches._patch_topk()
  assert Sampler.gather_logprobs is patched
