import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train import evaluate, sharding, tasks
from train.answers import Answers
from train.config import Config, ConfigError
from train.evaluate import (
  Evaluation,
  Evaluator,
  pass_at_k,
  sampled_evaluation,
)
from train.policy import Policy
from train.rollout import generate, pad_prompts
from train.tasks import Question, Task
from train.trainer import Trainer

pytestmark = pytest.mark.usefixtures('quick_compile')

# Prompts of unequal length; answers of one to three characters.
ASKED = [('1=', '2'), ('12=', '12'), ('2=', '1'), ('=', '121'), ('1=', '1')]
LONGEST, TEMPERATURE, WIDTH = 4, 0.7, 3
QUESTIONS = tuple(Question(*ASKED[i % 5], 'all') for i in range(7))


def make_task(questions):
  return Task('pieces', questions, questions, ('1', 0.1))


@pytest.fixture(scope='module')
def policy(make_small, pieces):
  """A decoder of the pieces, with one row of the embedding to spare."""
  return make_small(vocab_size=pieces.vocab_size + 1, seed=3)


@pytest.fixture(scope='module')
def evaluator(policy, pieces):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluate, '_PROMPTS', 5)  # 7 questions: 3 rows to spare
    return Evaluator(
      policy.graphdef,
      make_task(QUESTIONS),
      Answers(pieces, policy.config.vocab_size),
      questions=len(QUESTIONS),
      prompt_width=WIDTH,
      max_new_tokens=LONGEST,
      temperature=TEMPERATURE,
      compute_dtype=jnp.float32,
    )


@pytest.fixture(scope='module')
def evaluation(policy, evaluator):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(evaluate, '_PROMPTS', 5)
    return evaluator(policy.params)


def test_expected_reward_equals_the_sum_over_all_sequences(
  policy, pieces, evaluation
):
  # Every sequence of at most 4 tokens, written as the branches of a tree: the
  # probability of each prefix that has not ended yet, times that of the next.
  vocabulary = range(policy.config.vocab_size)
  ends = [
    i in pieces.eos_ids or b'\n' in pieces.token_bytes(i) for i in vocabulary
  ]
  inside = [i for i in vocabulary if not ends[i]]
  leaves = list(itertools.product(inside, repeat=LONGEST - 1))
  tokens = np.array([(*leaf, 0) for leaf in leaves])
  for (prompt, answer), got in zip(ASKED, evaluation.expected, strict=False):
    prompts = pad_prompts([pieces.encode(prompt)], WIDTH, 0)
    p = np.exp(policy.numpy_log_p(prompts, tokens, TEMPERATURE))  # [N, T, V]
    total, seen = 0.0, set()
    for leaf, row in zip(leaves, p, strict=True):
      for t in range(LONGEST):
        if leaf[:t] in seen:
          continue
        seen.add(leaf[:t])
        path = np.prod([row[i, leaf[i]] for i in range(t)])
        data = [pieces.token_bytes(i) for i in leaf[:t]]
        if not all(data):  # a token without text is part of no answer
          continue
        said = b''.join(data)
        for last in vocabulary:
          text = said
          if last not in pieces.eos_ids:
            text += pieces.token_bytes(last).partition(b'\n')[0]
          if ends[last] and text.decode(errors='replace') in (
            answer,
            ' ' + answer,
          ):
            total += path * row[t, last]
    # At most four factors and a few dozen terms, each known to some 40
    # roundings of logits of 16 units.
    assert total > 1e-4
    np.testing.assert_allclose(got, total, rtol=4 * 40 * 2.0**-20)


def test_expected_reward_equals_the_mean_of_sampled_rewards(
  policy, pieces, evaluation
):
  group = 4000
  answers = Answers(pieces, policy.config.vocab_size)
  prompts = pad_prompts([pieces.encode(p) for p, _ in ASKED], WIDTH, 0)

  @jax.jit
  def sample(params, key):
    return generate(
      nnx.merge(policy.graphdef, params),
      prompts,
      key,
      group=group,
      max_new_tokens=LONGEST,
      temperature=TEMPERATURE,
      endings=jnp.asarray(answers.endings),
      compute_dtype=jnp.float32,
    )

  got = jax.device_get(sample(policy.params, jax.random.key(0)))
  rewards, failures = tasks.score(
    make_task(QUESTIONS),
    [question for question in QUESTIONS[:5] for _ in range(group)],
    [
      answers.text(tokens[:length])
      for tokens, length in zip(got.tokens, got.lengths, strict=True)
    ],
    got.terminated,
  )
  assert failures == 0
  p = evaluation.expected[:5]
  sampled = rewards.reshape(5, group).mean(axis=1)
  sigma = np.sqrt(p * (1 - p) / group)
  assert np.all(np.abs(sampled - p) < 4 * sigma), (sampled, p, sigma)
  assert np.all(p > 9 / group)  # so that the bound means something


