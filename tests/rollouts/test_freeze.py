import json

import numpy as np

from mimo.rollouts.freeze import freeze, thaw


def test_a_tree_survives_json_exactly():
  tree = {
    'array': np.array([1.1, np.pi, -0.0], np.float32),
    'nested': [{'ids': np.arange(3, dtype=np.int64), 'none': None}, (1, 2.5, 'text')],
    'dict': {'array': 3, 'empty': np.zeros((0, 2), bool)},
  }
  thawed = thaw(json.loads(json.dumps(freeze(tree))))
  assert thawed['array'].dtype == np.float32
  assert thawed['array'].tobytes() == tree['array'].tobytes()
  np.testing.assert_array_equal(thawed['nested'][0]['ids'], [0, 1, 2])
  assert thawed['nested'][0]['ids'].dtype == np.int64 and thawed['nested'][0]['none'] is None
  assert thawed['nested'][1] == [1, 2.5, 'text']
  # A key called as the marker of an array is only a key.
  assert thawed['dict']['array'] == 3
  assert thawed['dict']['empty'].shape == (0, 2) and thawed['dict']['empty'].dtype == bool
