"""The stepped sampler draws as the engine does, and goes on from a state bit for bit."""

import copy
import pathlib

import numpy as np
import pytest

from mimo.samplers.base import SamplerError, SteppedSampler
from mimo.samplers.engine import EngineSettings
from mimo.samplers.stepped import NativeSteppedSampler
from mimo.types import Source, TurnSample, Version
from mimo.weights.views import View

SLOTS = 3


@pytest.fixture
def make(config, make_params):
  views = {n: View(config, make_params(n), 'bf16', None) for n in range(3)}

  class Feed:
    def latest(self):
      return Version(2, 0, 2)

    def open(self, version):
      if version.number not in views:
        raise ValueError('its shard is corrupt')
      return pathlib.Path(str(version.number))

  def sampler(kv_cache_dtype='bf16', prefix_cache='keep'):
    return NativeSteppedSampler(
      Feed(),
      source=Source('p', 'H100', 'bf16', kv_cache_dtype),
      config=config,
      settings=EngineSettings(
        slots=SLOTS,
        max_tokens=48,
        kv_cache_dtype=kv_cache_dtype,
        prefix_cache=prefix_cache,
        decode_steps=2,
        prefill_rows=2,
        prefill_tokens=8,
      ),
      read_view=lambda path: views[int(str(path))],
    )

  return sampler


def _prompt(number, length=5):
  return np.random.default_rng(number).integers(2, 48, length).astype(np.int32)


def _submit(sampler, number, sampling, tokens=None):
  key = np.array([7, number], np.uint32)
  sampler.submit(f's{number}', _prompt(number) if tokens is None else tokens, sampling, key)


def _same(one, other):
  assert one.finish == other.finish and one.spans == other.spans
  for name in ('tokens', 'logps', 'full_support'):
    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
  for name in ('offsets', 'ids', 'logps'):
    np.testing.assert_array_equal(getattr(one.candidates, name), getattr(other.candidates, name))


def _run(sampler, sampling, steps, tokens):
  """Steps on; whoever ends a turn goes on with two more ids. A version is taken up meanwhile."""
  out = []
  for step in range(*steps):
    if step == 5:
      sampler.activate(Version(1, 0, 1))
    for name, sample in sampler.step().finished:
      out.append((step, name, sample))
      number = int(name[1:])
      tokens[number] = np.concatenate([tokens[number], sample.tokens, _prompt(number, 2)])
      if len(tokens[number]) < 40:
        _submit(sampler, number, sampling, tokens[number])
  return out


@pytest.mark.parametrize(('kv', 'prefix', 'at'), [('bf16', 'keep', 4), ('fp8', 'drop', 7)])
def test_it_goes_on_from_a_state_bit_for_bit(make, sampling, kv, prefix, at):
  """More sessions than slots, so that some wait and idle ones lose their slot; turns are cut."""
  params = sampling(max_turn_tokens=7)
  whole: SteppedSampler = make(kv, prefix)
  whole.activate(Version(0, 0, 0))
  tokens = {n: _prompt(n) for n in range(5)}
  for n in tokens:
    _submit(whole, n, params)
  _run(whole, params, (0, at), tokens)
  state, copied = copy.deepcopy(whole.state()), copy.deepcopy(tokens)
  resumed = make(kv, prefix)
  resumed.activate(Version(at // 5, 0, at // 5))
  resumed.restore(state)
  ours = _run(resumed, params, (at, 16), copied)
  theirs = _run(whole, params, (at, 16), tokens)
  assert [entry[:2] for entry in ours] == [entry[:2] for entry in theirs]
  assert len(ours) > 3 and (at > 5 or any(len(sample.spans) > 1 for *_, sample in ours))
  for (*_, sample), (*_, sample2) in zip(ours, theirs, strict=True):
    _same(sample, sample2)


def test_a_step_says_what_it_did(make, sampling):
  sampler = make()
  assert not sampler.busy
  sampler.activate(Version(0, 0, 0))
  _submit(sampler, 0, sampling(max_turn_tokens=3))
  assert sampler.busy
  step = sampler.step()
  # All but the last of five known tokens are prefilled or fed; then tokens are drawn.
  assert step.finished == () and step.decode_steps == 2
  assert step.fed_tokens == 2 and step.prefilled_tokens == 4
  step = sampler.step()
  ((name, sample),) = step.finished
  assert (name, step.decode_steps, step.fed_tokens) == ('s0', 1, 1)
  assert isinstance(sample, TurnSample) and len(sample.tokens) == 3
  assert not sampler.busy


def test_what_is_wrong_with_a_turn_comes_out_of_the_next_step(make, sampling):
  sampler = make()
  sampler.activate(Version(0, 0, 0))
  _submit(sampler, 0, sampling(max_turn_tokens=3), np.zeros(0, np.int32))
  ((name, error),) = sampler.step().finished
  assert name == 's0' and isinstance(error, SamplerError)
  with pytest.raises(SamplerError, match='corrupt'):
    sampler.activate(Version(9, 0, 9))


def test_a_state_of_another_shape_is_refused(make, sampling):
  sampler = make()
  sampler.activate(Version(0, 0, 0))
  state = sampler.state()
  state['cache'][0] = state['cache'][0][:, :1]
  with pytest.raises(ValueError, match='another shape'):
    make().restore(state)
