"""Stop strings: where a completion ends, whatever tokens it is spelt in.

A stop string may begin in one token and end in another, and has many spellings.
So the bytes of all stop strings make one Aho-Corasick automaton, and every
token is an edge from each of its states: the sampler carries one small integer
per completion and never looks at text.
"""

from collections.abc import Sequence

import numpy as np


def automaton(
  token_bytes: Sequence[bytes], eos_ids: Sequence[int], stops: Sequence[str]
) -> np.ndarray:
  """Where each token leads from each state of unfinished text.

  Args:
    token_bytes: of all V tokens; b'' for one without text.
    eos_ids: tokens that end any text.
    stops: strings that end a text as soon as they are complete.

  Returns:
    int32 `[Z, V]`; row 0 is the start, the value Z the end.

  Raises:
    ValueError: for an empty stop string.
  """
  if not all(stops):
    raise ValueError('a stop string must not be empty')
  byte_edges = _byte_automaton([stop.encode() for stop in stops])
  states = len(byte_edges)
  # The end leads to itself.
  edges = np.vstack([byte_edges, np.full((1, 256), states, np.int32)])
  table = np.repeat(
    np.arange(states, dtype=np.int32)[:, None], len(token_bytes), 1
  )
  lengths = np.array([len(b) for b in token_bytes])
  for position in range(lengths.max(initial=0)):
    tokens = np.flatnonzero(lengths > position)
    byte = np.array([token_bytes[i][position] for i in tokens])
    table[:, tokens] = edges[table[:, tokens], byte[None]]
  table[:, list(eos_ids)] = states
  return table


def cut(text: bytes, stops: Sequence[str]) -> bytes:
  """The text before the stop string that is complete first, or all of it."""
  best = (len(text) + 1, 0)
  for stop in (stop.encode() for stop in stops):
    start = text.find(stop)
    if start >= 0:
      best = min(best, (start + len(stop), -len(stop)))
  end, length = best
  return text[: end + length] if end <= len(text) else text


def _byte_automaton(stops: Sequence[bytes]) -> np.ndarray:
  """Aho and Corasick (1975), `[states, 256]`; a match leads to `states`."""
  prefixes = {b''} | {s[:i] for s in stops for i in range(len(s))}
  # A prefix that contains another stop string is never reached.
  prefixes = {p for p in prefixes if not any(s in p for s in stops)}
  order = sorted(prefixes, key=lambda p: (len(p), p))
  index = {prefix: i for i, prefix in enumerate(order)}
  table = np.empty((len(order), 256), np.int32)
  for i, prefix in enumerate(order):
    for byte in range(256):
      text = prefix + bytes([byte])
      if any(text.endswith(stop) for stop in stops):
        table[i, byte] = len(order)
      else:  # the longest end of the text that may become a stop string
        ends = (text[j:] for j in range(len(text) + 1))
        table[i, byte] = next(index[end] for end in ends if end in index)
  return table
