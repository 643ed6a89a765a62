import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train import losses, scoring
from train.scoring import completion_hidden, token_scores

pytestmark = pytest.mark.usefixtures('quick_compile')

LENGTHS, WIDTH, GROUP, TIME = (6, 1, 4), 6, 5, 7
BATCH, TEMPERATURE = len(LENGTHS) * GROUP, 0.7  # that of `unshared_loss`
EPS = 2.0**-24  # half a unit in the last place of float32, relative


@pytest.fixture(scope='module')
def hidden(small):
  """Hidden states of a policy and of another one, float32 `[B, T, D]`."""
  rng = np.random.default_rng(4)
  size = (2, BATCH, TIME, small.config.width)
  return jnp.asarray(rng.normal(size=size), jnp.float32)


def weights(seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(BATCH, TIME))


def loop(small, hidden, other, tokens):
  """Scores token by token, float64; also what gradients are made of."""
  head = np.asarray(small.params['embed'][...], np.float64)

  def log_softmax(x):
    x = x / TEMPERATURE
    return x - np.log(np.sum(np.exp(x)))

  scores = {
    name: np.zeros((BATCH, TIME))
    for name in ('logprobs', 'entropy', 'reference_logprobs', 'kl')
  }
  probabilities = np.zeros((BATCH, TIME, len(head)))
  for b in range(BATCH):
    for t in range(TIME):
      log_p = log_softmax(head @ np.asarray(hidden[b, t], np.float64))
      log_q = log_softmax(head @ np.asarray(other[b, t], np.float64))
      p = np.exp(log_p)
      probabilities[b, t] = p
      scores['logprobs'][b, t] = log_p[tokens[b, t]]
      scores['reference_logprobs'][b, t] = log_q[tokens[b, t]]
      scores['entropy'][b, t] = -(p @ log_p)
      scores['kl'][b, t] = p @ (log_p - log_q)
  return scores, probabilities, head


# 7 at once, or 3 at a time, of which the last two are padding.
@pytest.mark.parametrize('positions', [TIME, 3])
def test_scores_and_gradients_equal_a_loop_over_tokens_for_any_chunk(
  small, hidden, positions, monkeypatch
):
  monkeypatch.setattr(scoring, '_TOKENS', BATCH * (positions + 1) - 1)
  own, other = hidden
  tokens = small.tokens(BATCH, TIME)
  weight = weights()

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
  def run(params, own):
    model = nnx.merge(small.graphdef, params)
    scores = token_scores(
      model,
      own,
      tokens,
      temperature=TEMPERATURE,
      compute_dtype=jnp.float32,
      reference=(nnx.merge(small.graphdef, small.params), other),
    )
    return jnp.sum(scores.logprobs * jnp.float32(weight)), scores

  (_, scores), (params_grad, hidden_grad) = run(small.params, own)
  want, p, head = loop(small, own, other, np.asarray(tokens))
  # Logits of at most 16 / 0.7 units, sums of 12 products, then of 29 terms.
  atol = 16 / TEMPERATURE * EPS * 20
  for name, expected in want.items():
    got = getattr(scores, name)
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=name)
    assert got.dtype == jnp.float32

  # d logprob / d logits = one-hot - p, over the temperature.
  one_hot = np.eye(len(head))[np.asarray(tokens)]
  by_logits = (one_hot - p) * weight[..., None] / TEMPERATURE
  expected = by_logits @ head
  np.testing.assert_allclose(
    hidden_grad, expected, rtol=0, atol=atol * np.abs(weight).max() * 2
  )
  expected = np.einsum('btv,btd->vd', by_logits, np.asarray(own, np.float64))
  # Sums over 105 tokens, of terms up to 10.
  np.testing.assert_allclose(
    params_grad['embed'][...], expected, rtol=0, atol=105 * 10 * EPS * 4
  )


def test_no_array_of_all_logits_exists(small, hidden, monkeypatch):
  monkeypatch.setattr(scoring, '_TOKENS', 2 * BATCH)

  def run(params, own):
    return token_scores(
      nnx.merge(small.graphdef, params),
      own,
      small.tokens(BATCH, TIME),
      temperature=1.0,
      compute_dtype=jnp.float32,
    ).logprobs.sum()

  text = str(jax.make_jaxpr(jax.grad(run))(small.params, hidden[0]))
  vocab = small.config.vocab_size
  assert f'[{BATCH},2,{vocab}]' in text
  assert f'[{BATCH},{TIME},{vocab}]' not in text
  assert f'[4,{BATCH},2,{vocab}]' not in text


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_the_divergence_from_an_equal_policy_is_exactly_0(small, hidden, dtype):
  tokens = small.tokens(BATCH, TIME)

  @jax.jit
  def run(params, other_params, own, other):
    return token_scores(
      nnx.merge(small.graphdef, params),
      own,
      tokens,
      temperature=TEMPERATURE,
      compute_dtype=dtype,
      reference=(nnx.merge(small.graphdef, other_params), other),
    )

  params, own = small.cast(dtype), hidden[0].astype(dtype)
  copies = jax.tree.map(jnp.copy, (params, own))
  scores = run(params, copies[0], own, copies[1])
  np.testing.assert_array_equal(scores.kl, np.zeros((BATCH, TIME)))
  np.testing.assert_array_equal(scores.reference_logprobs, scores.logprobs)


@pytest.fixture(scope='module')
def shared_loss(small):
  """Loss and gradients by weight and by log-probability, as in training."""

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
  def run(params, shift, prompts, tokens, advantages, mask):
    model = nnx.merge(small.graphdef, params)
    hidden = completion_hidden(
      model, prompts, tokens, compute_dtype=jnp.float32
    )
    logprobs = (
      shift
      + token_scores(
        model,
        hidden,
        tokens,
        temperature=TEMPERATURE,
        compute_dtype=jnp.float32,
      ).logprobs
    )
    made = losses.policy_gradient(
      logprobs, jax.lax.stop_gradient(logprobs), advantages, mask
    )
    return jnp.sum(made.values) / mask.size, logprobs

  return run


