"""One training step: loss, gradients, optimizer, rounding, measures."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

import sr_optax
from train import losses
from train.rollout import Completions, Prompts, cast
from train.scoring import completion_hidden, token_scores


class TrainState(NamedTuple):
  """What training changes."""

  params: nnx.State  # the visible weights, in the arm's dtype
  opt_state: optax.OptState  # moments and, unless FP32, the shadow


class Batch(NamedTuple):
  """Sampled completions and what they are worth."""

  prompts: Prompts
  completions: Completions
  advantages: jax.Array  # float32 [B]


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
) -> Callable[..., tuple[TrainState, dict[str, jax.Array]]]:
  """Builds the jitted step `(state, batch, reference) -> (state, metrics)`.

  The state is donated. `reference` is a `Reference`, or None to measure no
  divergence. Metrics are float32 scalars: `loss`, `grad_norm` (before
  clipping), `entropy` (nats per token), `kl_exact`, `kl_k3` (nats per
  completion), `mismatch_k1` and `mismatch_k3` (nats per token, sampler against
  this forward), and of `sr_optax.sticking_metrics` all but what cannot happen
  here; FP32 weights have only `changed_fraction` and `stuck_fraction`.
  """

  def loss(params, batch, reference):
    model = nnx.merge(graphdef, params)
    completions = batch.completions
    hidden = completion_hidden(
      model, batch.prompts, completions.tokens, compute_dtype=compute_dtype
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
    total, count = losses.policy_gradient(
      scores.logprobs,
      lax.stop_gradient(scores.logprobs),
      batch.advantages,
      completions.mask,
    )
    return total / count, scores

  def step(state, batch, reference):
    params, opt_state = state
    (value, scores), grads = jax.value_and_grad(loss, has_aux=True)(
      cast(params, compute_dtype), batch, reference
    )
    updates, new_opt_state = tx.update(grads, opt_state, params)
    new_params = optax.apply_updates(params, updates)
    metrics = {'loss': value, 'grad_norm': optax.tree.norm(grads)}
    metrics |= _token_metrics(scores, batch.completions)
    start = None if reference is None else reference.params
    metrics |= _sticking(params, opt_state, new_params, new_opt_state, start)
    return TrainState(new_params, new_opt_state), metrics

  return jax.jit(step, donate_argnums=0)


def _token_metrics(scores, completions) -> dict[str, jax.Array]:
  mask = completions.mask
  tokens = jnp.maximum(jnp.sum(mask), 1)

  def per_token(x):
    return jnp.sum(jnp.where(mask, x, 0.0)) / tokens

  def per_completion(x):
    return jnp.sum(jnp.where(mask, x, 0.0)) / mask.shape[0]

  metrics = {
    'entropy': per_token(scores.entropy),
    'mismatch_k1': per_token(completions.logprobs - scores.logprobs),
    'mismatch_k3': per_token(
      losses.kl_k3(completions.logprobs, scores.logprobs)
    ),
  }
  if scores.kl is not None:
    k3 = losses.kl_k3(scores.logprobs, scores.reference_logprobs)
    metrics['kl_exact'] = per_completion(scores.kl)
    metrics['kl_k3'] = per_completion(k3)
  return metrics


def _sticking(params, opt_state, new_params, new_opt_state, start):
  leaves = jax.tree.leaves(params)
  if all(leaf.dtype == jnp.float32 for leaf in leaves):  # nothing is rounded
    changed = jax.tree.map(lambda p, q: jnp.sum(p != q), params, new_params)
    size = sum(leaf.size for leaf in leaves)
    fraction = sum(jax.tree.leaves(changed)) / size
    return {'changed_fraction': fraction, 'stuck_fraction': jnp.float32(0)}
  measured = sr_optax.sticking_metrics(
    params, opt_state, new_params, new_opt_state, start_params=start
  )
  del measured['leaves'], measured['foreign_count']
  return measured
