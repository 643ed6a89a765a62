"""Advantages: how much better a completion was than expected.

All are functions of the rewards `[B]`, prompt-major, and of the group size G.
The standard deviations are those of a population (divided by n), with 1e-6
added: a group of equal rewards gives 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

_EPS = 1e-6


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
  return _centred(rewards, group).reshape(-1)


def grpo(rewards: jax.Array, group: int) -> jax.Array:
  """Reward standardised within its group (GRPO, arXiv 2402.03300).

      A_b = (r_b - mean) / (std + 1e-6)   over the group of b

  Args and result as `dr_grpo`.
  """
  centred = _centred(rewards, group)
  deviation = jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))
  return (centred / (deviation + _EPS)).reshape(-1)


def rloo(rewards: jax.Array, group: int) -> jax.Array:
  """Reward minus the mean of the others of its group (arXiv 2402.14740).

      A_b = r_b - mean(r of the group without b) = G / (G - 1) * dr_grpo

  Args and result as `dr_grpo`.
  """
  return dr_grpo(rewards, group) * (group / (group - 1))


def reinforce_pp(rewards: jax.Array, group: int) -> jax.Array:
  """Reward standardised over the whole batch (REINFORCE++, arXiv 2501.03262).

      A_b = (r_b - mean) / (std + 1e-6)   over all B

  The paper moves a penalty per token, KL(policy || reference), into the
  rewards first; here the divergence is a term of the loss (`--kl-penalty`).

  Args and result as `dr_grpo`.
  """
  return grpo(rewards, rewards.size)


def reinforce_pp_baseline(rewards: jax.Array, group: int) -> jax.Array:
  """Centred within its group, scaled over the batch.

      A_b = (r_b - mean of the group of b) / (std of these over all B + 1e-6)

  The variant of REINFORCE++ for several completions per prompt (arXiv
  2501.03262, version 3 and later).

  Args and result as `dr_grpo`.
  """
  return reinforce_pp(dr_grpo(rewards, group), group)


def _centred(rewards, group):
  grouped = rewards.reshape(-1, group)
  # From the smallest: equal rewards then give 0, which the rounding of a mean
  # would not, and GRPO would divide that by next to nothing.
  above = grouped - jnp.min(grouped, axis=1, keepdims=True)
  return above - jnp.mean(above, axis=1, keepdims=True)


ADVANTAGES: dict[str, Callable[[jax.Array, int], jax.Array]] = {
  'dr-grpo': dr_grpo,
  'grpo': grpo,
  'rloo': rloo,
  'reinforce++': reinforce_pp,
  'reinforce++-baseline': reinforce_pp_baseline,
}


def mixed_groups(rewards: jax.Array, group: int) -> jax.Array:
  """Which completions belong to a group whose rewards differ.

  Args:
    rewards: float32 `[B]`, prompt-major.
    group: G.

  Returns:
    bool `[B]`.
  """
  grouped = rewards.reshape(-1, group)
  mixed = jnp.min(grouped, axis=1) < jnp.max(grouped, axis=1)
  return jnp.repeat(mixed, group)