def test_the_spare_rows_of_the_last_batch_do_not_count(evaluation):
  assert evaluation.expected.shape == (len(QUESTIONS),)
  assert evaluation.expected.dtype == np.float64
  np.testing.assert_array_equal(
    evaluation.expected[5:], evaluation.expected[:2]
  )
  assert evaluation.mean == evaluation.expected.sum() / len(QUESTIONS)


def test_all_batches_share_one_compiled_shape(evaluation, evaluator):
  del evaluation  # has run
  assert evaluator._probabilities._cache_size() == 1


def test_the_gain_and_its_error_are_paired_by_question():
  before = Evaluation(np.array([0.1, 0.5, 0.9]))
  after = Evaluation(np.array([0.2, 0.7, 0.9]))
  # Gains .1, .2, 0: mean .1, deviation .1; unpaired it would be .29.
  gain, error = after.gain_over(before)
  np.testing.assert_allclose([gain, error], [0.1, 0.1 / np.sqrt(3)])
  assert before.mean == 0.5
  np.testing.assert_allclose(before.standard_error, 0.4 / np.sqrt(3))


def test_an_answer_that_no_completion_can_hold_is_an_error(policy, pieces):
  build = functools.partial(
    Evaluator,
    policy.graphdef,
    make_task(QUESTIONS),
    Answers(pieces, policy.config.vocab_size),
    questions=4,
    prompt_width=WIDTH,
    temperature=TEMPERATURE,
    compute_dtype=jnp.float32,
  )
  build(max_new_tokens=3)  # '12', '1' and a terminator
  with pytest.raises(ConfigError, match="'12=' fits into 1 new tokens"):
    build(max_new_tokens=1)


def test_pass_at_k_equals_the_share_of_subsets_with_a_right_one():
  samples = 7
  for k in range(1, samples + 1):
    got = pass_at_k(np.arange(samples + 1), samples, k)
    for correct in range(samples + 1):
      right = np.arange(samples) < correct
      subsets = itertools.combinations(right, k)
      want = np.mean([any(subset) for subset in subsets])
      np.testing.assert_allclose(got[correct], want, rtol=1e-15)
  # Not the biased 1 - (1 - c / n)^k.
  assert pass_at_k(np.array([2]), 4, 2)[0] == 5 / 6


def test_sampled_rewards_are_summarised_by_question():
  rewards = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0.5]], np.float32)
  got = sampled_evaluation(rewards, np.array([1, 0, 1], np.float32))
  want = {
    'eval_sampled': [0.5, 0, 0.875],
    'eval_greedy': [1, 0, 1],
    'eval_pass_at_2': [5 / 6, 0, 1],  # half a reward is no pass
    'eval_pass_at_4': [1, 0, 1],
  }
  assert got.keys() == want.keys() | {f'{k}_standard_error' for k in want}
  for name, x in want.items():
    error = np.std(x, ddof=1) / np.sqrt(3)
    np.testing.assert_allclose(
      [got[name], got[f'{name}_standard_error']], [np.mean(x), error]
    )


GROUP, ROUNDS = 160, 2


@pytest.fixture(scope='module')
def trainer(policy, pieces):
  """Asks 7 questions in batches of 5, and notes what is sampled."""

  class Spying(Trainer):
    def _sample(self, questions, prompts, key, temperature, *rollout):
      sample = super()._sample(questions, prompts, key, temperature, *rollout)
      completions = jax.device_get(sample.completions)
      self.sampled.append((temperature, prompts, completions, sample.rewards))
      return sample

  config = Config(
    model='pieces',
    arm='fp32',
    prompts=5,
    group=GROUP,
    max_new_tokens=LONGEST,
    temperature=TEMPERATURE,
    eval_questions=len(QUESTIONS),
    eval_samples=GROUP * ROUNDS,
  )
  mesh = sharding.make_mesh('')
  given = Policy(policy.config, policy.graphdef, policy.params, pieces, mesh)
  trainer = Spying(config, make_task(QUESTIONS), given, jnp.dtype('float32'))
  trainer.sampled = []
  return trainer


