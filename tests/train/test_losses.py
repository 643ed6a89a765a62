import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import losses
from train.advantages import dr_grpo

VOCAB = 16
EPS = 2.0**-24  # half a unit in the last place of float32, relative


def numbers(*shape, seed=0, scale=1.0):
  return np.random.default_rng(seed).normal(size=shape) * scale


def log_softmax(x):
  return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def float32(x):
  return jnp.asarray(x, jnp.float32)


def test_the_policy_gradient_is_a_sum_over_sampled_tokens_and_a_constant():
  # ratio   mask     advantage   - A * ratio
  # 2  1/2  1 1         3         -6, -1.5
  # 4   1   1 0        -1          4,  -
  # 8   8   0 0         5          -,  -
  log_ratio = np.log([[2, 0.5], [4, 1], [8, 8]])
  old = numbers(3, 2)
  total, count = jax.jit(losses.policy_gradient)(
    float32(old + log_ratio),
    float32(old),
    float32([3, -1, 5]),
    jnp.array([[1, 1], [1, 0], [0, 0]], bool),
  )
  # Old + log ratio is rounded at a size of at most 4, exp takes it over to
  # the ratio; then four terms of at most 6.
  np.testing.assert_allclose(total, -6 - 1.5 + 4, rtol=0, atol=14 * 8 * EPS)
  assert count == 3 * 2  # sequences times maximum, not the 3 sampled tokens
  assert total.dtype == count.dtype == jnp.float32


def test_on_the_first_update_the_ratio_is_exactly_1():
  advantages = np.array([0.75, -0.25, 0.5], np.float32)
  mask = np.array([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]], bool)

  @jax.jit
  def loss(logprobs):
    old = jax.lax.stop_gradient(logprobs)
    return losses.policy_gradient(logprobs, old, advantages, mask)[0]

  value, gradient = jax.value_and_grad(loss)(float32(numbers(3, 4)))
  assert value == -(0.75 * 4 - 0.25 * 1 + 0.5 * 2)
  np.testing.assert_array_equal(
    gradient, np.where(mask, -advantages[:, None], 0)
  )


def test_masked_tokens_add_nothing_whatever_stands_there():
  mask = jnp.array([[True, False]])
  for odd in (np.nan, np.inf, -np.inf, 1e30):
    logprobs, old = float32([[-1.0, odd]]), float32([[-1.0, 0.0]])
    value, gradient = jax.value_and_grad(
      lambda x, old=old: losses.policy_gradient(x, old, float32([2]), mask)[0]
    )(logprobs)
    assert value == -2
    np.testing.assert_array_equal(gradient, [[-2, 0]])


def expected_reward_gradient(logits, rewards):
  p = np.exp(log_softmax(logits))
  return p * (rewards - p @ rewards)


def test_the_expected_policy_gradient_is_the_gradient_of_expected_reward():
  logits, rewards = numbers(VOCAB, seed=1), numbers(VOCAB, seed=2)
  baseline = 0.7  # any constant: it must not matter

  @jax.jit
  def expected(logits):  # over all 16 tokens, each drawn once
    log_p = jax.nn.log_softmax(logits)

    def one(token, reward):
      def loss(logits):
        logprobs = jax.nn.log_softmax(logits)[token][None, None]
        total, count = losses.policy_gradient(
          logprobs,
          jax.lax.stop_gradient(logprobs),
          (reward - baseline)[None],
          jnp.ones((1, 1), bool),
        )
        return total / count

      return jnp.exp(log_p[token]) * jax.grad(loss)(logits)

    return jax.vmap(one)(jnp.arange(VOCAB), float32(rewards)).sum(axis=0)

  gradient = -expected(float32(logits))
  want = expected_reward_gradient(logits, rewards)
  # 16 terms of at most 3, some ten roundings each.
  np.testing.assert_allclose(gradient, want, rtol=0, atol=16 * 3 * 10 * EPS)
  assert np.abs(want).max() > 0.05


def test_with_the_group_mean_as_baseline_it_shrinks_by_one_over_the_group():
  # A completion is part of its own baseline: with G completions the expected
  # gradient is (G - 1) / G of the true one. All 256 pairs are enumerated.
  logits, rewards = numbers(VOCAB, seed=1), numbers(VOCAB, seed=2)
  pairs = np.stack(np.meshgrid(*2 * [np.arange(VOCAB)]), -1).reshape(-1, 2)

  @jax.jit
  def expected(logits):
    log_p = jax.nn.log_softmax(logits)

    def one(pair):
      def loss(logits):
        logprobs = jax.nn.log_softmax(logits)[pair][:, None]
        total, count = losses.policy_gradient(
          logprobs,
          jax.lax.stop_gradient(logprobs),
          dr_grpo(float32(rewards)[pair], 2),
          jnp.ones((2, 1), bool),
        )
        return total / count

      return jnp.exp(log_p[pair].sum()) * jax.grad(loss)(logits)

    return jax.vmap(one)(pairs).sum(axis=0)

  want = expected_reward_gradient(logits, rewards) / 2
  np.testing.assert_allclose(
    -expected(float32(logits)), want, rtol=0, atol=16 * 3 * 10 * EPS
  )


