import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

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


MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
# ratio         advantage
RATIOS = [[2, 0.5, 1], [4, 0.5, 9], [0.25, 9, 9], [9, 9, 9]]
ADVANTAGES = [3, -1, -2, 5]


def by_hand(loss, **bounds):
  """Values, clipped and the gradient with respect to the log-probabilities."""
  old = numbers(4, 3)
  logprobs = float32(old + np.log(RATIOS))

  @jax.jit
  def run(logprobs):
    def total(x):
      made = loss(x, float32(old), float32(ADVANTAGES), MASK, **bounds)
      return jnp.sum(made.values), made

    gradient, made = jax.grad(total, has_aux=True)(logprobs)
    return made.values, made.clipped, gradient

  values, clipped, gradient = run(logprobs)
  assert values.dtype == jnp.float32 and clipped.dtype == bool
  return np.asarray(values), np.asarray(clipped), np.asarray(gradient)


# Old + log ratio is rounded at a size of at most 4, exp takes it over to the
# ratio, an advantage of 3 multiplies it.
close = functools.partial(np.testing.assert_allclose, rtol=0, atol=14 * 8 * EPS)


def test_the_policy_gradient_at_known_ratios():
  values, clipped, gradient = by_hand(losses.policy_gradient)
  close(values, [[-6, -1.5, -3], [4, 0.5, 0], [0.5, 0, 0], [0, 0, 0]])
  close(gradient, values)  # d exp(x) = exp(x)
  assert not clipped.any()


def test_ppo_clips_what_would_go_on_in_the_direction_of_its_advantage():
  # Bounds 1/2 and 5/4, exact in float32 up to the ratio itself.
  # A > 0: 2 -> 5/4, clipped; 1/2 and 1 within.
  # A < 0: 4 stays (its way back), 1/2 within; 1/4 -> 1/2, clipped.
  values, clipped, gradient = by_hand(
    losses.ppo_clip, clip_low=0.51, clip_high=0.25
  )
  close(values, [[-3.75, -1.5, -3], [4, 0.5, 0], [2 * 0.49, 0, 0], [0, 0, 0]])
  close(gradient, [[0, -1.5, -3], [4, 0.5, 0], [0, 0, 0], [0, 0, 0]])
  want = np.zeros((4, 3), bool)
  want[0, 0] = want[2, 0] = True
  np.testing.assert_array_equal(clipped, want)


def test_clip_higher_leaves_room_above_only():
  _, low, _ = by_hand(losses.ppo_clip, clip_low=0.2, clip_high=0.2)
  _, high, _ = by_hand(losses.ppo_clip, clip_low=0.2, clip_high=1.5)
  assert low[0, 0] and not high[0, 0]  # ratio 2, advantage 3
  assert low[2, 0] and high[2, 0]  # ratio 1/4, advantage -2


def test_gspo_has_one_ratio_per_completion():
  # Means of the logarithms: (2 * 1/2 * 1)^(1/3) = 1; (4 * 1/2)^(1/2) = sqrt 2;
  # 1/4, clipped at 1/2.
  values, clipped, gradient = by_hand(losses.gspo, clip_low=0.5, clip_high=0.25)
  root = np.sqrt(2)
  close(values, [[-3, -3, -3], [root, root, 0], [1, 0, 0], [0, 0, 0]])
  close(gradient, [[-3, -3, -3], [root, root, 0], [0, 0, 0], [0, 0, 0]])
  np.testing.assert_array_equal(np.argwhere(clipped), [[2, 0]])


def test_gspo_with_sequence_mean_has_the_gradient_of_the_sequence_ratio():
  old, x = float32(numbers(4, 3)), float32(numbers(4, 3, seed=8))
  weights = losses.token_weights(MASK, 'sequence-mean')

  def loss(x):
    made = losses.gspo(
      x, old, float32(ADVANTAGES), MASK, clip_low=0.9, clip_high=99.0
    )
    return jnp.sum(weights * made.values)

  def want(x):  # the paper's: - mean over b of A_b * s_b, without the clip
    lengths = MASK.sum(axis=1)[:3]
    mean = jnp.sum(jnp.where(MASK, x - old, 0), axis=1)[:3] / lengths
    return -jnp.mean(float32(ADVANTAGES)[:3] * jnp.exp(mean))

  np.testing.assert_allclose(
    *(jax.grad(f)(x) for f in (loss, want)), rtol=0, atol=99 * EPS
  )


def test_cispo_bounds_the_weight_and_keeps_every_gradient():
  # Weights min(ratio, 3/2): 3/2, 1/2, 1; 3/2, 1/2; 1/4.
  _, clipped, gradient = by_hand(losses.cispo, clip_high=0.5)
  close(gradient, [[-4.5, -1.5, -3], [1.5, 0.5, 0], [0.5, 0, 0], [0, 0, 0]])
  np.testing.assert_array_equal(np.argwhere(clipped), [[0, 0], [1, 0]])


