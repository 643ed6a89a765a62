"""Policy losses and divergences, from log-probabilities, as pure functions."""

import jax
import jax.numpy as jnp

_LARGEST_LOG_RATIO = 20.0  # exp of it is far from overflow, in float32 too


def policy_gradient(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Importance-weighted policy gradient, summed over tokens.

      - sum_bt A_b * exp(logprobs_bt - old_logprobs_bt)

  divided by a constant, B * T, instead of the lengths: a token weighs the same
  in a long and in a short completion (Dr.GRPO, arXiv 2503.20783). On the first
  update after a rollout `old_logprobs` is `stop_gradient(logprobs)`: the ratio
  is exactly 1.

  Args:
    logprobs: float32 `[B, T]`, of the policy being trained.
    old_logprobs: float32 `[B, T]`, of the policy before the first update.
    advantages: float32 `[B]`.
    mask: bool `[B, T]`, True for sampled tokens.

  Returns:
    `(sum, count)`, to be divided last.
  """
  log_ratio = jnp.where(mask, logprobs - old_logprobs, 0.0)
  per_token = -advantages[:, None] * jnp.exp(log_ratio)
  return jnp.sum(jnp.where(mask, per_token, 0.0)), jnp.float32(mask.size)


def kl_k1(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
  """The k1 estimate of KL(policy || reference) at sampled tokens, in nats.

      k1 = -d,   d = reference_logprobs - logprobs

  Unbiased, of either sign. As a loss it is useless: its expected gradient is 0.

  Args:
    logprobs: float32, any shape.
    reference_logprobs: float32, the same shape.

  Returns:
    float32, the same shape.
  """
  return logprobs - reference_logprobs


def kl_k2(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
  """The k2 estimate, in nats: d^2 / 2. Never negative, biased.

  Args and result as `kl_k1`; source: http://joschu.net/blog/kl-approx.html
  """
  return 0.5 * jnp.square(reference_logprobs - logprobs)


def kl_k3(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
  """The k3 estimate of KL(policy || reference) at sampled tokens, in nats.

      k3 = exp(d) - 1 - d,   d = reference_logprobs - logprobs

  Never negative, and unbiased while d stays below 20 (beyond, exp is clamped
  rather than overflowing): http://joschu.net/blog/kl-approx.html

  Args:
    logprobs: float32, any shape.
    reference_logprobs: float32, the same shape.

  Returns:
    float32, the same shape.
  """
  d = reference_logprobs - logprobs
  return jnp.expm1(jnp.minimum(d, _LARGEST_LOG_RATIO)) - d


def kl_exact(log_p: jax.Array, reference_log_p: jax.Array) -> jax.Array:
  """KL(policy || reference) over the whole vocabulary, in nats.

      sum_v p_v * (log p_v - log q_v)

  Args:
    log_p: float32 `[..., V]`, log-probabilities of the policy.
    reference_log_p: float32 `[..., V]`, of the reference.

  Returns:
    float32 `[...]`; exactly 0 for equal arguments.
  """
  return jnp.sum(jnp.exp(log_p) * (log_p - reference_log_p), axis=-1)
