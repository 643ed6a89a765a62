"""Precision arms: how the weights are stored, and what ends the chain."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import sr_optax


class Arm(NamedTuple):
  """The weights that rollout and training use, and how they are rounded."""

  param_dtype: jnp.dtype
  rounding: str | None  # 'stochastic', 'nearest', or None: weights are FP32
  shadow: str | None = 'float32'  # FP32 weights that the visible ones round
  refresh_every: float = 1  # steps that share one draw of rounding noise
  loss_scaling: bool = False  # where gradients are FP16


_BF16, _FP16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
ARMS = {
  'bf16-sr': Arm(_BF16, 'stochastic'),
  'bf16-sr-sticky': Arm(_BF16, 'stochastic', refresh_every=math.inf),
  'bf16-sr-pure': Arm(_BF16, 'stochastic', shadow=None),
  'bf16': Arm(_BF16, 'nearest'),
  'bf16-pure': Arm(_BF16, 'nearest', shadow=None),
  'fp16': Arm(_FP16, 'nearest', loss_scaling=True),
  'fp32': Arm(jnp.dtype(jnp.float32), None, shadow=None),
}


def optimizer(
  arm: Arm, learning_rate: float, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
  """Clipped AdamW in FP32 that ends in the arm's rounding.

  Betas (0.9, 0.95), no weight decay and clipping at a global norm of 1, as in
  the FP16 study of RL precision (arXiv 2510.26788).

  Args:
    arm: decides the last link.
    learning_rate: constant; part of the state, so that runs at different
      rates share one compiled program.
    key: of the rounding noise.
  """
  links = [
    optax.clip_by_global_norm(1.0),
    _adamw(learning_rate),
  ]
  match arm.rounding:
    case 'stochastic':
      last = sr_optax.stochastic_rounding(
        key,
        dtype=arm.param_dtype,
        shadow=arm.shadow,
        refresh_every=arm.refresh_every,
      )
    case 'nearest':
      last = sr_optax.nearest_rounding(dtype=arm.param_dtype, shadow=arm.shadow)
    case None:
      return optax.chain(*links)
  return sr_optax.chain(*links, last)


def _adamw(learning_rate: float) -> optax.GradientTransformation:
  @functools.partial(
    optax.inject_hyperparams, hyperparam_dtype=jnp.dtype(jnp.float32)
  )
  def make(learning_rate):
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.0)

  return make(learning_rate=learning_rate)


def start(
  arm: Arm, tx: optax.GradientTransformationExtraArgs, weights: Any
) -> tuple[Any, optax.OptState]:
  """The weights in the arm's dtype and the optimizer's state.

  Args:
    arm: decides the dtype.
    tx: from `optimizer`.
    weights: FP32 tree. FP16 cannot hold all of the BF16 grid (below 6e-5 it
      is coarser), so with a shadow, the shadow starts as `weights`, exactly.
  """
  if arm.rounding is None:
    return weights, tx.init(weights)
  return sr_optax.init_from_shadow(tx, weights)
