from mimo.telemetry import names


def test_paths():
  assert names.of_train(names.KL) == 'train/kl'
  assert names.of_source('a', names.KL) == 'source/a/kl'
  assert names.of_eval('hard', 'pass@1') == 'eval/hard/pass@1'
  assert names.sources(['source/b/kl', 'train/kl', 'source/a/kl', 'source/a/rho']) == ['a', 'b']
