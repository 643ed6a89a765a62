"""Expected reward on held-out questions: exact, so almost without noise."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import sharding
from train.answers import Answers
from train.config import ConfigError
from train.rollout import Prompts, cast, pad_prompts
from train.scoring import completion_hidden
from train.tasks import Question, Task

_PROMPTS = 24  # per forward, rounded up to what the mesh divides


class Evaluation(NamedTuple):
  """The probability of each question's accepted answers."""

  expected: np.ndarray  # float64 [questions]
  # int [questions], equal where a small stratum repeats a question
  identity: np.ndarray | None = None

  @property
  def mean(self) -> float:
    """Expected reward."""
    return float(self.expected.mean())

  @property
  def standard_error(self) -> float:
    """Of the mean over questions."""
    return standard_error(self.expected, self.identity)

  def gain_over(self, before: 'Evaluation') -> tuple[float, float]:
    """Mean difference and its standard error, paired by question."""
    gain = self.expected - before.expected
    return float(gain.mean()), standard_error(gain, self.identity)


def identity(asked: Sequence[Question]) -> np.ndarray:
  """Which questions are the same, see `Evaluation`: int `[questions]`."""
  order = {q: i for i, q in enumerate(dict.fromkeys(asked))}
  return np.array([order[question] for question in asked])


def standard_error(
  values: np.ndarray, identity: np.ndarray | None = None
) -> float:
  """Standard error of the mean over distinct questions, each with its weight.

      sqrt(n / (n - 1) * sum_i w_i^2 (x_i - mean)^2)

  over n distinct questions; w_i is the share of the rows that ask question i
  and x_i their mean value.

  Args:
    values: `[questions]`.
    identity: int `[questions]`, equal where a question is repeated.
  """
  rows = np.arange(values.size) if identity is None else identity
  _, group, counts = np.unique(rows, return_inverse=True, return_counts=True)
  means = np.bincount(group, values) / counts
  deviation = counts / values.size * (means - values.mean())
  n = counts.size
  return float(np.sqrt(n / max(n - 1, 1) * np.sum(deviation**2)))


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
  """Probability that one of k completions is right, per question, unbiased.

      1 - C(n - c, k) / C(n, k)

  for c right ones among n samples (Chen et al. 2021, arXiv 2107.03374).

  Args:
    correct: int `[questions]`, c.
    samples: n.
    k: at most n.
  """
  draws = math.comb(samples, k)
  return 1 - np.array([math.comb(samples - int(c), k) / draws for c in correct])


def sampled_evaluation(
  rewards: np.ndarray,
  greedy: np.ndarray,
  identity: np.ndarray | None = None,
) -> dict[str, float]:
  """Summarises sampled rewards; standard errors are over questions.

  Args:
    rewards: float32 `[questions, samples]`.
    greedy: float32 `[questions]`, of the greedy completion.
    identity: see `standard_error`.
  """
  samples = rewards.shape[1]
  correct = (rewards >= 1).sum(axis=1)
  values = {'eval_sampled': rewards.mean(axis=1), 'eval_greedy': greedy}
  k = 2
  while k <= samples:
    values[f'eval_pass_at_{k}'] = pass_at_k(correct, samples, k)
    k *= 2
  result = {name: float(np.mean(x)) for name, x in values.items()}
  for name, x in values.items():
    result[f'{name}_standard_error'] = standard_error(x, identity)
  return result


class Evaluator:
  """Sums the probabilities of all accepted token sequences of each question.

  An answer counts in every surface form that the task accepts, split into
  tokens in every possible way, followed by any terminator, within the longest
  completion: the expectation of the sampled reward, truncation included.
  """

  def __init__(
    self,
    graphdef: nnx.GraphDef,
    task: Task,
    answers: Answers,
    *,
    questions: int,
    prompt_width: int,
    max_new_tokens: int,
    temperature: float,
    compute_dtype,
  ):
    """Prepares the batches, of one compiled shape.

    Args:
      graphdef: of the policy.
      task: its first `questions` evaluation questions are used.
      answers: finds the accepted token sequences.
      questions: number of questions.
      prompt_width: tokens that prompts are padded to.
      max_new_tokens: longest completion, its terminator included.
      temperature: of sampling.
      compute_dtype: of the forward.

    Raises:
      ConfigError: if all answers to a question are longer.
    """
    asked = task.evaluation[:questions]
    endings = [
      answers.accepted_sequences(task.accepted(question), max_new_tokens)
      for question in asked
    ]
    if not all(endings):
      shortest = next(q for q, e in zip(asked, endings, strict=True) if not e)
      raise ConfigError(
        f'no accepted answer to {shortest.prompt!r} fits into '
        f'{max_new_tokens} new tokens'
      )
    closings = sorted({e.last for row in endings for e in row}, key=sorted)
    group = max(map(len, endings))
    width = 1 + max(len(e.tokens) for row in endings for e in row)
    tokenizer = answers.tokenizer
    shards = sharding.row_shards(jax.sharding.get_mesh())
    count = -(-_PROMPTS // shards) * shards
    self._asked = len(asked)
    self.identity = identity(asked)
    self._batches = []
    for start in range(0, len(asked), count):
      rows = range(start, start + count)
      prompts = [
        tokenizer.encode_prompt(asked[min(i, len(asked) - 1)].prompt)
        for i in rows
      ]
      tokens = np.zeros((count, group, width), np.int32)
      lengths = np.full((count, group), -1, np.int32)  # -1: no sequence
      closing = np.zeros((count, group), np.int32)
      for row, i in enumerate(rows):
        for column, ending in enumerate(endings[i] if i < len(asked) else ()):
          length = len(ending.tokens)
          tokens[row, column, :length] = ending.tokens
          lengths[row, column] = length
          closing[row, column] = closings.index(ending.last)
      self._batches.append(
        (
          pad_prompts(prompts, prompt_width, tokenizer.pad_id),
          tokens.reshape(-1, width),
          lengths.reshape(-1),
          closing.reshape(-1),
        )
      )
    closes = np.zeros((len(closings), answers.endings.shape[1]), bool)
    for i, last in enumerate(closings):
      closes[i, sorted(last)] = True

    def probabilities(params, prompts: Prompts, tokens, lengths, closing):
      model = nnx.merge(graphdef, cast(params, compute_dtype))
      hidden = completion_hidden(
        model, prompts, tokens, compute_dtype=compute_dtype
      )

      def at_position(x):  # one position at a time: [B, V], not [B, T, V]
        hidden, token, t = x
        logits = model.logits(hidden, compute_dtype=compute_dtype)
        log_p = jax.nn.log_softmax(logits / temperature)
        own = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
        closes_here = jnp.asarray(closes)[closing]
        end = jnp.where(closes_here, log_p, -jnp.inf)
        end = jax.nn.logsumexp(end, axis=1)
        return jnp.where(t < lengths, own, jnp.where(t == lengths, end, 0.0))

      parts = jax.lax.map(
        at_position, (jnp.moveaxis(hidden, 1, 0), tokens.T, jnp.arange(width))
      )
      log_probability = jnp.where(lengths < 0, -jnp.inf, jnp.sum(parts, axis=0))
      each = jnp.exp(log_probability).reshape(count, group)
      return sharding.constrain(jnp.sum(each, axis=1))  # known everywhere

    self._probabilities = jax.jit(probabilities)

  def __call__(self, params: nnx.State) -> Evaluation:
    """Evaluates a policy."""
    expected = [self._probabilities(params, *batch) for batch in self._batches]
    expected = np.concatenate(jax.device_get(expected)).astype(np.float64)
    return Evaluation(expected[: self._asked], self.identity)
