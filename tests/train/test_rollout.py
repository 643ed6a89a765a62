import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train.rollout import (
  Completions,
  Prompts,
  Support,
  generate,
  pad_prompts,
  restrict,
)

pytestmark = pytest.mark.usefixtures('quick_compile')

LENGTHS, WIDTH, GROUP, TIME = (6, 1, 4), 6, 5, 7
BATCH = len(LENGTHS) * GROUP

# Log-probabilities are differences of float32 logits of at most 16 units, so
# half a unit in the last place is 2^-21 = 4.8e-7. Two forwards of two layers
# with some twenty roundings and sums of about twenty terms each, errors adding
# like a random walk: sqrt(2 * 2 * 20 * 20) = 40 of them.
ATOL = 40 * 2.0**-21


@pytest.fixture(scope='module')
def sample(small):
  """Jitted `generate` of the small decoder, as NumPy arrays."""

  @functools.partial(jax.jit, static_argnames=('group', 'time', 'dtype'))
  def run(params, prompts, key, ends, *, group, time, temperature, dtype):
    return generate(
      nnx.merge(small.graphdef, params),
      prompts,
      key,
      group=group,
      max_new_tokens=time,
      temperature=temperature,
      endings=ends,
      compute_dtype=dtype,
    )

  def sample(
    prompts,
    seed=0,
    ends=(),
    *,
    group=GROUP,
    time=TIME,
    temperature=1.0,
    dtype=jnp.float32,
  ):
    endings = np.isin(np.arange(small.config.vocab_size), list(ends))[None]
    completions = run(
      small.cast(dtype),
      prompts,
      jax.random.key(seed),
      jnp.asarray(endings, jnp.int32),
      group=group,
      time=time,
      temperature=temperature,
      dtype=dtype,
    )
    return jax.tree.map(np.asarray, completions)

  return sample


@pytest.fixture(scope='module')
def prompts(small):
  return small.prompts(LENGTHS, WIDTH)


def chosen(log_p, tokens):
  return np.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_logprobs_equal_those_of_an_unshared_full_forward(
  small, sample, prompts, temperature
):
  got = sample(prompts, temperature=temperature, ends=range(0, 29, 4))
  log_p = small.numpy_log_p(prompts, got.tokens, temperature)
  want = np.where(got.mask, chosen(log_p, got.tokens), 0)
  np.testing.assert_allclose(
    got.logprobs, want, rtol=0, atol=ATOL / temperature
  )
  # Each of these mistakes would be seen: no temperature, the prompt's last
  # padded token in place of its last real one, a shift by one token.
  assert np.abs(got.logprobs[:, 0]).min() > 1e-3
  assert got.logprobs.dtype == np.float32


def test_the_first_token_follows_the_last_real_token_of_its_prompt(
  small, sample, prompts
):
  # What stands in the padding is random, and must not matter.
  padded = prompts.tokens.at[1, 1:].set(0).at[2, 4:].set(28)
  got, other = sample(prompts), sample(Prompts(padded, prompts.lengths))
  for a, b in zip(got, other, strict=True):
    np.testing.assert_array_equal(a, b)
  for i, length in enumerate(LENGTHS):
    alone = Prompts(
      prompts.tokens[i : i + 1, :length], prompts.lengths[i : i + 1]
    )
    rows = slice(i * GROUP, (i + 1) * GROUP)
    log_p = small.numpy_log_p(alone, got.tokens[rows, :1])
    np.testing.assert_allclose(
      got.logprobs[rows, 0],
      chosen(log_p, got.tokens[rows, :1])[:, 0],
      rtol=0,
      atol=ATOL,
    )


def test_bfloat16_logprobs_differ_from_a_full_forward_by_its_rounding(
  small, sample, prompts
):
  got = sample(prompts, dtype=jnp.bfloat16)
  log_p = small.numpy_log_p(prompts, got.tokens, dtype=jnp.bfloat16)
  error = np.abs(got.logprobs - chosen(log_p, got.tokens))
  # As ATOL with roundings of 2^-9 instead of 2^-24, seen as a root mean
  # square: two times about 24 roundings of hidden states of size 1, times the
  # size of an embedding, 0.4 * sqrt(12).
  assert 0 < np.sqrt(np.mean(error**2)) < np.sqrt(48) * 2.0**-9 * 1.4
  assert got.logprobs.dtype == np.float32


