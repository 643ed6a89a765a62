import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train import evaluate, tasks
from train.answers import Answers
from train.config import ConfigError
from train.evaluate import Evaluation, Evaluator
from train.rollout import generate, pad_prompts
from train.tasks import Question, Task

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
      terminators=jnp.asarray(answers.terminators),
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
