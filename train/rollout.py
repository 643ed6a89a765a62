"""Sampling completions: one prefill per prompt, then cached decoding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.model import Decoder, KeyValues, init_cache


class Prompts(NamedTuple):
  """Prompts of a batch, padded on the right."""

  tokens: jax.Array  # int32 [P, S]
  lengths: jax.Array  # int32 [P], real tokens

  @property
  def valid(self) -> jax.Array:
    """Bool `[P, S]`, True for real tokens."""
    return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


class Completions(NamedTuple):
  """Sampled completions; row b continues prompt b // G.

  What lies behind a completion's length is padding: arbitrary tokens, and
  log-probabilities of 0.
  """

  tokens: jax.Array  # int32 [B, T]
  logprobs: jax.Array  # float32 [B, T], of the distribution sampled from
  lengths: jax.Array  # int32 [B], tokens sampled, the terminator included
  terminated: jax.Array  # bool [B], whether the last one is a terminator

  @property
  def mask(self) -> jax.Array:
    """Bool `[B, T]`, True for sampled tokens."""
    return jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]


def pad_prompts(prompts: list[list[int]], width: int, pad_id: int) -> Prompts:
  """Pads token ids on the right to `width`, which keeps one compiled shape."""
  tokens = np.full((len(prompts), width), pad_id, np.int32)
  for row, ids in zip(tokens, prompts, strict=True):
    row[: len(ids)] = ids
  lengths = np.array([len(ids) for ids in prompts], np.int32)
  return Prompts(jnp.asarray(tokens), jnp.asarray(lengths))


def prefill(
  model: Decoder, prompts: Prompts, *, compute_dtype, remat: bool = False
) -> tuple[jax.Array, KeyValues]:
  """Runs the prompts once.

  Returns:
    The hidden state of each prompt's last real token `[P, D]`, from which the
    first completion token is predicted, and the prompts' keys and values.
  """
  batch, time = prompts.tokens.shape
  positions = jnp.broadcast_to(jnp.arange(time)[None], (batch, time))
  hidden, key_values = model(
    prompts.tokens,
    positions,
    prompts.valid,
    compute_dtype=compute_dtype,
    remat=remat,
  )
  last = (prompts.lengths - 1)[:, None, None]
  return jnp.take_along_axis(hidden, last, axis=1)[:, 0], key_values


def generate(
  model: Decoder,
  prompts: Prompts,
  key: jax.Array,
  *,
  group: int,
  max_new_tokens: int,
  temperature: float | jax.Array,
  terminators: jax.Array,
  compute_dtype,
) -> Completions:
  """Samples `group` completions for each prompt.

  Every row has its own random stream, so a sample depends neither on the
  batch around it nor on the sharding.

  Args:
    model: the policy.
    prompts: P prompts.
    key: of this rollout; consumed.
    group: G, completions per prompt.
    max_new_tokens: T; longer completions are cut off.
    temperature: 0 decodes greedily; log-probabilities are then those at 1.
    terminators: bool `[V]`, tokens that end a completion.
    compute_dtype: of the forward and the cache.

  Returns:
    B = P * G completions.
  """
  last, prefix = prefill(model, prompts, compute_dtype=compute_dtype)
  batch = last.shape[0] * group
  row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
  offset = jnp.repeat(prompts.lengths, group)[:, None]

  def sample(state, t, hidden):  # hidden [B, D]
    tokens, logprobs, lengths, terminated = state
    logits = model.logits(hidden, compute_dtype=compute_dtype)  # [B, V]
    scores = logits / jnp.where(temperature > 0, temperature, 1.0)
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, t)
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:]))
    perturbed = scores + jnp.where(temperature > 0, gumbel(step_keys), 0.0)
    token = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)  # [B]
    logprob = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
    logprob -= jax.nn.logsumexp(scores, axis=-1)
    active = ~terminated
    return Completions(
      tokens.at[:, t].set(jnp.where(active, token, tokens[:, t])),
      logprobs.at[:, t].set(jnp.where(active, logprob, 0.0)),
      lengths + active,
      terminated | terminators[token],
    )

  def decode(carry):
    t, state, cache = carry
    inputs = jax.lax.dynamic_slice_in_dim(state.tokens, t - 1, 1, axis=1)
    hidden, cache = model(
      inputs,
      offset + t - 1,
      jnp.ones(inputs.shape, bool),
      prefix=prefix,
      prefix_valid=prompts.valid,
      cache=cache,
      cache_index=t - 1,
      compute_dtype=compute_dtype,
    )
    return t + 1, sample(state, t, hidden[:, 0]), cache

  def unfinished(carry):
    t, state, _ = carry
    return (t < max_new_tokens) & ~jnp.all(state.terminated)

  state = Completions(
    jnp.zeros((batch, max_new_tokens), jnp.int32),
    jnp.zeros((batch, max_new_tokens), jnp.float32),
    jnp.zeros(batch, jnp.int32),
    jnp.zeros(batch, bool),
  )
  state = sample(state, jnp.int32(0), jnp.repeat(last, group, axis=0))
  cache = init_cache(
    model.config, batch, max(max_new_tokens - 1, 1), compute_dtype
  )
  _, state, _ = jax.lax.while_loop(
    unfinished, decode, (jnp.int32(1), state, cache)
  )
  return state


def cast(params: nnx.State, compute_dtype) -> nnx.State:
  """Weights in the compute dtype, once per call rather than per token."""
  return jax.tree.map(lambda x: x.astype(compute_dtype), params)