def test_a_completion_ends_with_its_first_terminator_or_at_the_longest_length(
  sample, prompts
):
  ends, lengths = np.arange(0, 29, 4), set()
  for seed in range(4):
    got = sample(prompts, seed, ends)
    for tokens, length, terminated in zip(
      got.tokens, got.lengths, got.terminated, strict=True
    ):
      assert not np.isin(tokens[: length - 1], ends).any()
      assert np.isin(tokens[length - 1], ends) == terminated
      assert terminated or length == TIME
    np.testing.assert_array_equal(got.mask.sum(axis=1), got.lengths)
    assert np.all(got.logprobs[~got.mask] == 0)
    lengths |= set(got.lengths.tolist())
  assert lengths == set(range(1, TIME + 1))


def test_a_terminator_as_the_first_token_counts_as_one_token(sample, prompts):
  got = sample(prompts, ends=range(29))
  assert got.terminated.all()
  np.testing.assert_array_equal(got.lengths, np.ones(BATCH))
  np.testing.assert_array_equal(got.mask, [[True] + [False] * 6] * BATCH)
  assert np.all(got.logprobs[:, 0] < 0) and np.all(got.logprobs[:, 1:] == 0)


def test_without_a_terminator_every_completion_has_the_longest_length(
  sample, prompts
):
  got = sample(prompts)
  assert not got.terminated.any()
  np.testing.assert_array_equal(got.lengths, np.full(BATCH, TIME))
  assert got.mask.all() and np.all(got.logprobs < 0)


def test_a_finished_completion_does_not_change_while_others_go_on(
  sample, prompts
):
  endless, got = sample(prompts), sample(prompts, ends=range(0, 29, 4))
  # The same noise: up to its end a completion is the start of the endless one.
  np.testing.assert_array_equal(
    got.tokens, np.where(got.mask, endless.tokens, 0)
  )
  np.testing.assert_array_equal(
    got.logprobs, np.where(got.mask, endless.logprobs, 0)
  )
  assert len(set(got.lengths.tolist())) > 3


def test_the_same_key_repeats_a_rollout_and_another_does_not(sample, prompts):
  first, again, other = sample(prompts), sample(prompts), sample(prompts, 1)
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  assert np.all(np.any(first.tokens != other.tokens, axis=1))


def test_the_completions_of_a_prompt_differ(sample, prompts):
  tokens = sample(prompts).tokens.reshape(len(LENGTHS), GROUP, TIME)
  assert all(len(np.unique(rows, axis=0)) == GROUP for rows in tokens)


def test_a_sample_does_not_depend_on_the_other_prompts(sample, prompts):
  def take(order):
    order = jnp.array(order)
    return Prompts(prompts.tokens[order], prompts.lengths[order])

  got = sample(prompts)
  swapped = sample(take([1, 0, 2]))
  # Noise belongs to the row, so the third prompt's samples are the same ones.
  for a, b in zip(got, swapped, strict=True):
    np.testing.assert_array_equal(a[2 * GROUP :], b[2 * GROUP :])
  assert np.any(got.tokens[:GROUP] != swapped.tokens[GROUP : 2 * GROUP])
  same = sample(take([0, 0, 0])).tokens
  np.testing.assert_array_equal(same[:GROUP], got.tokens[:GROUP])
  assert np.any(same[:GROUP] != same[GROUP : 2 * GROUP])


def test_at_temperature_0_the_likeliest_token_is_taken_in_a_batch_of_one(
  small, sample
):
  prompts = small.prompts((3,), 3)
  got = sample(prompts, group=1, temperature=0.0)
  log_p = small.numpy_log_p(prompts, got.tokens)
  assert got.tokens.shape == (1, TIME)
  np.testing.assert_array_equal(got.tokens, log_p.argmax(axis=-1))
  np.testing.assert_allclose(
    got.logprobs, log_p.max(axis=-1), rtol=0, atol=ATOL
  )


def test_without_noise_permuting_the_prompts_permutes_the_completions(
  sample, prompts
):
  order = jnp.array([2, 0, 1])
  ends = range(0, 29, 4)
  got = sample(prompts, temperature=0.0, ends=ends)
  permuted = Prompts(prompts.tokens[order], prompts.lengths[order])
  other = sample(permuted, temperature=0.0, ends=ends)
  rows = np.concatenate([p * GROUP + np.arange(GROUP) for p in order])
  for name in ('tokens', 'lengths', 'terminated'):
    np.testing.assert_array_equal(
      getattr(other, name), getattr(got, name)[rows], err_msg=name
    )
  np.testing.assert_allclose(
    other.logprobs, got.logprobs[rows], rtol=0, atol=ATOL
  )
  firsts = got.tokens[::GROUP]
  assert len(np.unique(firsts, axis=0)) == len(LENGTHS)


