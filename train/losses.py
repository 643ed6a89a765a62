"""Policy losses and divergences, from log-probabilities, as pure functions.

A policy loss gives a value per token. `token_weights` turns the values into
one number: its denominators are those of the whole batch, so that micro-batches
and devices add up their parts and nothing is divided afterwards.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LARGEST_LOG_RATIO = 20.0  # exp of it is far from overflow, in float32 too


class PolicyLoss(NamedTuple):
  """A policy loss, token by token."""

  values: jax.Array  # float32 [B, T], 0 where masked
  clipped: jax.Array  # bool [B, T], tokens whose gradient was cut off


def policy_gradient(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
) -> PolicyLoss:
  """Importance-weighted policy gradient, nothing clipped.

      - A_b * r_bt,   r_bt = exp(logprobs_bt - old_logprobs_bt)

  On the first update after a rollout `old_logprobs` is
  `stop_gradient(logprobs)`: the ratio is exactly 1.

  Args:
    logprobs: float32 `[B, T]`, of the policy being trained.
    old_logprobs: float32 `[B, T]`, of the policy before the first update.
    advantages: float32 `[B]`.
    mask: bool `[B, T]`, True for sampled tokens.
  """
  ratio = _exp(jnp.where(mask, logprobs - old_logprobs, 0.0))
  return _policy_loss(-advantages[:, None] * ratio, mask, False)


def ppo_clip(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float,
  clip_high: float,
) -> PolicyLoss:
  """Clipped surrogate of PPO (arXiv 1707.06347), with two bounds.

      - min(A_b * r_bt, A_b * clip(r_bt, 1 - clip_low, 1 + clip_high))

  A `clip_high` above `clip_low` leaves room for unlikely tokens (clip-higher of
  DAPO, arXiv 2503.14476: 0.2 and 0.28).

  Args:
    logprobs: float32 `[B, T]`, of the policy being trained.
    old_logprobs: float32 `[B, T]`, of the policy before the first update.
    advantages: float32 `[B]`.
    mask: bool `[B, T]`, True for sampled tokens.
    clip_low: how far a ratio may fall below 1.
    clip_high: how far it may rise above 1.
  """
  ratio = _exp(jnp.where(mask, logprobs - old_logprobs, 0.0))
  return _clipped(ratio, advantages, mask, clip_low, clip_high)


def gspo(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_low: float,
  clip_high: float,
) -> PolicyLoss:
  """PPO with one ratio per completion (GSPO, arXiv 2507.18071).

      s_b = exp(mean over t of (logprobs_bt - old_logprobs_bt))

  clipped as in `ppo_clip`; the paper's bounds are 3e-4 and 4e-4. In the form
  GSPO-token: each token has the value s_b and the gradient of its own
  logarithm, which summed over a completion, each token weighing 1 / length,
  is that of s_b.

  Args and result as `ppo_clip`.
  """
  log_ratio = jnp.where(mask, logprobs - old_logprobs, 0.0)
  length = jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)
  sequence = jnp.sum(log_ratio, axis=1, keepdims=True) / length
  own = log_ratio - lax.stop_gradient(log_ratio)  # 0, with a gradient
  ratio = _exp(lax.stop_gradient(sequence) + own)
  return _clipped(ratio, advantages, mask, clip_low, clip_high)


def cispo(
  logprobs: jax.Array,
  old_logprobs: jax.Array,
  advantages: jax.Array,
  mask: jax.Array,
  *,
  clip_high: float,
) -> PolicyLoss:
  """Clips the importance weight, not the gradient (arXiv 2506.13585).

      - stop_gradient(min(r_bt, 1 + clip_high)) * A_b * logprobs_bt

  Every token keeps a gradient. As in the paper there is no lower bound. The
  value is written with `logprobs_bt - stop_gradient(logprobs_bt) + 1` in place
  of `logprobs_bt`: the gradient is the same, and on the first update the value
  is that of `policy_gradient`.

  Args and result as `ppo_clip`; `clipped` are the tokens of bounded weight.
  """
  logprobs = jnp.where(mask, logprobs, 0.0)
  ratio = _exp(logprobs - jnp.where(mask, old_logprobs, 0.0))
  weight = lax.stop_gradient(jnp.minimum(ratio, 1 + clip_high))
  own = logprobs - lax.stop_gradient(logprobs) + 1
  values = -weight * advantages[:, None] * own
  return _policy_loss(values, mask, ratio > 1 + clip_high)


def _exp(log_ratio):
  return jnp.exp(jnp.minimum(log_ratio, _LARGEST_LOG_RATIO))


def _clipped(ratio, advantages, mask, clip_low, clip_high) -> PolicyLoss:
  advantages = jnp.broadcast_to(advantages[:, None], ratio.shape)
  free = advantages * ratio
  bounded = advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  return _policy_loss(-jnp.minimum(free, bounded), mask, bounded < free)


def _policy_loss(values, mask, clipped) -> PolicyLoss:
  return PolicyLoss(jnp.where(mask, values, 0.0), mask & clipped)


AGGREGATIONS = ('constant', 'token-mean', 'sequence-mean')


def token_weights(mask: jax.Array, aggregation: str) -> jax.Array:
  """What each token's value counts in the loss, which is their weighted sum.

  - `constant`: 1 / (B * T), T the longest length: a token weighs the same in a
    long and in a short completion, whatever the batch (Dr.GRPO, arXiv
    2503.20783);
  - `token-mean`: 1 / tokens of the batch (DAPO, arXiv 2503.14476);
  - `sequence-mean`: 1 / (B * length of the completion) (GRPO, arXiv
    2402.03300).

  B counts the completions with any trained token: groups that were filtered
  out neither add to the loss nor dilute it.

  Args:
    mask: bool `[B, T]` of the whole batch, before it is split.
    aggregation: one of `AGGREGATIONS`.

  Returns:
    float32 `[B, T]`, 0 where masked.

  Raises:
    ValueError: for an unknown aggregation.
  """
  lengths = jnp.sum(mask, axis=1, keepdims=True)
  rows = jnp.sum(lengths > 0)
  match aggregation:
    case 'constant':
      count = jnp.broadcast_to(rows * mask.shape[1], lengths.shape)
    case 'token-mean':
      count = jnp.broadcast_to(jnp.sum(lengths), lengths.shape)
    case 'sequence-mean':
      count = rows * lengths
    case _:
      raise ValueError(
        f'unknown aggregation {aggregation!r}; there are: '
        + ', '.join(AGGREGATIONS)
      )
  return jnp.where(mask, 1.0 / jnp.maximum(count, 1), 0.0)


CORRECTIONS = (
  'off',
  'token-truncated',
  'token-masked',
  'sequence-truncated',
  'sequence-masked',
)


def sampler_correction(
  old_logprobs: jax.Array,
  behavior_logprobs: jax.Array,
  mask: jax.Array,
  *,
  correction: str,
  cap: float,
) -> jax.Array:
  """Importance weights of the trainer's policy against the sampler's.

      w = exp(old_logprobs - behavior_logprobs)

  of each token, or the product over its completion (sequence). Truncated:
  min(w, cap) (https://fengyao.notion.site/off-policy-rl); masked: w where it is
  at most cap, else 0 (the form of arXiv 2510.26788). No gradient flows.

  Args:
    old_logprobs: float32 `[B, T]`, of the policy before the first update, by
      the trainer's forward.
    behavior_logprobs: float32 `[B, T]`, of the same weights, by the sampler.
    mask: bool `[B, T]`, True for sampled tokens.
    correction: one of `CORRECTIONS`; off gives 1.
    cap: largest weight.

  Returns:
    float32 `[B, T]`.

  Raises:
    ValueError: for an unknown correction.
  """
  if correction not in CORRECTIONS:
    raise ValueError(
      f'unknown correction {correction!r}; there are: {", ".join(CORRECTIONS)}'
    )
  if correction == 'off':
    return jnp.ones_like(old_logprobs)
  level, kind = correction.split('-')
  log_w = jnp.where(mask, old_logprobs - behavior_logprobs, 0.0)
  if level == 'sequence':
    total = jnp.sum(log_w, axis=1, keepdims=True)
    log_w = jnp.broadcast_to(total, log_w.shape)
  weight = _exp(log_w)
  over = jnp.float32(cap if kind == 'truncated' else 0)
  return lax.stop_gradient(jnp.where(weight > cap, over, weight))


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
