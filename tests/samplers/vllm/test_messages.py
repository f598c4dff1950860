import json

import pytest

from mimo.samplers.vllm.messages import Activation, CorruptError, Failure, Outcome, Status
from mimo.types import RouteShape, Version

ACTIVATION = Activation(
  version=Version(number=3, incarnation=1, update=2),
  directory='/views/a/3',
  format='fp8_channel',
  files={'config.json': ('ab', 12)},
  prefix_cache='drop',
)
STATUS = Status(
  vllm='0.32.0',
  version=Version(3, 1, 2),
  activating=False,
  broken=None,
  running=1,
  waiting=0,
  tokens=100,
  steps=7,
  logprob_mode='processed_logprobs',
  logits_dtype='float32',
  kv_cache_dtype='bf16',
  vocab_size=512,
  max_tokens=256,
  max_candidates=128,
  prefix_caching=True,
  max_running=64,
  tested=True,
  patches=('moe_reload',),
  routes=RouteShape(40, 256, 8),
)


@pytest.mark.parametrize('message', [ACTIVATION, STATUS, Failure(Outcome.STALE, 'old', None)])
def test_round_trip(message):
  assert type(message).decode(message.encode()) == message


@pytest.mark.parametrize('message', [ACTIVATION, STATUS, Failure(Outcome.STALE, 'old', 2)])
def test_a_missing_key_or_a_cut_body_is_corrupt(message):
  raw = json.loads(message.encode())
  for key in raw:
    body = json.dumps({name: value for name, value in raw.items() if name != key}).encode()
    with pytest.raises(CorruptError, match=key):
      type(message).decode(body)
  with pytest.raises(CorruptError):
    type(message).decode(message.encode()[:-1])


def test_another_protocol_is_refused():
  body = ACTIVATION.encode().replace(b'"protocol": 2', b'"protocol": 1')
  with pytest.raises(CorruptError, match='protocol 1; expected 2'):
    Activation.decode(body)


def test_an_unknown_cache_rule_is_refused():
  with pytest.raises(CorruptError, match="prefix_cache is 'toss'"):
    Activation.decode(ACTIVATION.encode().replace(b'"drop"', b'"toss"'))


def test_each_outcome_has_a_status_that_is_an_error():
  assert all(400 <= outcome.status < 600 for outcome in Outcome)
  assert Outcome.STALE.status == 409
