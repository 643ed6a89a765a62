import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.advantages import ADVANTAGES, dr_grpo, mixed_groups

EPS = 2.0**-24  # half a unit in the last place of float32, relative


def advantages(rewards, group, estimator=dr_grpo):
  rewards = jnp.asarray(rewards, jnp.float32)
  return np.asarray(jax.jit(estimator, static_argnums=1)(rewards, group))


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
  for reward in (1 / 3, 10.1, -1e4 / 7):  # whose mean of 7 is rounded
    np.testing.assert_array_equal(advantages([reward] * 7, 7), np.zeros(7))


def test_advantages_follow_their_completions_when_these_are_permuted():
  rng = np.random.default_rng(0)
  rewards = rng.integers(0, 2, 15).astype(np.float32)
  groups = rng.permutation(3)
  rows = np.concatenate([5 * g + rng.permutation(5) for g in groups])
  # The mean of five zeros and ones is exact up to its division.
  np.testing.assert_array_equal(
    advantages(rewards[rows], 5), advantages(rewards, 5)[rows]
  )


REWARDS = [1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1]  # three groups of 4
# Centred: 3/4, -1/4, -1/4, -1/4; 1/2, 1/2, -1/2, -1/2; 0. Their squares have
# the means 3/16, 1/4 and 0 within the groups, 7/48 over all.
BY_HAND = {
  'dr-grpo': [0.75, *[-0.25] * 3, 0.5, 0.5, -0.5, -0.5, *[0] * 4],
  'grpo': [
    *(np.array([3, -1, -1, -1]) / (np.sqrt(3) + 4e-6)),
    *(np.array([1, 1, -1, -1]) / (1 + 2e-6)),
    *[0] * 4,
  ],
  'rloo': [1, *[-1 / 3] * 3, 2 / 3, 2 / 3, -2 / 3, -2 / 3, *[0] * 4],
  # Mean 7/12, variance 35/144.
  'reinforce++': (12 * np.array(REWARDS) - 7) / (np.sqrt(35) + 12e-6),
  'reinforce++-baseline': np.array(
    [0.75, *[-0.25] * 3, 0.5, 0.5, -0.5, -0.5, *[0] * 4]
  )
  / (np.sqrt(7 / 48) + 1e-6),
}


@pytest.mark.parametrize('name', ADVANTAGES)
def test_each_estimator_equals_its_formula_by_hand(name):
  got = advantages(REWARDS, 4, ADVANTAGES[name])
  np.testing.assert_allclose(got, BY_HAND[name], rtol=20 * EPS, atol=4 * EPS)
  assert got.dtype == np.float32


@pytest.mark.parametrize('name', ADVANTAGES)
def test_no_estimator_blows_up(name):
  for rewards in ([1] + [0] * 7, [1] * 8, [10.1] * 8, [1 / 3] * 8, [0] * 8):
    got = advantages(rewards, 8, ADVANTAGES[name])
    assert np.abs(got).max() < 3
    if min(rewards) == max(rewards):
      np.testing.assert_array_equal(got, np.zeros(8))


@pytest.mark.parametrize('name', ADVANTAGES)
def test_every_estimator_follows_permuted_completions(name):
  rng = np.random.default_rng(1)
  rewards = rng.integers(0, 2, 15).astype(np.float32)
  groups = rng.permutation(3)
  rows = np.concatenate([5 * g + rng.permutation(5) for g in groups])
  estimator = ADVANTAGES[name]
  np.testing.assert_allclose(
    advantages(rewards[rows], 5, estimator),
    advantages(rewards, 5, estimator)[rows],
    rtol=20 * EPS,
    atol=20 * EPS,
  )


def test_mixed_groups_are_those_whose_rewards_differ():
  got = mixed_groups(jnp.asarray(REWARDS + [0] * 4, jnp.float32), 4)
  np.testing.assert_array_equal(got, [True] * 8 + [False] * 8)
