"""How commands start and end. The messages of their mistakes are in test_command.py."""

import pytest

from mimo.experiments import cli, configuration


def test_required_flags_are_named_in_order():
  given = cli.Given(checkpoint='x', out='', task=None)
  with pytest.raises(cli.Usage, match=r'^--out is missing; expected a directory$'):
    cli.required(given, checkpoint='a checkpoint', out='a directory', task='a task')


@pytest.mark.parametrize(
  ('error', 'kind', 'code'),
  [
    (ValueError('rows is 0'), cli.Mistake, 1),
    (FileNotFoundError(2, 'No such file', '/x'), cli.Mistake, 1),
    (configuration.Misstated('there is no such key'), cli.Usage, 2),
  ],
)
def test_what_bad_input_raises_is_a_mistake(error, kind, code):
  with pytest.raises(kind) as raised, cli.mistakes():
    raise error
  assert type(raised.value) is kind and raised.value.exit_code == code


def test_a_bug_is_no_mistake():
  with pytest.raises(KeyError), cli.mistakes():
    raise KeyError('x')


def test_an_ending_is_one_line(capsys):
  with cli.ending('mimo train') as end:
    raise cli.Usage('a mistake\n  over lines')
  assert end.code == 2
  assert capsys.readouterr() == ('', 'mimo train: a mistake over lines\n')
  with cli.ending('mimo ablate') as end:
    raise KeyboardInterrupt('stopped; go on')
  assert end.code == 130
  assert capsys.readouterr() == ('', 'mimo ablate: stopped; go on\n')
