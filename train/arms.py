"""Precision arms: how the weights are stored, and what ends the chain."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import sr_optax


class Arm(NamedTuple):
  """The weights that rollout and training use, and how they are rounded.

  With a rounding the optimizer keeps an FP32 shadow of them.
  """

  param_dtype: jnp.dtype
  rounding: str | None  # 'stochastic', 'nearest', or None for FP32 weights


ARMS = {
  'bf16-sr': Arm(jnp.dtype(jnp.bfloat16), 'stochastic'),
  'bf16': Arm(jnp.dtype(jnp.bfloat16), 'nearest'),
  'fp32': Arm(jnp.dtype(jnp.float32), None),
}


def optimizer(
  arm: Arm, learning_rate: float, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
  """Clipped AdamW in FP32 that ends in the arm's rounding.

  Betas (0.9, 0.95), no weight decay and clipping at a global norm of 1, as in
  the FP16 study of RL precision (arXiv 2510.26788).

  Args:
    arm: decides the last link.
    learning_rate: constant.
    key: of the rounding noise.
  """
  links = [
    optax.clip_by_global_norm(1.0),
    optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.0),
  ]
  match arm.rounding:
    case 'stochastic':
      last = sr_optax.stochastic_rounding(key, dtype=arm.param_dtype)
    case 'nearest':
      last = sr_optax.nearest_rounding(dtype=arm.param_dtype)
    case None:
      return optax.chain(*links)
  return sr_optax.chain(*links, last)
