"""Records of a decoder's parts refuse what can't be."""

import pytest

from mimo.models.parts import DeltaConfig, MoEConfig, RopeConfig


def test_rope_refusals():
  with pytest.raises(ValueError, match="rope_type is 'yarn'; expected one of"):
    RopeConfig(1e4, 'yarn')
  with pytest.raises(ValueError, match=r"'linear' got parameters \(\); expected \('factor',\)"):
    RopeConfig(1e4, 'linear')
  with pytest.raises(ValueError, match='rope theta is -1'):
    RopeConfig(-1.0)
  with pytest.raises(ValueError, match=r'partial_rotary_factor is 1.5; expected a number in'):
    RopeConfig(1e4, partial_rotary_factor=1.5)


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ((0, 1, 8, 0), 'num_experts is 0; expected a positive integer'),
    ((4, 5, 8, 0), 'experts_per_token is 5; expected at most num_experts, 4'),
    ((4, 2, '8', 0), "intermediate_size is '8'; expected a positive integer"),
  ],
)
def test_experts_refused(sizes, message):
  with pytest.raises(ValueError, match=message):
    MoEConfig(*sizes, norm_topk_prob=True)


def test_delta_nets():
  delta = DeltaConfig(2, 6, 8, 16, 4)
  assert (delta.key_size, delta.value_size) == (16, 96)
  with pytest.raises(ValueError, match=r'num_value_heads is 6; expected a multiple of .*, 4'):
    DeltaConfig(4, 6, 8, 16, 4)
  with pytest.raises(ValueError, match='conv_size is 0; expected a positive integer'):
    DeltaConfig(2, 6, 8, 16, 0)
