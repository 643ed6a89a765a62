"""Dynamic loss scaling for FP16 gradients.

FP16 has no numbers below 6e-8, so the loss is multiplied before the backward
pass and the gradients divided after it. The factor is halved when a gradient
overflows (that step is skipped) and doubled after many steps without.
flax's `DynamicScale` can grow to infinity
(https://github.com/google/flax/issues/2547), hence this one, with bounds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

INITIAL = 2.0**16
SMALLEST = 1.0
LARGEST = 2.0**24
GROWTH_INTERVAL = 400  # finite steps, as in the FP16 study (arXiv 2510.26788)
HYSTERESIS = 1  # overflows in a row before the scale is halved


class LossScale(NamedTuple):
  """State of the scaler; part of every checkpoint."""

  scale: jax.Array  # float32, what the loss is multiplied by
  finite_steps: jax.Array  # int32, since the scale last changed
  overflows: jax.Array  # int32, in a row
  skipped: jax.Array  # int32, steps skipped so far


def init(scale: float = INITIAL) -> LossScale:
  """A scaler at its start."""
  zero = jnp.zeros((), jnp.int32)
  return LossScale(jnp.float32(scale), zero, zero.copy(), zero.copy())


def update(state: LossScale, finite: jax.Array) -> LossScale:
  """Adapts the scale to whether this step's gradients were finite.

  Args:
    state: the scaler.
    finite: bool scalar, the same on every device.
  """
  overflows = jnp.where(finite, 0, state.overflows + 1)
  finite_steps = jnp.where(finite, state.finite_steps + 1, 0)
  grow = finite_steps >= GROWTH_INTERVAL
  shrink = overflows >= HYSTERESIS
  factor = jnp.where(grow, 2.0, jnp.where(shrink, 0.5, 1.0))
  return LossScale(
    jnp.clip(state.scale * factor, SMALLEST, LARGEST),
    jnp.where(grow, 0, finite_steps),
    jnp.where(shrink, 0, overflows),
    state.skipped + ~finite,
  )


def all_finite(tree) -> jax.Array:
  """Whether every element of every leaf is finite; bool scalar."""
  finite = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(finite))
