"""What a run compiles: called by the trainer, inspected by `aot`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from train import arms, loss_scale, losses, micro_batch, sharding
from train.config import Config
from train.rollout import Completions, Support, cast, generate
from train.scoring import completion_hidden, token_scores
from train.step import Objective, Reference, TrainState, divergence, train_step


class Programs(NamedTuple):
  """Jitted functions; arrays are sharded as `sharding` says."""

  # float32 weights -> (params, opt_state)
  start: Callable[..., tuple[Any, optax.OptState]]
  start_scaler: Callable[[], loss_scale.LossScale]
  # float32 weights on the BF16 grid -> themselves in bfloat16
  reference: Callable[..., Any]
  # (params, prompts, key, temperature) -> Completions
  rollout: Callable[..., Completions]
  eval_rollout: Callable[..., Completions]  # with the evaluation's support
  # (params, prompts, tokens) -> hidden states [B, T, D]
  hidden: Callable[..., jax.Array]
  # (params, prompts, tokens) -> log-probabilities, float32 [B, T]
  logprobs: Callable[..., jax.Array]
  # (batches of rows, int32 indices into all of them) -> one batch
  select: Callable[..., Any]
  # (batch of rows, i) -> the share of the i-th of a rollout's updates
  share: Callable[..., Any]
  # (params, hidden, reference, completions) -> nats per completion
  held_out_kl: Callable[..., jax.Array]
  # (state, batch, reference) -> (state, metrics); donates the state
  train_step: Callable[..., tuple[TrainState, dict[str, jax.Array]]]


def build(
  config: Config,
  graphdef: nnx.GraphDef,
  tx: optax.GradientTransformationExtraArgs,
  *,
  endings: np.ndarray,
  compute_dtype,
  mesh: Mesh,
  weights: Any,
) -> Programs:
  """Builds all functions; nothing is compiled yet.

  Args:
    config: of the run.
    graphdef: of the policy.
    tx: the optimizer.
    endings: int32 `[Z, V]`, see `stop_strings.automaton`.
    compute_dtype: of activations and gradients.
    mesh: of the run, and set while the functions are traced.
    weights: float32 parameters, or their shapes.

  Raises:
    MeshError: if the mesh fits neither the parameters nor the batch.
  """
  parts = config.updates * config.micro_batches  # of a whole rollout
  copies = prompt_copies(config, mesh)
  arm = arms.ARMS[config.arm]
  rows, replicated = sharding.rows(mesh), NamedSharding(mesh, P())
  begin = functools.partial(arms.start, arm, tx)
  start = sharding.shardings(jax.eval_shape(begin, weights), mesh)

  def model(params):
    return nnx.merge(graphdef, cast(params, compute_dtype))

  def rollout(params, prompts, key, temperature, support=Support()):  # noqa: B008
    return generate(
      nnx.merge(graphdef, params),  # cast and gathered where it is used
      prompts,
      key,
      group=config.group // copies,
      max_new_tokens=config.max_new_tokens,
      temperature=temperature,
      endings=jnp.asarray(endings),
      compute_dtype=compute_dtype,
      support=support,
    )

  def hidden(params, prompts, tokens):
    def part(prompts, tokens):
      return completion_hidden(
        model(params), prompts, tokens, compute_dtype=compute_dtype
      )

    return micro_batch.mapped(part, parts)(prompts, tokens)

  def logprobs(params, prompts, tokens):
    def part(prompts, tokens):
      hidden = completion_hidden(
        model(params), prompts, tokens, compute_dtype=compute_dtype
      )
      return token_scores(
        model(params),
        hidden,
        tokens,
        temperature=config.temperature,
        compute_dtype=compute_dtype,
      ).logprobs

    return micro_batch.mapped(part, parts)(prompts, tokens)

  def held_out_kl(params, hidden, reference: Reference, completions):
    scores = token_scores(
      model(params),
      hidden,
      completions.tokens,
      temperature=config.temperature,
      compute_dtype=compute_dtype,
      reference=(model(reference.params), reference.hidden),
    )
    return divergence(scores, completions.mask)['kl_exact']

  def select(batches, indices):
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *batches)
    return jax.tree.map(lambda x: x[indices], whole)

  def share(batch, i):
    split = micro_batch.split(batch, config.updates)
    return jax.tree.map(lambda x: x[i], split)

  support = Support(config.eval_top_k, config.eval_top_p, config.eval_min_p)
  training = jax.jit(rollout, out_shardings=rows)
  evaluating = training  # one program, unless the support differs
  if support != Support():
    evaluating = jax.jit(
      functools.partial(rollout, support=support), out_shardings=rows
    )
  return Programs(
    jax.jit(begin, out_shardings=start),
    jax.jit(loss_scale.init, out_shardings=replicated),
    jax.jit(lambda w: cast(w, jnp.bfloat16), out_shardings=start[0]),
    training,
    evaluating,
    jax.jit(hidden, out_shardings=rows),
    jax.jit(logprobs, out_shardings=rows),
    jax.jit(select, out_shardings=rows),
    jax.jit(share, out_shardings=rows),
    jax.jit(held_out_kl, out_shardings=replicated),
    train_step(
      graphdef,
      tx,
      temperature=config.temperature,
      compute_dtype=compute_dtype,
      objective=_objective(config),
      micro_batches=config.micro_batches,
      remat=config.remat,
      shardings=(TrainState(*start, replicated), replicated),
    ),
  )


def prompt_copies(config: Config, mesh: Mesh) -> int:
  """How often each prompt is there, see `sharding.copies`."""
  part = config.prompts // (config.updates * config.micro_batches)
  return sharding.copies(part, config.group, mesh)


def _objective(config: Config) -> Objective:
  """The loss that the flags ask for."""
  low, high = config.clips
  bounds = {'clip_low': low, 'clip_high': high}
  bounds = {name: x for name, x in bounds.items() if x is not None}
  policy_loss = {
    'policy-gradient': losses.policy_gradient,
    'ppo': losses.ppo_clip,
    'gspo': losses.gspo,
    'cispo': losses.cispo,
  }[config.loss]
  return Objective(
    functools.partial(policy_loss, **bounds),
    config.aggregation,
    config.correction,
    config.correction_cap,
    config.kl_penalty,
  )
