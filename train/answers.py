"""Texts and token sequences: where a completion ends, and what earns 1."""

from typing import NamedTuple

import numpy as np

from train import stop_strings
from train.tokenizer import Tokenizer

_NEWLINE = b'\n'
# Stands for a token that has no text and ends nothing (a control token, a spare
# row of the embedding): within an answer it must not go unnoticed.
_NO_TEXT = '\N{REPLACEMENT CHARACTER}'.encode()


class Ending(NamedTuple):
  """A token sequence that, followed by any of the given tokens, is accepted."""

  tokens: tuple[int, ...]
  last: frozenset[int]  # tokens that complete the answer


class Answers:
  """Completions of a tokenizer: they end at end-of-text or a stop string.

  Attributes:
    endings: int32 `[Z, V]`, see `stop_strings.automaton`.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    vocab_size: int,
    stops: tuple[str, ...] = ('\n',),
  ):
    """Looks through the vocabulary.

    Args:
      tokenizer: of the policy.
      vocab_size: V of the policy, which may exceed the tokenizer's.
      stops: strings that end a completion; they are no part of it.
    """
    self._stops = stops
    self.tokenizer = tokenizer
    self._bytes = [
      tokenizer.token_bytes(i) or _NO_TEXT for i in range(vocab_size)
    ]
    for i in tokenizer.eos_ids:
      self._bytes[i] = b''
    self.endings = stop_strings.automaton(self._bytes, tokenizer.eos_ids, stops)
    ends = np.array([_NEWLINE in b for b in self._bytes])
    ends[list(tokenizer.eos_ids)] = True
    self._closing: dict[bytes, set[int]] = {b'': set(tokenizer.eos_ids)}
    for i, text in enumerate(self._bytes):
      if _NEWLINE in text:
        self._closing.setdefault(text.split(_NEWLINE)[0], set()).add(i)
    self._inside: dict[bytes, list[int]] = {}
    for i, text in enumerate(self._bytes):
      if not ends[i]:
        self._inside.setdefault(text, []).append(i)

  def text(self, tokens: np.ndarray) -> str:
    """The text of one completion's tokens before what ended it."""
    data = b''.join(self._bytes[i] for i in tokens)
    data = stop_strings.cut(data, self._stops)
    return data.decode('utf-8', errors='replace')

  def accepted_sequences(
    self, texts: tuple[str, ...], longest: int
  ) -> tuple[Ending, ...]:
    """Every token sequence whose text is one of `texts` and then ends.

    Only where a newline is what ends a completion. All ways to split a text
    into tokens, not only the tokenizer's own: the policy may sample any.

    Args:
      texts: accepted completions.
      longest: tokens at most, the terminator included.

    Raises:
      ValueError: for other stop strings.
    """
    if self._stops != ('\n',):
      raise ValueError(f'answers that end at {self._stops} are not enumerated')
    found = []
    for text in texts:
      data = text.encode()
      for cut in range(len(data) + 1):
        if closing := self._closing.get(data[cut:]):
          found += [
            Ending(tokens, frozenset(closing))
            for tokens in self._splits(data[:cut])
            if len(tokens) < longest
          ]
    return tuple(found)

  def _splits(self, data: bytes) -> list[tuple[int, ...]]:
    if not data:
      return [()]
    return [
      (token, *rest)
      for end in range(1, len(data) + 1)
      for token in self._inside.get(data[:end], ())
      for rest in self._splits(data[end:])
    ]
