"""Rounding FP32 to BF16 or FP16 with given noise: integer operations only.

    FP32 as uint32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm
                     BF16: kept        |dropped (16 bits)

The magnitude of a float is ordered like its bit pattern, so adding noise to
the dropped bits and truncating rounds *away from zero* with a probability of
exactly dropped / 2^16, for either sign, across binades and into the normals.
No floating-point operation takes part: XLA can neither elide a conversion nor
flush a subnormal.

Round-to-nearest-even is the same operation with the constant noise "just below
one half", plus one where the kept part is odd; so both modes share one core.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from sr_optax import noise, paths

_U32 = jnp.uint32
_INF32 = 0x7F800000
# For each target: bit pattern of +Inf; one less is the largest finite value.
_INF16 = {jnp.dtype(jnp.bfloat16): 0x7F80, jnp.dtype(jnp.float16): 0x7C00}
_QUIET = {jnp.dtype(jnp.bfloat16): 0x0040, jnp.dtype(jnp.float16): 0x0200}


def check_target(dtype: DTypeLike) -> jnp.dtype:
  """Returns `dtype` as a `jnp.dtype`; ValueError if it is not supported."""
  try:
    target = jnp.dtype(dtype)
  except TypeError:
    target = None
  if target not in _INF16:
    raise ValueError(
      f'unsupported target dtype {dtype!r}: expected bfloat16 or float16'
    )
  return target


def round_with_bits(
  x: ArrayLike, bits: ArrayLike, dtype: DTypeLike = jnp.bfloat16
) -> jax.Array:
  """Rounds stochastically with the given random bits: the pure core.

  The result is one of the two neighbours of `x` in `dtype`. Over uniform bits
  it is the neighbour away from zero with a probability of exactly the dropped
  fraction (float16 far below its subnormals: to 2^-32). Values of the target
  grid are fixed points. NaN stays NaN for every payload, Inf stays Inf, zeros
  keep their sign; a finite value never becomes Inf: it saturates.

  Args:
    x: float32, any shape.
    bits: uint16 for bfloat16, uint32 for float16; shape of `x` (or one that
      broadcasts with it).
    dtype: bfloat16 or float16.

  Returns:
    `dtype`, the broadcast shape.

  Raises:
    TypeError: if `x` is not float32 or `bits` has another type.
    ValueError: if the target is not supported.

  Example:
    >>> import jax.numpy as jnp, sr_optax
    >>> x = jnp.float32(1 + 2**-9)  # a quarter of the way to 1 + 2**-7
    >>> bits = jnp.arange(2**16, dtype=jnp.uint16)  # every possible draw
    >>> up = sr_optax.round_with_bits(x, bits) > 1
    >>> int(up.sum())  # exactly a quarter of 65536
    16384
  """
  target = check_target(dtype)
  x = _float32(x, 'x')
  bits = jnp.asarray(bits)
  expected = jnp.uint16 if target == jnp.bfloat16 else jnp.uint32
  if bits.dtype != expected:
    raise TypeError(
      f'bits for {target.name}: expected {jnp.dtype(expected).name}, '
      f'got {bits.dtype.name}'
    )
  return apply_noise(x, bits.astype(_U32), target)


def stochastic_round(
  key: jax.Array, x: ArrayLike, dtype: DTypeLike = jnp.bfloat16
) -> jax.Array:
  """Rounds an FP32 array stochastically, with noise drawn from `key`.

  The same as `stochastic_round_tree` on a bare array.

  Args:
    key: a typed key or a raw `uint32[2]` key; consumed.
    x: float32, any shape.
    dtype: bfloat16 or float16.

  Returns:
    `dtype`, shape of `x`.

  Raises:
    TypeError: if `x` is not float32, or `key` not a key.
    ValueError: if the target or the key's shape is not supported.

  Example:
    >>> import jax, jax.numpy as jnp, sr_optax
    >>> x = jnp.full((10_000,), 1 + 2**-9, jnp.float32)
    >>> q = sr_optax.stochastic_round(jax.random.key(0), x)
    >>> q.dtype, bool(abs((q > 1).mean() - 0.25) < 0.02)
    (dtype(bfloat16), True)
  """
  x = _float32(x, 'x')
  return stochastic_round_tree(key, x, dtype)


def stochastic_round_tree(
  key: jax.Array, tree, dtype: DTypeLike = jnp.bfloat16
):
  """Rounds the FP32 leaves of a tree stochastically.

  The noise of a leaf depends on the key and on the leaf's path (its names
  joined by '/'), not on its position or its siblings, so views of one model
  (dict, NNX state, module, ...) round alike.

  Args:
    key: a typed key or a raw `uint32[2]` key; consumed.
    tree: a pytree. Leaves in `dtype`, integers and bools pass through.
    dtype: bfloat16 or float16.

  Returns:
    The tree with `dtype` in place of float32.

  Raises:
    TypeError: for a float leaf of another type; names its path.
    ValueError: if the target or the key's shape is not supported.
  """
  target = check_target(dtype)
  words = noise.key_words(key)
  named, treedef = paths.flatten(tree)
  for path, x in named:
    if _is_float(x) and x.dtype not in (jnp.float32, target):
      raise TypeError(
        f'leaf {path!r}: expected float32 (or {target.name}), got {x.dtype}'
      )
  chosen = [path for path, x in named if x.dtype == jnp.float32]
  keys = noise.leaf_keys(words, chosen)
  return treedef.unflatten(
    [
      apply_noise(x, draw(keys[path], x.shape, target), target)
      if path in keys
      else x
      for path, x in named
    ]
  )


def draw(leaf_key, shape: tuple[int, ...], target: jnp.dtype) -> jax.Array:
  """Noise for `apply_noise`: 16 random bits for BF16, 32 for FP16; uint32."""
  bits = noise.random_bits(leaf_key, shape)
  return bits >> _U32(16) if target == jnp.bfloat16 else bits


def nearest_noise(x: jax.Array, target: jnp.dtype) -> jax.Array:
  """The constant noise that makes `apply_noise` round to nearest even."""
  kept, _ = _split(_bits(x) & _U32(0x7FFFFFFF), target)
  half = 0x7FFF if target == jnp.bfloat16 else 0x7FFFFFFF
  return _U32(half) + (kept & _U32(1))


def apply_noise(x: jax.Array, u: jax.Array, target: jnp.dtype) -> jax.Array:
  """Adds the noise `u` (uint32) to what is dropped of `x`, then truncates."""
  bits = _bits(x)
  sign = (bits >> _U32(16)) & _U32(0x8000)
  magnitude = bits & _U32(0x7FFFFFFF)
  kept, dropped = _split(magnitude, target)
  if target == jnp.bfloat16:
    carry = (dropped + u) >> _U32(16)
  else:
    carry = ((dropped + u) < u).astype(_U32)  # overflow of 32 bits
  inf = _U32(_INF16[target])
  finite = jnp.minimum(kept + carry, inf - _U32(1))
  nan = inf | _U32(_QUIET[target])
  result = jnp.where(magnitude == _U32(_INF32), inf, nan)
  result = jnp.where(magnitude < _U32(_INF32), finite, result)
  return lax.bitcast_convert_type((sign | result).astype(jnp.uint16), target)


def is_neighbour(q: jax.Array, x: jax.Array) -> jax.Array:
  """Whether `q` is a legal rounding of the FP32 `x`; bool, shape of `x`.

  Compares bits: NaN is a neighbour of NaN. Of the two zeros each stands for
  the other, because `optax.apply_updates` turns a -0.0 into +0.0.
  """
  ones = 0xFFFF if q.dtype == jnp.bfloat16 else 0xFFFFFFFF
  bits = lax.bitcast_convert_type(q, jnp.uint16)
  low, high = (
    lax.bitcast_convert_type(apply_noise(x, _U32(u), q.dtype), jnp.uint16)
    for u in (0, ones)
  )
  magnitude = bits & jnp.uint16(0x7FFF)
  both_zero = (magnitude | (low & jnp.uint16(0x7FFF))) == 0
  both_nan = (magnitude > jnp.uint16(_INF16[q.dtype])) & (
    (_bits(x) & _U32(0x7FFFFFFF)) > _U32(_INF32)
  )
  return (bits == low) | (bits == high) | both_zero | both_nan


def saturate(x: jax.Array, target: jnp.dtype) -> jax.Array:
  """Clamps finite FP32 values to the largest finite value of `target`.

  The last operation is on FP32, so that XLA's CPU backend writes a shadow once
  and rounds what it wrote. With a bitcast at the end it merges that with the
  bitcast of the rounding, computes the shadow twice and copies the donated
  buffers first: 70 bytes a parameter in place of 46.
  """
  largest = 0x7F7F0000 if target == jnp.bfloat16 else 0x477FE000
  bits = _bits(x)
  magnitude = bits & _U32(0x7FFFFFFF)
  over = (magnitude > _U32(largest)) & (magnitude < _U32(_INF32))
  sign = bits & _U32(0x80000000)
  limit = lax.bitcast_convert_type(sign | _U32(largest), jnp.float32)
  return jnp.where(over, limit, x)


def _split(magnitude, target: jnp.dtype):
  """Splits a magnitude into the truncated target bits and what is dropped.

  BF16: the lower half of the word, 16 bits. FP16: the dropped fraction scaled
  to 32 bits. Its exponent is rebased by 112, and below 2^-14 the significand
  with its hidden bit is shifted right once more for every binade.
  """
  if target == jnp.bfloat16:
    return magnitude >> _U32(16), magnitude & _U32(0xFFFF)
  exponent = magnitude >> _U32(23)
  normal = magnitude >= _U32(113 << 23)
  hidden = jnp.where(exponent > _U32(0), _U32(1 << 23), _U32(0))
  significand = (magnitude & _U32(0x7FFFFF)) | hidden
  # Number of dropped bits, 14..125 below 2^-14 (FP32 subnormals have e = 1).
  count = _U32(126) - jnp.maximum(exponent, _U32(1))
  count = jnp.where(normal, _U32(13), count)
  low_count = jnp.minimum(count, _U32(31))  # shifts by 32 are undefined
  word = jnp.where(normal, magnitude - _U32(112 << 23), significand)
  kept = jnp.where(count < _U32(32), word >> low_count, _U32(0))
  shift_up = jnp.where(count < _U32(32), _U32(32) - low_count, _U32(0))
  shift_down = jnp.minimum(
    jnp.where(count > _U32(32), count - _U32(32), _U32(0)), _U32(31)
  )
  return kept, (word << shift_up) >> shift_down


def _bits(x: jax.Array) -> jax.Array:
  return lax.bitcast_convert_type(x, _U32)


def _float32(x: ArrayLike, name: str) -> jax.Array:
  x = jnp.asarray(x) if isinstance(x, (int, float)) else x
  if not hasattr(x, 'dtype') or x.dtype != jnp.float32:
    got = getattr(x, 'dtype', type(x).__name__)
    raise TypeError(f'{name}: expected float32, got {got}')
  return jnp.asarray(x)


def _is_float(x) -> bool:
  return jnp.issubdtype(x.dtype, jnp.floating)