BOUNDS = {
  losses.policy_gradient: {},
  losses.ppo_clip: dict(clip_low=0.2, clip_high=0.28),
  losses.gspo: dict(clip_low=3e-4, clip_high=4e-4),
  losses.cispo: dict(clip_high=4.0),
}
each_loss = pytest.mark.parametrize('loss', BOUNDS)


@each_loss
def test_on_the_first_update_all_losses_agree(loss):
  x = float32(numbers(4, 3))

  def total(x):
    made = loss(
      x, lax.stop_gradient(x), float32(ADVANTAGES), MASK, **BOUNDS[loss]
    )
    return jnp.sum(made.values), made.clipped

  (value, clipped), gradient = jax.value_and_grad(total, has_aux=True)(x)
  assert value == -(3 * 3 - 1 * 2 - 2 * 1)
  np.testing.assert_array_equal(
    gradient, np.where(MASK, -np.array(ADVANTAGES)[:, None], 0)
  )
  assert not clipped.any()


@each_loss
@pytest.mark.parametrize('odd', [np.nan, np.inf, -np.inf, 1e30, 200.0])
def test_masked_tokens_add_nothing_whatever_stands_there(loss, odd):
  mask = jnp.array([[True, False]])
  old = float32([[-1.0, 0.0]])

  def total(x):
    return jnp.sum(loss(x, old, float32([2]), mask, **BOUNDS[loss]).values)

  value, gradient = jax.value_and_grad(total)(float32([[-1.0, odd]]))
  assert value == -2
  np.testing.assert_array_equal(gradient, [[-2, 0]])


@each_loss
def test_any_log_ratio_gives_a_finite_loss_and_gradient(loss):
  old = float32([[-300.0, -1.0], [-300.0, -1.0]])
  x = float32([[-1.0, -300.0], [-1.0, -300.0]])

  def total(x):
    mask = jnp.ones((2, 2), bool)
    made = loss(x, old, float32([1, -1]), mask, **BOUNDS[loss])
    return jnp.sum(made.values)

  value, gradient = jax.value_and_grad(total)(x)
  assert np.isfinite(value) and np.isfinite(gradient).all()


def test_token_weights_of_each_aggregation():
  # Lengths 3, 2, 1 and a completion that was filtered out: 3 rows, 6 tokens.
  for name, rows in {
    'constant': [1 / 9, 1 / 9, 1 / 9],
    'token-mean': [1 / 6, 1 / 6, 1 / 6],
    'sequence-mean': [1 / 9, 1 / 6, 1 / 3],
  }.items():
    got = jax.jit(losses.token_weights, static_argnums=1)(MASK, name)
    want = np.where(MASK, np.array([*rows, 0])[:, None], 0)
    np.testing.assert_allclose(got, want, rtol=2 * EPS)
    nothing = losses.token_weights(np.zeros((4, 3), bool), name)
    np.testing.assert_array_equal(nothing, np.zeros((4, 3)))
  with pytest.raises(ValueError, match='unknown aggregation .mean.*constant'):
    losses.token_weights(MASK, 'mean')


def test_the_correction_of_the_sampler_at_known_ratios():
  # Products of the unmasked ratios: 1, 2, 1/4.
  old = numbers(4, 3)
  behavior = float32(old - np.log(RATIOS))
  for correction, want in {
    'off': np.ones((4, 3)),
    'token-truncated': [[1.5, 0.5, 1], [1.5, 0.5, 1], [0.25, 1, 1], [1] * 3],
    'token-masked': [[0, 0.5, 1], [0, 0.5, 1], [0.25, 1, 1], [1] * 3],
    'sequence-truncated': [[1] * 3, [1.5] * 3, [0.25] * 3, [1] * 3],
    'sequence-masked': [[1] * 3, [0] * 3, [0.25] * 3, [1] * 3],
  }.items():
    run = functools.partial(
      losses.sampler_correction, correction=correction, cap=1.5
    )
    close(jax.jit(run)(float32(old), behavior, MASK), want)
    gradient = jax.grad(lambda x, run=run: run(x, behavior, MASK).sum())(
      float32(old)
    )
    np.testing.assert_array_equal(gradient, np.zeros((4, 3)))
  with pytest.raises(ValueError, match='unknown correction .tis.'):
    losses.sampler_correction(
      float32(old), behavior, MASK, correction='tis', cap=2
    )


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
        made = losses.policy_gradient(
          logprobs,
          jax.lax.stop_gradient(logprobs),
          (reward - baseline)[None],
          jnp.ones((1, 1), bool),
        )
        return jnp.mean(made.values)

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
        made = losses.policy_gradient(
          logprobs,
          jax.lax.stop_gradient(logprobs),
          dr_grpo(float32(rewards)[pair], 2),
          jnp.ones((2, 1), bool),
        )
        return jnp.mean(made.values)

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
