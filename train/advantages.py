"""Advantages: how much better a completion was than expected."""

import jax
import jax.numpy as jnp


def dr_grpo(rewards: jax.Array, group: int) -> jax.Array:
  """Reward minus the mean of its group, and nothing else.

      A_b = r_b - mean(r of the group of b)

  Unlike GRPO not divided by the group's standard deviation, which weights
  questions by how hard they are (Dr.GRPO, arXiv 2503.20783).

  Args:
    rewards: float32 `[B]`, prompt-major.
    group: G.

  Returns:
    float32 `[B]`.
  """
  grouped = rewards.reshape(-1, group)
  return (grouped - jnp.mean(grouped, axis=1, keepdims=True)).reshape(-1)
