import pytest

from mimo.objectives import ARMS, arm


@pytest.mark.parametrize(
  ('name', 'importance', 'center', 'advantage'),
  [
    ('grpo', 'none', False, 'group_mean_std'),
    ('tis', 'truncated', False, 'group_mean_std'),
    ('mis', 'masked', False, 'group_mean_std'),
    ('mis_mean', 'masked', False, 'group_mean'),
    ('sc', 'none', True, 'group_mean'),
    ('sc_tis', 'truncated', True, 'group_mean'),
    ('sc_mis', 'masked', True, 'group_mean'),
  ],
)
@pytest.mark.parametrize('topp', [False, True])
def test_each_arm(name, importance, center, advantage, topp):
  got = arm(name + '_topp' * topp)
  assert got.name == name + '_topp' * topp
  assert (got.correction.importance, got.correction.center) == (importance, center)
  assert (got.correction.replay, got.topp) == (topp, topp)
  assert (got.correction.low, got.correction.high) == (0.5, 5.0)
  assert got.advantage == advantage


def test_there_are_fourteen():
  assert len(set(ARMS)) == 14
  assert [arm(name).name for name in ARMS] == list(ARMS)


def test_an_unknown_arm_names_the_nearest():
  message = r"arm is 'sc_miss_topp'; expected one of grpo, tis, .*; did you mean 'sc_mis_topp'\?$"
  with pytest.raises(ValueError, match=message):
    arm('sc_miss_topp')
  with pytest.raises(ValueError, match=r'one of grpo, .*, sc_mis_topp$'):
    arm('xyzzy')
