import itertools

import numpy as np
import pytest

from train.answers import Answers
from train.tokenizer import CharTokenizer

EXTRA = 2  # rows of the embedding beyond the vocabulary
LONGEST = 4


@pytest.fixture(scope='module')
def answers(pieces):
  return Answers(pieces, pieces.vocab_size + EXTRA)


def ends(pieces, token):
  return token in pieces.eos_ids or b'\n' in pieces.token_bytes(token)


def enumerated(pieces, texts):
  """Every sequence of tokens that ends by itself and says one of `texts`.

  Written down from what a completion is: tokens up to the first that ends it,
  then what stands before the newline. A token without text says something
  that no answer contains.
  """
  vocabulary = range(pieces.vocab_size + EXTRA)
  inside = [i for i in vocabulary if not ends(pieces, i)]
  last = [i for i in vocabulary if ends(pieces, i)]
  found = set()
  for length in range(LONGEST):
    for tokens in itertools.product(inside, repeat=length):
      data = [pieces.token_bytes(i) for i in tokens]
      if all(data):
        for end in last:
          said = b''.join(data)
          if end not in pieces.eos_ids:
            said += pieces.token_bytes(end).partition(b'\n')[0]
          if said in [text.encode() for text in texts]:
            found.add((*tokens, end))
  return found


@pytest.mark.parametrize(
  'texts',
  [
    ('12', ' 12'),
    ('1', ' 1'),
    ('',),
    ('2',),
    ('121', '112', '2 1'),
    ('é', '1é'),
    ('3', ' 3'),
  ],
)
def test_accepted_sequences_are_all_there_are(answers, pieces, texts):
  endings = answers.accepted_sequences(texts, LONGEST)
  found = [(*e.tokens, last) for e in endings for last in e.last]
  assert len(found) == len(set(found))  # a probability counts once
  assert set(found) == enumerated(pieces, texts)
  assert bool(found) == ('3' not in texts)


def test_the_text_of_every_sequence_is_accepted_exactly_if_it_was_found(
  answers, pieces
):
  texts = ('12', ' 12')
  endings = answers.accepted_sequences(texts, 3)
  found = {(*e.tokens, last) for e in endings for last in e.last}
  vocabulary = range(pieces.vocab_size + EXTRA)
  for length in (1, 2, 3):
    for tokens in itertools.product(vocabulary, repeat=length):
      *inside, last = tokens
      if ends(pieces, last) and not any(ends(pieces, i) for i in inside):
        assert (answers.text(tokens) in texts) == (tokens in found), tokens


def test_no_sequence_is_longer_than_allowed(answers):
  for longest in range(1, 6):
    endings = answers.accepted_sequences(('1212',), longest)
    lengths = {len(e.tokens) + 1 for e in endings}
    assert lengths == {n for n in range(3, 6) if n <= longest}


@pytest.mark.parametrize(
  'tokens, text',
  [
    ([1, 5], '1'),  # '1' '\n'
    ([1, 6], '12'),  # '1' '2\n'
    ([3, 11], '122'),  # '12' '2\n1': what follows the newline is cut off
    ([8], ''),  # '\nx'
    ([4, 0], ' 1'),  # ' 1' and end-of-text
    ([13], ''),
    ([1, 2], '12'),  # truncated
    ([], ''),
    ([14, 15, 5], 'é'),
    ([1, 14, 5], '1\N{REPLACEMENT CHARACTER}'),  # half a character
    ([1, 9, 5], '1\N{REPLACEMENT CHARACTER}'),  # a special token
  ],
)
def test_a_text_ends_before_the_first_newline(answers, tokens, text):
  assert answers.text(tokens) == text


def test_terminators_are_all_tokens_with_a_newline_and_end_of_text(
  answers, pieces
):
  assert answers.endings.dtype == np.int32
  assert answers.endings.shape == (1, pieces.vocab_size + EXTRA)
  ending = [0, 5, 6, 7, 8, 11, 13]
  assert answers.endings[0].nonzero()[0].tolist() == ending


def test_a_character_tokenizer_leaves_one_way_to_write_an_answer():
  tokenizer = CharTokenizer('0123456789 \n')
  answers = Answers(tokenizer, tokenizer.vocab_size)
  assert answers.accepted_sequences(('46', ' 46'), 4) == (
    ((5, 7), {0, 12}),
    ((11, 5, 7), {0, 12}),
  )
