"""Counter-based noise: a pure function of (key, leaf path, element index).

Nothing here depends on how an array is stored or sharded: every element
computes its own bits from its row-major index, so the noise is the same on
one device and on a pod, inside `jit`, `scan` and `vmap`, and XLA fuses it into
whatever consumes it (no buffer of random numbers ever exists).

Layout of one draw, frozen by golden vectors since 0.1 (a change is a major
version, because `shadow='residual16'` uses the noise as a storage format):

    words    = fold_in(key, epoch)                        uint32[2], Threefry
    leaf key = fold_in(fold_in(words, path_hash[0]), path_hash[1])
    bits     = mix(index_lo * (leaf_key[1] | 1) + leaf_key[0] + mix(index_hi))

Each leaf and step walks the 32-bit words with a stride and an origin of its
own; `mix` is an avalanche permutation of two multiplications (constants found
by C. Wellons' hash prospector, https://github.com/skeeto/hash-prospector). A
key that only shifts one common walk would let leaves share whole stretches.
For leaves of at most 2^32 elements `index_hi` is 0 and vanishes at compile
time. BF16 takes the upper 16 bits, FP16 all 32.
"""

import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_U32 = jnp.uint32


def key_words(key: jax.Array) -> jax.Array:
  """Returns the data of any JAX key as two words, `uint32[2]`.

  Args:
    key: a typed key of any implementation (`jax.random.key`) or a raw
      `uint32[2]` key (`jax.random.PRNGKey`).

  Raises:
    TypeError: if `key` is not a key.
    ValueError: if it is an array of several keys, or of another shape.
  """
  expected = 'expected one typed key (jax.random.key) or a raw uint32[2] key'
  if not hasattr(key, 'dtype') or not hasattr(key, 'shape'):
    raise TypeError(f'{expected}, got {type(key).__name__}')
  if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
    if key.shape != ():
      raise ValueError(f'{expected}, got an array of keys, shape {key.shape}')
    words = jax.random.key_data(key)
    if words.shape == (4,):  # rbg keys: fold the second half into the first
      return fold(fold(words[:2], words[2]), words[3])
  elif key.dtype != jnp.uint32:
    raise TypeError(f'{expected}, got an array of {key.dtype}')
  else:
    words = jnp.asarray(key)
  if words.shape != (2,):
    raise ValueError(f'{expected}, got key data of shape {words.shape}')
  return words


def fold(words: jax.Array, data: jax.Array | int) -> jax.Array:
  """`jax.random.fold_in` of a Threefry key on raw `uint32[2]` words."""
  key = jax.random.wrap_key_data(words, impl='threefry2x32')
  return jax.random.key_data(jax.random.fold_in(key, data))


def leaf_words(words: jax.Array, paths: list[str]) -> jax.Array:
  """Derives one key per leaf path: `uint32[2]` -> `uint32[len(paths), 2]`.

  A path enters through 64 bits of BLAKE2b, so a leaf's noise depends on its
  name alone, never on its position or its siblings.
  """
  if not paths:
    return jnp.zeros((0, 2), _U32)
  leaf_key = jax.vmap(lambda h: fold(fold(words, h[0]), h[1]))
  return leaf_key(path_hashes(paths))


def path_hashes(paths: list[str]) -> np.ndarray:
  """64 bits of BLAKE2b of each path, as two words: `uint32[len(paths), 2]`."""
  digests = [
    hashlib.blake2b(path.encode(), digest_size=8).digest() for path in paths
  ]
  return np.frombuffer(b''.join(digests), '<u4').reshape(-1, 2)


def leaf_keys(words: jax.Array, paths: list[str]) -> dict[str, jax.Array]:
  """`leaf_words` by path."""
  return dict(zip(paths, leaf_words(words, paths), strict=True))


def random_bits(leaf_key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns 32 random bits for each element of a leaf, `uint32[shape]`.

  Args:
    leaf_key: `uint32[2]`, one row of `leaf_words`.
    shape: of the whole (global) leaf.
  """
  lo, hi = _linear_index(shape)
  x = lo * (leaf_key[1] | _U32(1)) + leaf_key[0]
  return _mix(x if hi is None else x + _mix(hi))


def _mix(x: jax.Array) -> jax.Array:
  """Avalanche permutation of 32 bits: every input bit flips half the output."""
  x = (x ^ (x >> _U32(16))) * _U32(0x21F0AAAD)
  x = (x ^ (x >> _U32(15))) * _U32(0x735A2D97)
  return x ^ (x >> _U32(15))


def _linear_index(shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
  """Row-major 64-bit index as (low word, high word or None if all zero).

  One iota per dimension rather than a reshape of a flat one: a partitioned
  iota costs nothing, a partitioned reshape may gather.
  """
  wide = math.prod(shape) > 2**32
  lo = jnp.zeros(shape, _U32)
  hi = jnp.zeros(shape, _U32) if wide else None
  stride = 1
  for axis in reversed(range(len(shape))):
    i = lax.broadcasted_iota(_U32, shape, axis)
    term_lo, term_hi = (
      _multiply_64(i, stride) if wide else (i * _word(stride), 0)
    )
    lo = lo + term_lo
    if wide:
      carry = (lo < term_lo).astype(_U32)
      hi = hi + term_hi + carry
    stride *= shape[axis]
  return lo, hi


def _multiply_64(i: jax.Array, factor: int) -> tuple[jax.Array, jax.Array]:
  """Low and high word of i * factor, by 16-bit halves (no 64-bit integers)."""
  f0, f1 = _U32(factor & 0xFFFF), _U32((factor >> 16) & 0xFFFF)
  i0, i1 = i & _U32(0xFFFF), i >> _U32(16)
  middle = i1 * f0 + ((i0 * f0) >> _U32(16))
  cross = i0 * f1 + (middle & _U32(0xFFFF))
  high = i1 * f1 + (middle >> _U32(16)) + (cross >> _U32(16))
  return i * _word(factor), high + i * _word(factor >> 32)


def _word(value: int) -> np.uint32:
  return np.uint32(value & 0xFFFFFFFF)
