import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]


def test_every_test_named_in_the_list_of_traps_exists():
  text = (ROOT / 'docs/traps.md').read_text(encoding='utf-8')
  named = re.findall(r'`([\w/]+\.py)::(\w+)`', text)
  assert len(named) > 50
  assert len(named) == text.count('::test_')  # none is written otherwise
  for file, test in named:
    folder = ROOT / 'tests' / ('' if '/' in file else 'train')
    source = (folder / file).read_text(encoding='utf-8')
    assert f'\ndef {test}(' in source, f'{file}::{test}'


def test_every_trap_names_a_test():
  text = (ROOT / 'docs/traps.md').read_text(encoding='utf-8')
  rows = [line for line in text.splitlines() if line.startswith('| ')]
  rows = [r for r in rows if not r.startswith(('| trap |', '| --- |'))]
  assert len(rows) > 40
  for row in rows:
    assert len(re.findall(r'(?<!\\)\|', row)) == 3, row
    assert '::test_' in row, row
