"""One training step: loss, gradients, optimizer, rounding, measures."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding

import sr_optax
from train import loss_scale, losses, micro_batch
from train.rollout import Completions, Prompts, cast
from train.scoring import TokenScores, completion_hidden, token_scores

_CLIP = 0.2  # of the usual PPO clip, for `phantom_clip_fraction`


class TrainState(NamedTuple):
  """What training changes."""

  params: nnx.State  # the visible weights, in the arm's dtype
  opt_state: optax.OptState  # moments and, unless FP32, the shadow
  scaler: loss_scale.LossScale | None = None  # where gradients are FP16


class Batch(NamedTuple):
  """Sampled completions and what they are worth."""

  prompts: Prompts
  completions: Completions
  advantages: jax.Array  # float32 [B]
  trained: jax.Array  # bool [B], False where a completion was filtered out
  # float32 [B, T], of the policy before the first update on these completions;
  # None if that is the one to come: the ratio is 1 then
  old_logprobs: jax.Array | None = None


class Objective(NamedTuple):
  """What is minimised."""

  # (logprobs, old_logprobs, advantages, mask) -> PolicyLoss
  policy_loss: Callable[..., losses.PolicyLoss] = losses.policy_gradient
  aggregation: str = 'constant'  # see `losses.token_weights`
  correction: str = 'off'  # see `losses.sampler_correction`
  correction_cap: float = 2.0
  kl_penalty: float = 0.0  # weight of the divergence, summed like the loss


class Reference(NamedTuple):
  """The policy that the divergence is measured from, on this batch."""

  params: nnx.State
  hidden: jax.Array  # [B, T, D], from `completion_hidden`


def train_step(
  graphdef: nnx.GraphDef,
  tx: optax.GradientTransformationExtraArgs,
  *,
  temperature: float,
  compute_dtype,
  objective: Objective = Objective(),  # noqa: B008 - immutable
  micro_batches: int = 1,
  remat: bool = False,
  shardings: tuple[TrainState, NamedSharding] | None = None,
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
  """Builds the jitted step `(state, batch, reference) -> (state, metrics)`.

  The state is donated. `reference` is a `Reference`, or None to measure no
  divergence. Gradients enter the optimizer in `compute_dtype`; with a scaler
  they are unscaled in FP32, and a step with a gradient that is not finite
  changes nothing but the scaler. Gradients of micro-batches add up in FP32.

  Metrics are float32 scalars:

  - `loss`; `grad_norm`, before clipping, 0 where it is not finite;
  - `entropy`, nats per token;
  - `kl_exact` over the whole vocabulary, `kl_k1`, `kl_k2`, `kl_k3`: divergence
    from the reference, nats per completion;
  - sampler against this forward, before any update: `mismatch_k1`,
    `mismatch_k3`, nats per token; `mismatch_probability`, the largest
    difference of a token's probability; `phantom_clip_fraction`, share of
    tokens whose ratio is outside 1 +- 0.2 although nothing was updated;
  - `clip_fraction`, share of tokens that the policy loss cut off, and
    `sampler_weight`, the mean of `losses.sampler_correction`;
  - all of `sr_optax.sticking_metrics` but what cannot happen here; FP32 weights
    have `changed_fraction` and `stuck_fraction` only;
  - with a scaler: `loss_scale`, and `skipped_steps` so far.

  Args:
    graphdef: of the policy.
    tx: the optimizer.
    temperature: of sampling.
    compute_dtype: of activations and gradients.
    objective: the loss. The gradient of its divergence, the exact one, treats
      the sampled states as given.
    micro_batches: parts that the batch is worked off in; divides the prompts.
    remat: recompute whole layers in the backward pass.
    shardings: of the state and of the metrics.
  """

  def loss(params, batch, weights, reference, scale):
    model = nnx.merge(graphdef, params)
    completions = batch.completions
    hidden = completion_hidden(
      model,
      batch.prompts,
      completions.tokens,
      compute_dtype=compute_dtype,
      remat=remat,
    )
    if reference is not None:
      other = nnx.merge(graphdef, cast(reference.params, compute_dtype))
      reference = other, reference.hidden
    scores = token_scores(
      model,
      hidden,
      completions.tokens,
      temperature=temperature,
      compute_dtype=compute_dtype,
      reference=reference,
    )
    old = batch.old_logprobs
    if old is None:
      old = lax.stop_gradient(scores.logprobs)
    mask = completions.mask
    policy_loss = objective.policy_loss(
      scores.logprobs, old, batch.advantages, mask
    )
    correction = losses.sampler_correction(
      old,
      completions.logprobs,
      mask,
      correction=objective.correction,
      cap=objective.correction_cap,
    )
    values = correction * policy_loss.values
    if objective.kl_penalty:
      values += objective.kl_penalty * scores.kl
    value = jnp.sum(weights * values, where=mask)
    seen = _Seen(value, scores, old, policy_loss.clipped, correction)
    return value * scale, seen

  def gradients(params, batch, reference, scale):
    mask = batch.completions.mask & batch.trained[:, None]
    weights = losses.token_weights(mask, objective.aggregation)
    parts = batch, weights, None if reference is None else reference.hidden

    def gradient(batch, weights, hidden):
      given = None if hidden is None else reference._replace(hidden=hidden)
      return jax.grad(loss, has_aux=True)(params, batch, weights, given, scale)

    if micro_batches == 1:
      return gradient(*parts)

    def add(total, part):
      grads, seen = gradient(*part)
      return jax.tree.map(lambda t, g: t + g, total, grads), seen

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    total, seen = lax.scan(add, zeros, micro_batch.split(parts, micro_batches))
    value = jnp.sum(seen.value)
    seen = micro_batch.join(seen._replace(value=None))._replace(value=value)
    return cast(total, compute_dtype), seen

  def step(state, batch, reference):
    params, opt_state, scaler = state
    scale = jnp.float32(1) if scaler is None else scaler.scale
    grads, seen = gradients(
      cast(params, compute_dtype), batch, reference, scale
    )
    start = None if reference is None else reference.params

    def update(params, opt_state, grads):
      updates, new_opt_state = tx.update(grads, opt_state, params)
      new_params = optax.apply_updates(params, updates)
      sticking = _sticking(params, opt_state, new_params, new_opt_state, start)
      return new_params, new_opt_state, sticking

    norm = optax.tree.norm(cast(grads, jnp.float32))
    if scaler is None:
      params, opt_state, sticking = update(params, opt_state, grads)
      scaling = {}
    else:
      grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
      finite = loss_scale.all_finite(grads)
      norm = jnp.where(finite, norm / scale, 0.0)

      def skip(params, opt_state, grads):
        shapes = jax.eval_shape(update, params, opt_state, grads)[2]
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return params, opt_state, nothing

      params, opt_state, sticking = lax.cond(
        finite, update, skip, params, opt_state, grads
      )
      scaler = loss_scale.update(scaler, finite)
      scaling = {
        'loss_scale': scaler.scale,
        'skipped_steps': scaler.skipped.astype(jnp.float32),
      }
    metrics = {'loss': seen.value, 'grad_norm': norm}
    metrics |= _token_metrics(seen, batch.completions) | sticking | scaling
    return TrainState(params, opt_state, scaler), metrics

  return jax.jit(step, donate_argnums=0, out_shardings=shardings)


class _Seen(NamedTuple):
  """What the loss saw on its way."""

  value: jax.Array  # float32 scalar, the loss
  scores: TokenScores
  old_logprobs: jax.Array  # float32 [B, T]
  clipped: jax.Array  # bool [B, T]
  correction: jax.Array  # float32 [B, T]


def _token_metrics(
  seen: _Seen, completions: Completions
) -> dict[str, jax.Array]:
  mask, scores = completions.mask, seen.scores
  tokens = jnp.maximum(jnp.sum(mask), 1)

  def per_token(x):
    return jnp.sum(x, where=mask) / tokens

  sampler, policy = completions.logprobs, seen.old_logprobs
  gap = jnp.where(mask, jnp.exp(sampler) - jnp.exp(policy), 0.0)
  outside = jnp.abs(jnp.exp(policy - sampler) - 1) > _CLIP
  metrics = {
    'entropy': per_token(scores.entropy),
    'mismatch_k1': per_token(losses.kl_k1(sampler, policy)),
    'mismatch_k3': per_token(losses.kl_k3(sampler, policy)),
    'mismatch_probability': jnp.max(jnp.abs(gap)),
    'phantom_clip_fraction': per_token(outside.astype(jnp.float32)),
    'clip_fraction': per_token(seen.clipped.astype(jnp.float32)),
    'sampler_weight': per_token(seen.correction),
  }
  if scores.kl is not None:
    metrics |= divergence(scores, mask)
  return metrics


def divergence(scores: TokenScores, mask: jax.Array) -> dict[str, jax.Array]:
  """All measures of KL(policy || reference), nats per completion.

  Args:
    scores: with a reference.
    mask: bool `[B, T]`, True for sampled tokens.
  """
  pair = scores.logprobs, scores.reference_logprobs
  tokens = {
    'kl_exact': scores.kl,
    'kl_k1': losses.kl_k1(*pair),
    'kl_k2': losses.kl_k2(*pair),
    'kl_k3': losses.kl_k3(*pair),
  }
  return {
    name: jnp.sum(x, where=mask) / mask.shape[0] for name, x in tokens.items()
  }


def _sticking(params, opt_state, new_params, new_opt_state, start):
  leaves = jax.tree.leaves(params)
  if all(leaf.dtype == jnp.float32 for leaf in leaves):  # nothing is rounded
    changed = jax.tree.map(
      # float32: what is counted may exceed int32, and so may the size.
      lambda p, q: jnp.sum(p != q, dtype=jnp.float32),
      params,
      new_params,
    )
    size = float(sum(leaf.size for leaf in leaves))
    fraction = sum(jax.tree.leaves(changed)) / size
    return {'changed_fraction': fraction, 'stuck_fraction': jnp.float32(0)}
  measured = sr_optax.sticking_metrics(
    params, opt_state, new_params, new_opt_state, start_params=start
  )
  del measured['leaves'], measured['foreign_count']
  return measured