@pytest.fixture(scope='module')
def sampled(trainer, make_small, policy):
  other = make_small(vocab_size=policy.config.vocab_size, seed=4)
  trainer._reference = other.cast(jnp.bfloat16)
  return trainer.evaluate_sampled(), other


def test_the_sampled_reward_is_that_expected(sampled, evaluation):
  p, samples = evaluation.expected, GROUP * ROUNDS
  sigma = np.sqrt(np.sum(p * (1 - p)) / samples) / len(p)
  assert abs(sampled[0]['eval_sampled'] - p.mean()) < 4 * sigma
  # pass@k is a mean of 1 - (1 - p)^k over the questions, and rises with k.
  for k in (2, 4, 256):
    q = 1 - (1 - p) ** k
    sigma = np.sqrt(np.sum(q * (1 - q)) / (samples / k)) / len(p)
    got = sampled[0][f'eval_pass_at_{k}']
    assert abs(got - q.mean()) < 4 * sigma, k
  assert p.mean() > 4 * np.sqrt(np.sum(p * (1 - p)) / samples) / len(p)


def test_the_greedy_completion_takes_the_likeliest_token(
  sampled, trainer, policy
):
  greedy = [x for x in trainer.sampled if x[0] == 0]
  assert len(greedy) == 2
  rewards = []
  for (_, prompts, completions, reward), count in zip(
    greedy, (5, 2), strict=True
  ):
    log_p = policy.numpy_log_p(prompts, completions.tokens[::GROUP])
    likeliest = log_p.argmax(axis=-1)
    mask = completions.mask[::GROUP]
    np.testing.assert_array_equal(
      completions.tokens[::GROUP][mask], likeliest[mask]
    )
    rewards += reward[: count * GROUP : GROUP].tolist()
  assert sampled[0]['eval_greedy'] == np.mean(np.float32(rewards))
  assert 0 < np.mean(rewards) < 1


def test_the_divergence_is_that_of_the_questions_asked(
  sampled, trainer, policy
):
  got, other = sampled
  total = 0.0
  rounds = [x for x in trainer.sampled if x[0] > 0]
  assert len(rounds) == 2 * ROUNDS
  for i, (_, prompts, completions, _) in enumerate(rounds):
    rows = (5 if i < ROUNDS else 2) * GROUP  # the rest fills up the batch
    log_p, log_q = (
      small.numpy_log_p(prompts, completions.tokens, TEMPERATURE)
      for small in (policy, other)
    )
    kl = np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)
    total += np.sum(kl[:rows], where=completions.mask[:rows])
  want = total / (len(QUESTIONS) * GROUP * ROUNDS)
  # Some 40 roundings of logits of 16 units, over the temperature, a token.
  atol = LONGEST * 40 * 16 * 2.0**-24 / TEMPERATURE
  np.testing.assert_allclose(got['eval_kl_exact'], want, rtol=0, atol=atol)
  assert want > 0.1


def test_sampling_decoding_and_both_policies_share_their_programs(
  sampled, trainer
):
  del sampled  # has run
  assert trainer._programs.rollout._cache_size() == 1
  assert trainer._programs.held_out_kl._cache_size() == 1


def test_a_repeated_question_counts_once_in_the_standard_error():
  # Three distinct questions of .1, .5, .9 with weights 1/4, 1/2, 1/4: the mean
  # is .5, and the error sqrt(3/2 * 2 * (.4 / 4)^2).
  before = evaluate.Evaluation(np.zeros(4), np.array([0, 1, 1, 2]))
  after = evaluate.Evaluation(
    np.array([0.1, 0.5, 0.5, 0.9]), np.array([0, 1, 1, 2])
  )
  np.testing.assert_allclose(after.standard_error, 0.03**0.5, rtol=1e-12)
  np.testing.assert_allclose(
    after.gain_over(before), (0.5, 0.03**0.5), rtol=1e-12
  )


def test_samples_of_a_repeated_question_are_no_further_questions():
  # Means .25 and .75 by question, weights 2/3 and 1/3, mean 5/12:
  # sqrt(2 * ((2/3 * 1/6)^2 + (1/3 * 1/3)^2)) = sqrt(4 / 81).
  values, identity = np.array([0.0, 0.5, 0.75]), np.array([0, 0, 1])
  error = evaluate.standard_error(values, identity)
  np.testing.assert_allclose(error, 2 / 9, rtol=1e-12)
