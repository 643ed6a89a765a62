"""Scoring completions: log-probabilities, entropy and divergence per token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from train import losses, micro_batch
from train.model import Decoder
from train.rollout import Prompts, last_hidden
from train.sharding import ROWS, constrain, row_shards

# Tokens on one device whose logits are there at once. Each chunk reads the
# head's weights again: a TPU multiplies about 240 tokens (v5e) or 170 (v5p) in
# the time that this takes.
_TOKENS = 256


class TokenScores(NamedTuple):
  """What the policy says of each completion token, all float32 `[B, T]`."""

  logprobs: jax.Array  # nats, of the token
  entropy: jax.Array  # nats, of the distribution it was drawn from
  reference_logprobs: jax.Array | None  # nats, of the token
  kl: jax.Array | None  # nats, KL(policy || reference) over the vocabulary


def completion_hidden(
  model: Decoder,
  prompts: Prompts,
  tokens: jax.Array,
  *,
  compute_dtype,
  remat: bool = False,
) -> jax.Array:
  """Hidden states that predict each completion token, teacher-forced.

  Args:
    model: the policy.
    prompts: P prompts.
    tokens: int32 `[B, T]`, completions, prompt-major.
    compute_dtype: of the forward.
    remat: recompute whole layers in the backward pass.

  Returns:
    `[B, T, D]`: position t predicts `tokens[:, t]`.
  """
  hidden, behind = model(
    *prompts, tokens[:, :-1], compute_dtype=compute_dtype, remat=remat
  )
  first = last_hidden(hidden, prompts.lengths)
  first = jnp.repeat(first, len(tokens) // len(first), axis=0)[:, None]
  return jnp.concatenate([first, behind], axis=1)


def token_scores(
  model: Decoder,
  hidden: jax.Array,
  tokens: jax.Array,
  *,
  temperature: float,
  compute_dtype,
  reference: tuple[Decoder, jax.Array] | None = None,
) -> TokenScores:
  """Scores tokens from hidden states, a few positions at a time.

  Logits exist for one chunk of positions only, and are computed again in the
  backward pass: a batch never holds `[B, T, V]`.

  Args:
    model: the policy; its head is what is used.
    hidden: `[B, T, D]`, from `completion_hidden`.
    tokens: int32 `[B, T]`.
    temperature: divides all logits, the reference's too.
    compute_dtype: of the head's product; logits are float32.
    reference: the reference policy and its hidden states, for the divergence.

  Returns:
    Scores for every position, padding included.
  """
  batch, time = tokens.shape
  at_once = _TOKENS * row_shards(jax.sharding.get_abstract_mesh())
  chunks = -(-time // max(at_once // batch, 1))

  def head(model):
    weights = model.head_weights(compute_dtype)  # gathered once, not per chunk

    def log_softmax(hidden):
      logits = model.logits(
        hidden, compute_dtype=compute_dtype, weights=weights
      )
      logits = constrain(logits, ROWS, None, 'tensor')  # [B, chunk, V]
      return jax.nn.log_softmax(logits / temperature)

    return log_softmax

  policy = head(model)
  other = None if reference is None else head(reference[0])

  @jax.checkpoint
  def score(hidden, tokens, reference_hidden):
    def of_token(log_p):
      return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]

    log_p = policy(hidden)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    if other is None:
      return TokenScores(of_token(log_p), entropy, None, None)
    log_q = other(reference_hidden)
    kl = losses.kl_exact(log_p, log_q)
    return TokenScores(of_token(log_p), entropy, of_token(log_q), kl)

  reference_hidden = None if reference is None else reference[1]
  return micro_batch.over_time(score, chunks)(hidden, tokens, reference_hidden)
