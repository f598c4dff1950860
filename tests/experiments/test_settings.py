"""Texts that a person has written: what they mean, and what is said of those that mean nothing."""

import pytest

from mimo.experiments import settings


@pytest.mark.parametrize(
  ('text', 'sizes'),
  [
    ('', {}),
    ('fsdp=4,context=2', {'fsdp': 4, 'context': 2}),
    (' expert = 4 , data=1,', {'expert': 4, 'data': 1}),
  ],
)
def test_mesh_sizes(text, sizes) -> None:
  assert settings.mesh_sizes(text) == sizes


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('contxt=2', r"trainer.mesh is 'contxt'; expected one of .*; did you mean 'context'"),
    ('fsdp', r"trainer.mesh is 'fsdp'; expected one size of fsdp, a whole number"),
    ('fsdp=two', r"trainer.mesh is 'fsdp=two'; expected one size of fsdp"),
    ('fsdp=-1', r"trainer.mesh is 'fsdp=-1'; expected one size of fsdp"),
    ('fsdp=²', r"trainer.mesh is 'fsdp=²'; expected one size of fsdp"),
    ('fsdp=2,fsdp=4', r"trainer.mesh is 'fsdp=2,fsdp=4'; expected one size of fsdp"),
  ],
)
def test_mesh_sizes_names_what_is_wrong(text, message) -> None:
  with pytest.raises(ValueError, match=message):
    settings.mesh_sizes(text)