def test_k1_and_k2_at_known_ratios():
  # q / p    1/4     1    2       e^3
  # k1       ln(4)   0    -ln(2)  -3
  # k2       half its square
  d = np.log([0.25, 1, 2, np.e**3])
  logprobs = float32([-1, -2, -3, -4])
  reference = logprobs + float32(d)
  k1 = jax.jit(losses.kl_k1)(logprobs, reference)
  k2 = jax.jit(losses.kl_k2)(logprobs, reference)
  # d is rounded at a size of at most 4; the slope of k2 is at most 3.
  np.testing.assert_allclose(k1, -d, rtol=0, atol=2 * 4 * EPS)
  np.testing.assert_allclose(k2, d**2 / 2, rtol=4 * EPS, atol=2 * 12 * EPS)
  assert k1[1] == k2[1] == 0
  # The mean of k1 over the policy is the divergence, of k2 it is not.
  log_p, log_q = (log_softmax(numbers(VOCAB, seed=s)) for s in (3, 4))
  want = np.exp(log_p) @ (log_p - log_q)
  k1 = losses.kl_k1(float32(log_p), float32(log_q))
  np.testing.assert_allclose(np.exp(log_p) @ k1, want, rtol=0, atol=40 * EPS)


def test_k3_at_known_ratios():
  # q / p    1/4           1    2              e^2
  # k3       1/4-1+ln(4)   0    2-1-ln(2)      e^2-1-2
  d = np.log([0.25, 1, 2, np.exp(2)])
  logprobs = float32([-1, -2, -3, -4])
  got = jax.jit(losses.kl_k3)(logprobs, logprobs + float32(d))
  want = np.exp(d) - 1 - d
  # d is rounded at a size of at most 4; the slope of k3 is at most e^2.
  np.testing.assert_allclose(got, want, rtol=4 * EPS, atol=4 * EPS * np.e**2)
  assert got[1] == 0


def test_k3_is_unbiased_and_never_negative():
  log_p, log_q = (log_softmax(numbers(VOCAB, seed=s)) for s in (3, 4))
  k3 = np.asarray(jax.jit(losses.kl_k3)(float32(log_p), float32(log_q)))
  assert k3.min() >= 0
  want = np.exp(log_p) @ (log_p - log_q)
  np.testing.assert_allclose(np.exp(log_p) @ k3, want, rtol=0, atol=40 * EPS)


@pytest.mark.parametrize('log_ratio', [-200.0, -20.0, 20.0, 200.0, 1e4])
def test_k3_and_its_gradient_are_finite_at_any_log_ratio(log_ratio):
  for argument in (0, 1):
    value, gradient = jax.jit(
      jax.value_and_grad(losses.kl_k3, argnums=argument)
    )(jnp.float32(-300.0), jnp.float32(-300.0 + log_ratio))
    assert np.isfinite(value) and np.isfinite(gradient)
    assert value > 0


def test_the_exact_divergence_at_known_distributions():
  # 1/2 ln(1/2 / 1/4) + 1/4 ln(1/4 / 1/4) + 1/4 ln(1/4 / 1/2) = ln(2) / 4
  log_p, log_q = np.log([[0.5, 0.25, 0.25], [0.25, 0.25, 0.5]])
  got = jax.jit(losses.kl_exact)(float32(log_p), float32(log_q))
  np.testing.assert_allclose(got, np.log(2) / 4, rtol=10 * EPS)


def test_the_exact_divergence_has_the_right_gradient():
  x, reference = numbers(VOCAB, seed=5), numbers(VOCAB, seed=6)
  log_p, log_q = log_softmax(x), log_softmax(reference)
  p = np.exp(log_p)
  want = p * (log_p - log_q - p @ (log_p - log_q))

  @jax.jit
  @jax.grad
  def gradient(x):
    return losses.kl_exact(jax.nn.log_softmax(x), float32(log_q))

  np.testing.assert_allclose(gradient(float32(x)), want, rtol=0, atol=99 * EPS)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_all_divergences_of_equal_logits_are_exactly_0(dtype):
  @jax.jit
  def divergences(logits, other):
    log_p, log_q = (
      jax.nn.log_softmax(x.astype(jnp.float32)) for x in (logits, other)
    )
    estimators = losses.kl_exact, losses.kl_k1, losses.kl_k2, losses.kl_k3
    return [estimator(log_p, log_q) for estimator in estimators]

  logits = jnp.asarray(numbers(7, 4001, scale=5), dtype)
  for kl in divergences(logits, logits.copy()):
    np.testing.assert_array_equal(kl, np.zeros_like(kl))
