"""A policy in training: its state, and one step of it."""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import advantages, arms, loss_scale, losses, micro_batch, tasks
from train.answers import Answers
from train.config import Config, ConfigError
from train.evaluate import (
  Evaluation,
  Evaluator,
  identity,
  sampled_evaluation,
)
from train.policy import Policy
from train.rollout import (
  Completions,
  Prompts,
  Support,
  cast,
  generate,
  pad_prompts,
)
from train.scoring import completion_hidden, token_scores
from train.step import (
  Batch,
  Objective,
  Reference,
  TrainState,
  divergence,
  train_step,
)
from train.tokenizer import Tokenizer

# Of several updates the last one's value counts, of all else the mean.
_CUMULATIVE = ('loss_scale', 'skipped_steps', 'displacement_slope')


class _Rollout(NamedTuple):
  """Sampled completions of P prompts, on the host."""

  prompts: Prompts
  completions: Completions
  rewards: np.ndarray  # float32 [B]
  trained: np.ndarray  # bool [B], False where filtered out


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


class Trainer:
  """Holds the state and the functions compiled once for the whole run.

  Everything random is a function of the seed and the step, so a step can be
  repeated from the state alone.
  """

  def __init__(
    self, config: Config, task: tasks.Task, policy: Policy, compute_dtype
  ):
    """Prepares everything that stays the same from step to step.

    Raises:
      ConfigError: if prompts and completions exceed the policy's context, or
        an answer the longest completion.
    """
    self._config = config
    self._task = task
    self._tokenizer = policy.tokenizer
    self._answers = Answers(
      policy.tokenizer, policy.config.vocab_size, task.stops
    )
    self._asked = task.evaluation[: config.eval_questions]
    self._prompt_width = _prompt_width(self._tokenizer, task)
    longest = self._prompt_width + config.max_new_tokens
    if longest > policy.config.context:
      raise ConfigError(
        f'prompts of up to {self._prompt_width} tokens and '
        f'{config.max_new_tokens} new tokens exceed the context of '
        f'{config.model}, {policy.config.context} tokens'
      )
    self._evaluator = None
    if task.listed:
      self._evaluator = Evaluator(
        policy.graphdef,
        task,
        self._answers,
        questions=config.eval_questions,
        prompt_width=self._prompt_width,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        compute_dtype=compute_dtype,
      )
    arm = arms.ARMS[config.arm]
    key = jax.random.key(config.seed)
    self._rollout_key, rounding_key, self._eval_key = (
      jax.random.fold_in(key, use) for use in range(3)
    )
    tx = arms.optimizer(arm, config.lr, rounding_key)
    params, opt_state = jax.jit(lambda w: arms.start(arm, tx, w))(policy.params)
    scalable = arm.loss_scaling and compute_dtype == jnp.float16
    scaled = scalable and config.loss_scaler == 'auto'
    scaler = loss_scale.init() if scaled else None
    self.state = TrainState(params, opt_state, scaler)
    self.loss_scaling = 'dynamic' if scaled else 'off' if scalable else 'idle'
    self._previous = None
    self._reference = None
    if config.kl_every or config.eval_samples:
      self._reference = cast(policy.params, jnp.bfloat16)  # exact: on its grid
    self._compile(policy.graphdef, tx, compute_dtype)

  def _compile(self, graphdef: nnx.GraphDef, tx, compute_dtype) -> None:
    config = self._config
    parts = config.updates * config.micro_batches  # of a whole rollout
    endings = jnp.asarray(self._answers.endings)

    def model(params):
      return nnx.merge(graphdef, cast(params, compute_dtype))

    def rollout(params, prompts, key, temperature, support=Support()):  # noqa: B008
      return generate(
        model(params),
        prompts,
        key,
        group=config.group,
        max_new_tokens=config.max_new_tokens,
        temperature=temperature,
        endings=endings,
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

    support = Support(config.eval_top_k, config.eval_top_p, config.eval_min_p)
    self._rollout, self._eval_rollout = jax.jit(rollout), None
    if support != Support():  # else evaluation runs the training's program
      self._eval_rollout = jax.jit(functools.partial(rollout, support=support))
    self._hidden = jax.jit(hidden)
    self._logprobs = jax.jit(logprobs)
    self._held_out_kl = jax.jit(held_out_kl)
    self._train_step = train_step(
      graphdef,
      tx,
      temperature=config.temperature,
      compute_dtype=compute_dtype,
      objective=_objective(config),
      micro_batches=config.micro_batches,
      remat=config.remat,
    )

  def step(self, step: int) -> dict[str, Any]:
    """One rollout and its updates; returns the step's metrics.

    Of several updates the metrics are means, of what only grows the last.

    Args:
      step: steps done before this one.

    Raises:
      FloatingPointError: if the loss is not finite, or a gradient outside the
        loss scaler's care; the state is then the one after that step.
    """
    started = time.monotonic()
    rollout, sampling = self._gather(step)
    sampled_at = time.monotonic()
    metrics = self._train(step, rollout)
    ended = time.monotonic()
    completions = rollout.completions
    return {
      'reward_mean': sampling.pop('reward_mean'),
      'kl_exact': metrics.pop('kl_exact', None),
      'kl_k3': metrics.pop('kl_k3', None),
      **metrics,
      **sampling,
      'completion_tokens': completions.lengths.mean().item(),
      'truncated_fraction': float(1 - completions.terminated.mean()),
      'rollout_seconds': sampled_at - started,
      'train_seconds': ended - sampled_at,
      'tokens_per_second': sampling['sampled_tokens'] / (sampled_at - started),
    }

  def _gather(self, step: int) -> tuple[_Rollout, dict[str, Any]]:
    """Samples a step's completions; further rounds replace equal groups.

    Each step owns the prompts of as many rounds as it may take, needed or
    not: what a step samples depends on nothing that came before.
    """
    config = self._config
    refill = config.filter_groups == 'refill'
    rounds = config.refill_rounds if refill else 1
    parts, sampling = [], {'reward_failures': 0, 'sampled_tokens': 0}
    for index in range(step * rounds, (step + 1) * rounds):
      order = tasks.data_order(
        len(self._task.train),
        config.seed,
        index * config.prompts,
        config.prompts,
      )
      questions = [self._task.train[i] for i in order]
      prompts = self._prompts(questions)
      key = jax.random.fold_in(self._rollout_key, index)
      completions, rewards, failures = self._sample(
        questions, prompts, key, config.temperature
      )
      trained = np.ones(rewards.size, bool)
      if config.filter_groups != 'off':
        trained = np.asarray(advantages.mixed_groups(rewards, config.group))
      parts.append(_Rollout(prompts, completions, rewards, trained))
      sampling['reward_failures'] += failures
      sampling['sampled_tokens'] += int(completions.lengths.sum())
      if sum(part.trained.sum() for part in parts) >= rewards.size:
        break
    rewards = np.concatenate([part.rewards for part in parts])
    sampling |= {
      'reward_mean': float(rewards.mean()),
      'mixed_groups': float(
        advantages.mixed_groups(rewards, config.group).mean()
      ),
      'rollouts': len(parts),
    }
    if len(parts) == 1:
      return parts[0], sampling
    whole = jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(parts))
    # The groups to train on first, in order; the rest fills the batch up.
    mixed = whole.trained.reshape(-1, config.group)[:, 0]
    rows = np.argsort(~mixed, stable=True)[: config.prompts]
    chosen = (rows[:, None] * config.group + np.arange(config.group)).ravel()
    prompts = jax.tree.map(lambda x: x[rows], whole.prompts)
    others = jax.tree.map(lambda x: x[chosen], whole[1:])
    return _Rollout(prompts, *others), sampling

  def _train(self, step: int, rollout: _Rollout) -> dict[str, float]:
    """Makes the updates of a step."""
    config = self._config
    worth = advantages.ADVANTAGES[config.advantage](
      jnp.asarray(rollout.rewards), config.group
    )
    inputs = rollout.prompts, rollout.completions.tokens
    old = None
    if config.updates > 1:
      old = self._logprobs(self.state.params, *inputs)
    batch = Batch(
      rollout.prompts,
      rollout.completions,
      worth * config.reward_scale,
      rollout.trained,
      old,
    )
    hidden = None
    if config.kl_every and step % config.kl_every == 0:
      hidden = self._hidden(self._reference, *inputs)
    whole, measured = (batch, hidden), []
    for update in range(config.updates):
      batch, part = whole
      if config.updates > 1:
        batch, part = jax.tree.map(
          lambda x, i=update: x[i], micro_batch.split(whole, config.updates)
        )
      reference = None if part is None else Reference(self._reference, part)
      self.state, metrics = self._train_step(self.state, batch, reference)
      metrics = {k: float(x) for k, x in jax.device_get(metrics).items()}
      if not np.isfinite([metrics['loss'], metrics['grad_norm']]).all():
        raise FloatingPointError(
          f'step {step + 1}: loss {metrics["loss"]}, gradient norm '
          f'{metrics["grad_norm"]}'
        )
      measured.append(metrics)
    return {
      name: last
      if name in _CUMULATIVE
      else float(np.mean([m[name] for m in measured]))
      for name, last in measured[-1].items()
    }

  @property
  def question_identity(self) -> np.ndarray:
    """Which held-out questions are the same, see `Evaluation`."""
    return identity(self._asked)

  def evaluate(self) -> Evaluation:
    """Expected reward of the policy as it is now, on held-out questions.

    Exact where the task lists its answers, else the mean of G samples, with
    the same noise at every evaluation.
    """
    if self._evaluator is not None:
      return self._evaluator(self.state.params)
    expected = []
    for start in range(0, len(self._asked), self._config.prompts):
      asked, count, prompts, key = self._held_out(start)
      _, rewards, _ = self._sample(
        asked, prompts, key, self._config.temperature
      )
      grouped = rewards.reshape(-1, self._config.group)[:count]
      expected.append(grouped.mean(axis=1, dtype=np.float64))
    return Evaluation(np.concatenate(expected), self.question_identity)

  def _held_out(self, start: int):
    """A batch of held-out questions, filled up, how many count, and its key."""
    prompts = self._config.prompts
    asked = list(self._asked[start : start + prompts])
    count = len(asked)
    asked += [asked[-1]] * (prompts - count)
    key = jax.random.fold_in(self._eval_key, start)
    return asked, count, self._prompts(asked), key

  def keep_previous(self) -> None:
    """Remembers the policy: `evaluate_sampled` measures from it, too."""
    self._previous = jax.tree.map(jnp.copy, self.state.params)

  def evaluate_sampled(self) -> dict[str, float]:
    """Sampled reward, pass@k, greedy accuracy and KL on held-out questions.

    `eval_kl_exact` is the divergence from the reference, `eval_kl_step` that
    from the policy of the last `keep_previous`, nats per completion.

    Runs the same compiled rollout as training, on questions in batches of its
    shape; the last batch is filled up with questions that do not count.
    """
    config = self._config
    samples, greedy = [], []
    others = {'eval_kl_exact': self._reference}
    if self._previous is not None:
      others['eval_kl_step'] = self._previous
    total_kl = dict.fromkeys(others, 0.0)
    for start in range(0, len(self._asked), config.prompts):
      asked, count, prompts, key = self._held_out(start)
      rounds = []
      for i in range(config.eval_samples // config.group):
        completions, rewards, _ = self._sample(
          asked,
          prompts,
          jax.random.fold_in(key, i),
          config.eval_temperature or config.temperature,
          self._eval_rollout,
        )
        rounds.append(rewards.reshape(-1, config.group)[:count])
        counts = np.arange(rewards.size) < count * config.group
        completions = completions._replace(lengths=completions.lengths * counts)
        tokens = completions.tokens
        hidden = self._hidden(self.state.params, prompts, tokens)
        for name, params in others.items():
          other = Reference(params, self._hidden(params, prompts, tokens))
          kl = self._held_out_kl(self.state.params, hidden, other, completions)
          total_kl[name] += float(kl) * rewards.size
      samples.append(np.concatenate(rounds, axis=1))
      _, rewards, _ = self._sample(asked, prompts, key, 0.0)
      greedy.append(rewards.reshape(-1, config.group)[:count, 0])
    samples = np.concatenate(samples)
    return sampled_evaluation(
      samples, np.concatenate(greedy), self.question_identity
    ) | {name: kl / samples.size for name, kl in total_kl.items()}

  def _prompts(self, questions: list[tasks.Question]) -> Prompts:
    return pad_prompts(
      [self._tokenizer.encode(q.prompt) for q in questions],
      self._prompt_width,
      self._tokenizer.pad_id,
    )

  def _sample(
    self, questions, prompts: Prompts, key, temperature: float, rollout=None
  ) -> tuple[Completions, np.ndarray, int]:
    """Completions on the host, their rewards `[B]`, and failed rewards."""
    rollout = rollout or self._rollout
    completions = jax.device_get(
      rollout(self.state.params, prompts, key, temperature)
    )
    rewards, failures = tasks.score(
      self._task,
      [q for q in questions for _ in range(self._config.group)],
      [
        self._answers.text(tokens[:length])
        for tokens, length in zip(
          completions.tokens, completions.lengths, strict=True
        )
      ],
      completions.terminated,
    )
    return completions, rewards, failures


def _prompt_width(tokenizer: Tokenizer, task: tasks.Task) -> int:
  """Tokens of the longest prompt: one compiled shape for all of them."""
  widths = []
  for question in {*task.train, *task.evaluation}:
    try:
      widths.append(len(tokenizer.encode(question.prompt)))
    except Exception as error:  # the library raises nothing more precise
      raise ConfigError(
        f'the tokenizer cannot encode {question.prompt!r}: {error}'
      ) from error
  return max(widths)