def test_first_tokens_are_as_frequent_as_their_probabilities(small, sample):
  group, temperature = 10_000, 0.6
  prompts = small.prompts((2, 5), 5)
  got = sample(prompts, group=group, time=1, temperature=temperature)
  log_p = small.numpy_log_p(prompts, got.tokens[:: group // 2], temperature)
  for i in range(2):
    expected = group * np.exp(log_p[2 * i, 0])
    tokens = got.tokens[i * group : (i + 1) * group, 0]
    counts = np.bincount(tokens, minlength=len(expected))
    rare = expected < 5  # one cell: chi-square needs some counts in each
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    freedom = np.sum(expected > 0) - 1
    statistic = np.sum((counts - expected) ** 2 / expected)
    # Mean `freedom`, variance 2 freedom; 5 sigma. Without the temperature it
    # is in the thousands.
    assert freedom >= 5
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_prompts_are_padded_on_the_right_to_one_width():
  got = pad_prompts([[5, 6, 7], [8]], 4, 9)
  np.testing.assert_array_equal(got.tokens, [[5, 6, 7, 9], [8, 9, 9, 9]])
  np.testing.assert_array_equal(got.lengths, [3, 1])
  assert got.tokens.dtype == got.lengths.dtype == jnp.int32


def test_a_mask_is_made_of_lengths_not_of_token_ids():
  zeros = jnp.zeros((3, 2))
  completions = Completions(
    zeros.astype(jnp.int32), zeros, jnp.array([0, 1, 2]), jnp.zeros(3, bool)
  )
  np.testing.assert_array_equal(
    completions.mask, [[False, False], [True, False], [True, True]]
  )


@pytest.mark.parametrize(
  'support, kept',
  [
    # Probabilities 1/2, 1/4, 1/8, 1/16, 1/16 of tokens 3, 0, 4, 1, 2.
    (Support(), [0, 1, 2, 3, 4]),
    (Support(top_k=1), [3]),
    (Support(top_k=2), [0, 3]),
    (Support(top_k=4), [0, 1, 2, 3, 4]),  # a tie with the last one stays
    (Support(top_k=99), [0, 1, 2, 3, 4]),
    (Support(top_p=1e-6), [3]),
    (Support(top_p=0.5), [3]),
    (Support(top_p=0.51), [0, 3]),
    (Support(top_p=0.8), [0, 3, 4]),
    (Support(min_p=0.2), [0, 3, 4]),
    (Support(min_p=0.3), [0, 3]),
    (Support(min_p=1.0), [3]),
    # Of 1/2, 1/4, 1/8, renormalised 4/7, 2/7, 1/7: 0.6 needs two.
    (Support(top_k=3, top_p=0.6), [0, 3]),
    (Support(top_k=3, top_p=0.6, min_p=0.6), [3]),
  ],
)
def test_the_support_is_what_its_definition_leaves(support, kept):
  probability = np.array([[1 / 4, 1 / 16, 1 / 16, 1 / 2, 1 / 8]])
  shifted = jnp.asarray(np.log(probability) + 3, jnp.float32)
  got = jax.jit(restrict, static_argnums=1)(shifted, support)
  np.testing.assert_array_equal(np.isfinite(got[0]).nonzero()[0], kept)
  np.testing.assert_array_equal(got[0, kept], shifted[0, kept])


def test_logprobs_are_those_of_the_support_sampled_from(small, prompts):
  @jax.jit
  def run(params, key):
    return generate(
      nnx.merge(small.graphdef, params),
      prompts,
      key,
      group=GROUP,
      max_new_tokens=TIME,
      temperature=1.0,
      endings=jnp.zeros((1, small.config.vocab_size), jnp.int32),
      compute_dtype=jnp.float32,
      support=Support(top_k=3),
    )

  got = jax.tree.map(np.asarray, run(small.params, jax.random.key(0)))
  log_p = small.numpy_log_p(prompts, got.tokens)
  three = np.sort(log_p, axis=-1)[..., -3:]
  log_p = chosen(log_p, got.tokens)
  assert np.all(log_p >= three[..., 0] - ATOL)
  want = log_p - np.log(np.exp(three).sum(axis=-1))
  np.testing.assert_allclose(got.logprobs, want, rtol=0, atol=2 * ATOL)
