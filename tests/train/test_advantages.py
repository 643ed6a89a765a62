import jax
import jax.numpy as jnp
import numpy as np

from train.advantages import dr_grpo


def advantages(rewards, group):
  rewards = jnp.asarray(rewards, jnp.float32)
  return np.asarray(jax.jit(dr_grpo, static_argnums=1)(rewards, group))


def test_an_advantage_is_the_reward_minus_the_mean_of_its_group():
  got = advantages([1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1], 4)
  want = [3, -1, -1, -1, 2, 2, -2, -2, 0, 0, 0, 0]
  np.testing.assert_array_equal(got, np.array(want) / 4)
  assert got.dtype == np.float32


def test_a_rare_success_is_not_blown_up():
  # Divided by the standard deviation it would be 2.6 and more.
  got = advantages([1] + [0] * 7, 8)
  np.testing.assert_array_equal(got, [7 / 8] + [-1 / 8] * 7)


def test_a_group_of_equal_rewards_says_nothing():
  # A mean of 7 thirds may be off by some roundings, its advantage no more.
  np.testing.assert_allclose(
    advantages([1 / 3] * 7, 7), 0, rtol=0, atol=7 * 2.0**-26
  )


def test_advantages_follow_their_completions_when_these_are_permuted():
  rng = np.random.default_rng(0)
  rewards = rng.integers(0, 2, 15).astype(np.float32)
  groups = rng.permutation(3)
  rows = np.concatenate([5 * g + rng.permutation(5) for g in groups])
  # The mean of five zeros and ones is exact up to its division.
  np.testing.assert_array_equal(
    advantages(rewards[rows], 5), advantages(rewards, 5)[rows]
  )
