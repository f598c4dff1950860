"""Every path that a document names is there, and each name that a token passes is in its file."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_DOCUMENTS = (
  'README.md',
  'CONTRIBUTING.md',
  'experiments/README.md',
  *map(str, sorted(path.relative_to(_ROOT) for path in (_ROOT / 'docs').glob('*.md'))),
)
_PATH = re.compile(r'(?:mimo|configs|tests|benchmarks|docs|experiments)/[\w./]*[\w/]')
# Made by a run, or by a command that a document tells of.
_MADE = ('experiments/results/',)


@pytest.mark.parametrize('document', _DOCUMENTS)
def test_the_paths_that_a_document_names_are_there(document):
  text = (_ROOT / document).read_text(encoding='utf-8')
  spans = re.findall(r'`([^`\n]+)`', text) + re.findall(r'^    (\S+/\S*)', text, re.MULTILINE)
  named = {match for span in spans for match in _PATH.findall(span) if span.startswith(match)}
  missing = sorted(
    path
    for path in named
    if not any((root / path).exists() for root in (_ROOT, _ROOT / 'mimo'))
    and not path.startswith(_MADE)
  )
  assert not missing


def _walk(document: str, heading: str) -> list[tuple[pathlib.Path, list[str]]]:
  """The files that a walk goes through, with the names that it gives of each."""
  text = (_ROOT / document).read_text(encoding='utf-8')
  section = text.split(f'## {heading}\n')[1].split('\n## ')[0]
  steps = []
  for span in re.findall(r'`([^`\n]+)`', section):
    if span.endswith('.py'):
      found = [path for path in (_ROOT / span, _ROOT / 'mimo' / span) if path.is_file()]
      beside = [path.parent / span for path, _ in steps[-1:] if (path.parent / span).is_file()]
      assert found or beside, f'{document} sends a token through {span}, which is not there'
      steps.append(((found or beside)[0], []))
    elif steps:
      steps[-1][1].append(span)
  return steps


@pytest.mark.parametrize(
  ('document', 'heading', 'least'),
  [('README.md', 'How a token travels', 5), ('CONTRIBUTING.md', "One token's way", 10)],
)
def test_a_token_goes_through_files_that_are_there(document, heading, least):
  steps = _walk(document, heading)
  assert len(steps) >= least
  for path, names in steps:
    text = path.read_text(encoding='utf-8')
    for name in names:
      if re.fullmatch(r'[A-Za-z_]\w*(\.\w+)?', name):
        assert name.split('.')[-1] in text, f'{path} has no {name}'
