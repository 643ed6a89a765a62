"""Sampling completions: one prefill per prompt, then cached decoding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.model import Decoder, init_cache, unstack
from train.sharding import ROWS, constrain


class Prompts(NamedTuple):
  """Prompts of a batch, padded on the right."""

  tokens: jax.Array  # int32 [P, S]
  lengths: jax.Array  # int32 [P], real tokens


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
  return Prompts(tokens, lengths)


def last_hidden(hidden: jax.Array, lengths: jax.Array) -> jax.Array:
  """Hidden states `[P, D]` of the last real tokens, of `[P, S, D]`."""
  last = (lengths - 1)[:, None, None]
  return jnp.take_along_axis(hidden, last, axis=1)[:, 0]


class Support(NamedTuple):
  """Which tokens may be sampled; the neutral values allow all.

  Applied one after the other, as `transformers` does: each on what the ones
  before left, after the temperature.
  """

  top_k: int = 0  # the k most likely; 0: all
  top_p: float = 1.0  # the fewest that have probability p together
  min_p: float = 0.0  # those with p times the largest probability or more


def restrict(scores: jax.Array, support: Support) -> jax.Array:
  """Sets the scores of tokens outside the support to -inf.

  The most likely token always stays. Ties with the last token of top-k or
  top-p stay as well.

  Args:
    scores: float32 `[B, V]`, logits over the temperature.
    support: static.
  """
  top_k, top_p, min_p = support
  if top_k:
    least = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))[0][:, -1:]
    scores = jnp.where(scores >= least, scores, -jnp.inf)
  if top_p < 1:
    ordered = -jnp.sort(-scores, axis=-1)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    kept = jnp.where((before < top_p).at[:, 0].set(True), ordered, jnp.inf)
    scores = jnp.where(
      scores >= jnp.min(kept, axis=-1, keepdims=True), scores, -jnp.inf
    )
  if min_p:
    least = jnp.max(scores, axis=-1, keepdims=True) + jnp.log(min_p)
    scores = jnp.where(scores >= least, scores, -jnp.inf)
  return scores


def generate(
  model: Decoder,
  prompts: Prompts,
  key: jax.Array,
  *,
  group: int,
  max_new_tokens: int,
  temperature: float | jax.Array,
  endings: jax.Array,
  compute_dtype,
  support: Support = Support(),  # noqa: B008 - immutable
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
    endings: int32 `[Z, V]`, what ends a completion, see
      `stop_strings.automaton`.
    compute_dtype: of the forward and the cache.
    support: the tokens that may be sampled. Log-probabilities are those of the
      distribution on them.

  Returns:
    B = P * G completions.
  """
  hidden, prefix = model.prefill(prompts.tokens, compute_dtype=compute_dtype)
  last, prefix = last_hidden(hidden, prompts.lengths), unstack(prefix)
  weights = model.layer_wise(compute_dtype)
  batch = last.shape[0] * group
  row_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
  offset = jnp.repeat(prompts.lengths, group)[:, None]

  def sample(state, text, t, hidden):  # text [B], hidden [B, D]
    tokens, logprobs, lengths, terminated = state
    logits = model.logits(
      hidden, compute_dtype=compute_dtype, weights=weights.head[None]
    )
    logits = constrain(logits, ROWS, 'tensor')  # [B, V]
    scores = logits / jnp.where(temperature > 0, temperature, 1.0)
    scores = restrict(scores, support)
    step_keys = jax.vmap(jax.random.fold_in, (0, None))(row_keys, t)
    gumbel = jax.vmap(lambda k: jax.random.gumbel(k, logits.shape[1:]))
    perturbed = scores + jnp.where(temperature > 0, gumbel(step_keys), 0.0)
    token = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)  # [B]
    logprob = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
    logprob -= jax.nn.logsumexp(scores, axis=-1)
    active = ~terminated
    text = jnp.where(active, endings[text, token], text)
    state = Completions(
      tokens.at[:, t].set(jnp.where(active, token, tokens[:, t])),
      logprobs.at[:, t].set(jnp.where(active, logprob, 0.0)),
      lengths + active,
      text == endings.shape[0],
    )
    return state, text

  def decode(carry):
    t, state, text, cache = carry
    inputs = jax.lax.dynamic_slice_in_dim(state.tokens, t - 1, 1, axis=1)
    hidden, cache = model.decode(
      weights,
      inputs,
      offset + t - 1,
      cache,
      t - 1,
      prefix=prefix,
      lengths=prompts.lengths,
    )
    state, text = sample(state, text, t, hidden[:, 0])
    return t + 1, state, text, cache

  def unfinished(carry):
    t, state, *_ = carry
    return (t < max_new_tokens) & ~jnp.all(state.terminated)

  state = Completions(
    jnp.zeros((batch, max_new_tokens), jnp.int32),
    jnp.zeros((batch, max_new_tokens), jnp.float32),
    jnp.zeros(batch, jnp.int32),
    jnp.zeros(batch, bool),
  )
  text = jnp.zeros(batch, jnp.int32)
  state, text = sample(
    state, text, jnp.int32(0), jnp.repeat(last, group, axis=0)
  )
  cache = init_cache(
    model.config, batch, max(max_new_tokens - 1, 1), compute_dtype
  )
  _, state, *_ = jax.lax.while_loop(
    unfinished, decode, (jnp.int32(1), state, text, cache)
  )
  return state


def cast(params: nnx.State, compute_dtype) -> nnx.State:
  """Weights in the compute dtype, once per call rather than per token."""
  return jax.tree.map(lambda x: x.astype(compute_dtype), params)
