"""Writes the noise of `sr_optax` to stdout for a battery of statistical tests.

    python -m benchmarks.noise_stream index|step|leaf [SEED]

Raw little-endian bytes, 16 bits a draw (what a BF16 weight uses), until the
reader closes the pipe. Neighbours in the stream are neighbours along

- `index`: elements of one large leaf, one step;
- `step`: the same element of the same leaf over consecutive steps;
- `leaf`: leaves `layers/0/kernel`, `layers/1/kernel`, ... at one step,
  elements 0 to 15 of each.

`docs/noise.md` has the commands and the results.
"""

import os
import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from sr_optax import noise

_CHUNK = 2**22  # draws a block
_ELEMENTS = 16  # of every leaf in the `leaf` stream


def index_stream(words: jax.Array) -> Iterator[np.ndarray]:
  """Draws along the elements of one leaf of 2^32 elements."""
  leaf_key = noise.leaf_words(words, ['embedding'])[0]

  @jax.jit
  def block(row):
    bits = noise.random_bits(leaf_key, (2**32 // _CHUNK, _CHUNK))
    return (bits[row] >> jnp.uint32(16)).astype(jnp.uint16)

  for row in range(2**32 // _CHUNK):
    yield block(row)


def step_stream(words: jax.Array) -> Iterator[np.ndarray]:
  """Draws of one element along the steps."""

  @jax.jit
  def block(start):
    def one(epoch):
      leaf_key = noise.leaf_words(noise.fold(words, epoch), ['embedding'])[0]
      return noise.random_bits(leaf_key, (1,))[0]

    bits = jax.vmap(one)(start + jnp.arange(_CHUNK, dtype=jnp.uint32))
    return (bits >> jnp.uint32(16)).astype(jnp.uint16)

  for start in range(0, 2**32, _CHUNK):
    yield block(jnp.uint32(start))


def leaf_stream(words: jax.Array) -> Iterator[np.ndarray]:
  """Draws of the first elements of many leaves."""
  leaves = _CHUNK // _ELEMENTS

  @jax.jit
  def block(hashes):
    def one(h):
      leaf_key = noise.fold(noise.fold(words, h[0]), h[1])
      return noise.random_bits(leaf_key, (_ELEMENTS,))

    return (jax.vmap(one)(hashes) >> jnp.uint32(16)).astype(jnp.uint16)

  for start in range(0, 2**40, leaves):
    names = [f'layers/{i}/kernel' for i in range(start, start + leaves)]
    yield block(noise.path_hashes(names))


def main(which: str, seed: int = 0) -> None:
  """Writes one stream until the reader stops."""
  streams = {'index': index_stream, 'step': step_stream, 'leaf': leaf_stream}
  words = noise.fold(noise.key_words(jax.random.key(seed)), 0)
  try:
    for block in streams[which](words):
      sys.stdout.buffer.write(np.asarray(block).astype('<u2').tobytes())
  except BrokenPipeError:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == '__main__':
  main(sys.argv[1], *map(int, sys.argv[2:]))
