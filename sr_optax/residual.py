"""`residual16`: the FP32 shadow as 16 bits beside its BF16 weight, exactly.

BF16 is the upper half of FP32, so the lower half `lo` is all that is missing,
but for one bit: whether the rounding carried into the upper half. The noise is
a pure function of the key, so it is drawn again and the carry recomputed:

    rounding:        q = (hi << 16 | lo) + u >> 16 = hi + carry
    reconstruction:  carry = lo + u >> 16,   shadow = (q - carry) << 16 | lo

Where |q| is 0, Inf or NaN no legal rounding has a carry (a carry into Inf
saturates, and `rounding.saturate` keeps such shadows on the grid), so there it
counts as 0, and for Inf and NaN `lo` as well: weights set from outside to
those values are taken as they are.
"""

import jax
import jax.numpy as jnp
from jax import lax

_U32 = jnp.uint32


def split(shadow: jax.Array) -> jax.Array:
  """The lower 16 bits of an FP32 shadow, uint16."""
  bits = lax.bitcast_convert_type(shadow, _U32)
  return (bits & _U32(0xFFFF)).astype(jnp.uint16)


def join(weight: jax.Array, lo: jax.Array, u: jax.Array) -> jax.Array:
  """The FP32 shadow of which `weight` is the rounding with noise `u`.

  Args:
    weight: bfloat16, the visible weight.
    lo: uint16, from `split`.
    u: uint32 below 2^16, the noise that made `weight`.
  """
  q = lax.bitcast_convert_type(weight, jnp.uint16).astype(_U32)
  lo = lo.astype(_U32)
  magnitude = q & _U32(0x7FFF)
  not_finite = magnitude >= _U32(0x7F80)
  lo = jnp.where(not_finite, _U32(0), lo)
  carry = (lo + u) >> _U32(16)
  carry = jnp.where(magnitude == _U32(0), _U32(0), carry)
  return lax.bitcast_convert_type((q - carry) << _U32(16) | lo, jnp.float32)
