"""The hash of a policy follows what the policy is read from, and nothing else."""

import hashlib

from mimo.weights import digest


def _directory(root):
  root.mkdir()
  (root / 'config.json').write_bytes(b'{}')
  (root / 'model.safetensors').write_bytes(b'weights')
  return root


def test_it_is_of_names_and_contents(tmp_path):
  root = _directory(tmp_path / 'policy')
  lines = [
    f'{name}\0{hashlib.sha256(content).hexdigest()}\n'
    for name, content in (('config.json', b'{}'), ('model.safetensors', b'weights'))
  ]
  assert digest.policy_digest(root) == hashlib.sha256(''.join(lines).encode()).hexdigest()


def test_it_changes_with_what_is_read_alone(tmp_path):
  root = _directory(tmp_path / 'policy')
  first = digest.policy_digest(root)
  assert digest.policy_digest(_directory(tmp_path / 'elsewhere')) == first
  (root / 'README.md').write_text('about it')
  assert digest.policy_digest(root) == first
  (root / 'tokenizer.json').write_text('{}')
  second = digest.policy_digest(root)
  (root / 'model.safetensors').write_bytes(b'weightz')
  assert len({first, second, digest.policy_digest(root)}) == 3


def test_a_step_counts_whole(tmp_path):
  step = tmp_path / '4'
  for name in ('state', 'meta'):
    (step / name).mkdir(parents=True)
  (step / '_CHECKPOINT_METADATA').write_text('{}')
  (step / 'state' / 'array').write_bytes(b'1')
  first = digest.policy_digest(step)
  (step / 'state' / 'array').write_bytes(b'2')
  assert digest.policy_digest(step) != first