def batch(small):
  prompts = small.prompts(LENGTHS, WIDTH)
  tokens = small.tokens(BATCH, TIME)
  rng = np.random.default_rng(6)
  lengths = rng.integers(1, TIME + 1, BATCH)
  lengths[:2] = 1, TIME
  mask = jnp.asarray(np.arange(TIME) < lengths[:, None])
  advantages = jnp.asarray(rng.normal(size=BATCH), jnp.float32)
  return prompts, tokens, advantages, mask


NO_SHIFT = jnp.zeros((BATCH, TIME), jnp.float32)


def test_sharing_prompts_of_unequal_length_changes_neither_loss_nor_gradient(
  small, shared_loss, unshared_loss
):
  prompts, tokens, advantages, mask = batch(small)
  (_, logprobs), (got, _) = shared_loss(
    small.params, NO_SHIFT, prompts, tokens, advantages, mask
  )
  full, slots = small.unshared(prompts, tokens)
  value, want = unshared_loss(
    small.params, full, slots, tokens, advantages, mask
  )
  # The value of the shared loss is that of a ratio of 1 whatever the forward
  # gives, so the log-probabilities are put into the plain sum.
  terms = np.where(mask, advantages[:, None] * logprobs, 0)
  np.testing.assert_allclose(
    -terms.sum() / mask.size, value, rtol=0, atol=40 * EPS * np.abs(terms).max()
  )
  same_gradient(got, want)


def same_gradient(got, want):
  # Forward and backward of two layers, sums over the 105 tokens of the batch
  # in another order: sqrt(2 * 2 * 20 * 105) = 92 roundings.
  for path, expected in jax.tree.leaves_with_path(want):
    actual = dict(jax.tree.leaves_with_path(got))[path]
    size = np.abs(expected).max()
    assert size > 1e-4, path
    np.testing.assert_allclose(actual, expected, rtol=0, atol=92 * EPS * size)


def test_completions_of_one_token_have_scores_and_gradients(
  small, shared_loss, unshared_loss
):
  prompts, tokens, advantages, mask = (
    x if i != 1 else x[:, :1] for i, x in enumerate(batch(small))
  )
  (_, got), (gradient, _) = shared_loss(
    small.params, NO_SHIFT[:, :1], prompts, tokens, advantages, mask[:, :1]
  )
  log_p = small.numpy_log_p(prompts, tokens, TEMPERATURE)
  want = np.take_along_axis(log_p, np.asarray(tokens)[..., None], -1)[..., 0]
  np.testing.assert_allclose(got, want, rtol=0, atol=40 * EPS * 5)
  full, slots = small.unshared(prompts, tokens)
  _, want = unshared_loss(
    small.params, full, slots, tokens, advantages, mask[:, :1]
  )
  same_gradient(gradient, want)


def test_permuting_the_batch_permutes_every_score(small, shared_loss):
  prompts, tokens, advantages, mask = batch(small)
  rng = np.random.default_rng(8)
  order = np.array([2, 0, 1])
  rows = np.concatenate([p * GROUP + rng.permutation(GROUP) for p in order])
  (_, want), (_, by_logprob) = shared_loss(
    small.params, NO_SHIFT, prompts, tokens, advantages, mask
  )
  (_, got), (_, got_by_logprob) = shared_loss(
    small.params,
    NO_SHIFT,
    jax.tree.map(lambda x: x[order], prompts),
    tokens[rows],
    advantages[rows],
    mask[rows],
  )
  atol = 16 / TEMPERATURE * EPS * 20
  np.testing.assert_allclose(got, want[rows], rtol=0, atol=atol)
  np.testing.assert_array_equal(got_by_logprob, by_logprob[rows])


def test_tokens_behind_the_end_have_no_influence(small, shared_loss):
  prompts, tokens, advantages, mask = batch(small)
  other = jnp.where(mask, tokens, 28 - tokens)
  assert np.any(np.asarray(other) != np.asarray(tokens))
  results = []
  for t in (tokens, other):
    (value, logprobs), gradients = shared_loss(
      small.params, NO_SHIFT, prompts, t, advantages, mask
    )
    logprobs = np.where(mask, logprobs, 0)
    results.append(jax.tree.leaves((value, logprobs, gradients)))
  for a, b in zip(*results, strict=True):
    np.testing.assert_array_equal(a, b)


def test_an_advantage_on_one_token_reaches_the_logprob_of_this_token_only(
  small, shared_loss, unshared_loss
):
  prompts, tokens, _, _ = batch(small)
  row, last = 7, 3
  mask = np.zeros((BATCH, TIME), bool)
  mask[row, last] = True
  advantages = jnp.asarray(np.eye(BATCH)[row], jnp.float32)
  _, (got, by_logprob) = shared_loss(
    small.params, NO_SHIFT, prompts, tokens, advantages, jnp.asarray(mask)
  )
  np.testing.assert_array_equal(
    by_logprob, np.where(mask, np.float32(-1 / (BATCH * TIME)), 0)
  )
  # The whole gradient is that of this one log-probability, which a forward of
  # its own prompt and tokens gives.
  full, slots = small.unshared(prompts, tokens)
  only = np.zeros_like(full)
  length = LENGTHS[row // GROUP] + last
  only[row, :length] = full[row, :length]
  _, want = unshared_loss(
    small.params, only, slots, tokens, advantages, jnp.asarray(mask)
  )
  same_gradient(got, want)
