import itertools

import numpy as np
import pytest

from train.answers import Answers
from train.stop_strings import automaton, cut
from train.tokenizer import CharTokenizer

TOKENS = [b'', b'a', b'b', b'ab', b'ba', b'bab', b'c', b'ac', b'<eos>']
EOS = 8


def follow(table, tokens):
  """How many tokens are read until the end, or None."""
  state = 0
  for i, token in enumerate(tokens):
    state = table[state, token]
    if state == len(table):
      return i + 1
  return None


@pytest.mark.parametrize(
  'stops', [('b',), ('ab',), ('aab', 'ba'), ('bab', 'abc', 'c'), ('aaa',), ()]
)
def test_it_ends_with_the_token_that_completes_a_stop_string(stops):
  table = automaton(TOKENS, [EOS], stops)
  assert table.dtype == np.int32
  for tokens in itertools.product(range(len(TOKENS)), repeat=4):
    want, text = None, b''
    for i, token in enumerate(tokens):
      text += TOKENS[token] if token != EOS else b''
      if token == EOS or any(stop.encode() in text for stop in stops):
        want = i + 1
        break
    assert follow(table, tokens) == want, tokens


def test_without_stop_strings_only_end_of_text_ends():
  table = automaton(TOKENS, [EOS], ())
  np.testing.assert_array_equal(table, [[0] * EOS + [1]])


def test_a_character_in_two_tokens_is_found():
  table = automaton([b'\xc3', b'\xa9', b'x'], [], ('é',))
  assert follow(table, [2, 0, 1]) == 3
  assert follow(table, [0, 2, 1]) is None


def test_an_empty_stop_string_is_refused():
  with pytest.raises(ValueError, match='must not be empty'):
    automaton(TOKENS, [EOS], ('ab', ''))


@pytest.mark.parametrize(
  'text, stops, want',
  [
    (b'12\nx', ('\n',), b'12'),
    (b'12', ('\n',), b'12'),
    (b'12', (), b'12'),
    (b'a Question: b', ('Question:', '\n\n'), b'a '),
    # The one that is complete first, and of two that end together the longer.
    (b'xabcd', ('abcd', 'bc'), b'xa'),
    (b'xabc', ('c', 'abc'), b'x'),
    (b'', ('a',), b''),
  ],
)
def test_a_text_is_cut_before_what_ended_it(text, stops, want):
  assert cut(text, stops) == want


def test_answers_use_the_stop_strings_they_are_given():
  tokenizer = CharTokenizer('ab#\n')
  answers = Answers(tokenizer, tokenizer.vocab_size, ('##', 'b\n'))
  ids = tokenizer.encode('a\n#b##')
  assert follow(answers.endings, ids) == len(ids)
  assert answers.text(np.array(ids)) == 'a\n#b'
  with pytest.raises(ValueError, match='not enumerated'):
    answers.accepted_sequences(('a',), 3)
