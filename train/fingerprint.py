"""What tells two sets of arrays apart, on any mesh."""

import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def fingerprint(tree: Any, dtype: jnp.dtype | None = None) -> str:
  """A hash of every bit of a tree of arrays, in the order of its leaves.

  Sums, modulo 2^32, of every value's bits mixed with its place, so that no
  value has to leave its device. Every process calls it.

  Args:
    tree: of arrays of 1, 2 or 4 bytes a value.
    dtype: what the values are cast to before.
  """
  # One leaf after the other: each takes memory of its own size.
  found = [jax.device_get(_sums(leaf, dtype)) for leaf in jax.tree.leaves(tree)]
  return hashlib.sha256(np.asarray(found, np.uint32).tobytes()).hexdigest()


@functools.partial(jax.jit, static_argnames='dtype')
def _sums(leaf: jax.Array, dtype: jnp.dtype | None) -> list[jax.Array]:
  leaf = leaf if dtype is None else leaf.astype(dtype)
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  unsigned = _UNSIGNED[leaf.dtype.itemsize]
  bits = jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)
  place = jnp.uint32(0)
  for axis in range(leaf.ndim):
    index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    place = _mix(place * jnp.uint32(0x9E3779B9) + index)
  return [
    jnp.sum(_mix(bits ^ _mix(place + jnp.uint32(salt))), dtype=jnp.uint32)
    for salt in range(1, 5)
  ]


def _mix(x: jax.Array) -> jax.Array:
  """A bijection of uint32 that spreads every bit (MurmurHash3's finaliser)."""
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
  return x ^ (x >> jnp.uint32(16))
