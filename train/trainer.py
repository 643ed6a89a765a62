"""A policy in training: its state, and one step of it."""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train import (
  advantages,
  arms,
  processes,
  programs,
  sharding,
  tasks,
)
from train.answers import Answers
from train.config import Config, ConfigError
from train.evaluate import (
  Evaluation,
  Evaluator,
  identity,
  sampled_evaluation,
)
from train.policy import Policy
from train.rollout import Completions, Prompts, pad_prompts
from train.step import Batch, Reference, TrainState
from train.tokenizer import Tokenizer

# Of several updates the last one's value counts, of all else the mean.
_CUMULATIVE = ('loss_scale', 'skipped_steps', 'displacement_slope')


class _Rollout(NamedTuple):
  """Sampled completions of P prompts; NumPy where every process knows all."""

  prompts: Prompts
  completions: Completions
  lengths: np.ndarray  # int32 [B]
  terminated: np.ndarray  # bool [B]
  rewards: np.ndarray  # float32 [B]
  failures: int  # rewards that failed
  texts: dict[int, str]  # by row, of those that lie here

  def mixed(self, group: int) -> np.ndarray:
    """Bool `[B]`, True where the rewards of the group differ."""
    return np.asarray(advantages.mixed_groups(self.rewards, group))


class Trainer:
  """Holds the state and the functions compiled once for the whole run.

  Everything random is a function of the seed and the step, so a step can be
  repeated from the state alone. All methods are called with the policy's mesh
  set (`jax.set_mesh`), and by every process.
  """

  def __init__(
    self, config: Config, task: tasks.Task, policy: Policy, compute_dtype
  ):
    """Prepares everything that stays the same from step to step.

    Raises:
      ConfigError: if prompts and completions exceed the policy's context, or
        an answer the longest completion.
      MeshError: if prompts and completions cannot be spread over the mesh.
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
    self._mesh = policy.mesh
    self._copies = programs.prompt_copies(config, self._mesh)
    self._programs = programs.build(
      config,
      policy.graphdef,
      tx,
      endings=self._answers.endings,
      compute_dtype=compute_dtype,
      mesh=self._mesh,
      weights=policy.params,
    )
    params, opt_state = self._programs.start(policy.params)
    scalable = arm.loss_scaling and compute_dtype == jnp.float16
    scaled = scalable and config.loss_scaler == 'auto'
    scaler = self._programs.start_scaler() if scaled else None
    self.state = TrainState(params, opt_state, scaler)
    self.loss_scaling = 'dynamic' if scaled else 'off' if scalable else 'idle'
    self.completions = []  # some of the last step's
    self._previous = None
    self._reference = None
    if config.kl_every or config.eval_samples:
      self._reference = self._programs.reference(policy.params)

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
    rollout, trained, sampling = self._gather(step)
    sampled_at = time.monotonic()
    metrics = self._train(step, rollout, trained)
    ended = time.monotonic()
    return {
      'reward_mean': sampling.pop('reward_mean'),
      'kl_exact': metrics.pop('kl_exact', None),
      'kl_k3': metrics.pop('kl_k3', None),
      **metrics,
      **sampling,
      'completion_tokens': rollout.lengths.mean().item(),
      'truncated_fraction': float(1 - rollout.terminated.mean()),
      'rollout_seconds': sampled_at - started,
      'train_seconds': ended - sampled_at,
      'tokens_per_second': sampling['sampled_tokens'] / (sampled_at - started),
    }

  def _gather(self, step: int) -> tuple[_Rollout, np.ndarray, dict[str, Any]]:
    """Samples a step's completions; further rounds replace equal groups.

    Each step owns the prompts of as many rounds as it may take, needed or
    not: what a step samples depends on nothing that came before.

    Returns:
      The rollout; bool `[B]`, which completions to train on; and metrics.
    """
    config = self._config
    refill = config.filter_groups == 'refill'
    most = config.refill_rounds if refill else 1
    rounds, mixed = [], []
    for index in range(step * most, (step + 1) * most):
      order = tasks.data_order(
        len(self._task.train),
        config.seed,
        index * config.prompts,
        config.prompts,
      )
      questions = [self._task.train[i] for i in order]
      key = jax.random.fold_in(self._rollout_key, index)
      rounds.append(
        self._sample(
          questions, self._prompts(questions), key, config.temperature
        )
      )
      if len(rounds) == 1:
        self.completions = self._shown(step, questions, rounds[0])
      mixed.append(rounds[-1].mixed(config.group))
      if np.sum(mixed) >= mixed[0].size:
        break
    sampling = {
      'reward_mean': float(np.mean([r.rewards for r in rounds])),
      'reward_failures': sum(r.failures for r in rounds),
      'sampled_tokens': int(sum(r.lengths.sum() for r in rounds)),
      'mixed_groups': float(np.mean(mixed)),
      'rollouts': len(rounds),
    }
    trained = np.concatenate(mixed)
    if config.filter_groups == 'off':
      trained = np.ones_like(trained)
    if len(rounds) == 1:
      return rounds[0], trained, sampling
    # The groups to train on first, in order; the rest fills the batch up.
    order = np.argsort(~trained.reshape(-1, config.group)[:, 0], stable=True)
    groups = order[: config.prompts]
    chosen = groups[:, None] * config.group + np.arange(config.group)
    chosen, copies = chosen.ravel(), np.arange(self._copies)
    lines = (groups[:, None] * self._copies + copies).ravel()
    prompts = self._programs.select([r.prompts for r in rounds], lines)
    completions = self._programs.select([r.completions for r in rounds], chosen)
    known = [
      np.concatenate([getattr(r, name) for r in rounds])[chosen]
      for name in ('lengths', 'terminated', 'rewards')
    ]
    merged = _Rollout(
      prompts, completions, *known, sampling['reward_failures'], {}
    )
    return merged, trained[chosen], sampling

  def _train(
    self, step: int, rollout: _Rollout, trained: np.ndarray
  ) -> dict[str, float]:
    """Makes the updates of a step."""
    config, programs = self._config, self._programs
    worth = advantages.ADVANTAGES[config.advantage](
      jnp.asarray(rollout.rewards), config.group
    )
    inputs = rollout.prompts, rollout.completions.tokens
    old = None
    if config.updates > 1:
      old = programs.logprobs(self.state.params, *inputs)
    batch = Batch(
      rollout.prompts,
      rollout.completions,
      np.asarray(worth) * np.float32(config.reward_scale),
      trained,
      old,
    )
    hidden = None
    if config.kl_every and step % config.kl_every == 0:
      hidden = programs.hidden(self._reference, *inputs)
    whole, measured = (batch, hidden), []
    for update in range(config.updates):
      batch, part = whole
      if config.updates > 1:
        batch, part = programs.share(whole, update)
      reference = None if part is None else Reference(self._reference, part)
      self.state, metrics = programs.train_step(self.state, batch, reference)
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
      sampled = self._sample(asked, prompts, key, self._config.temperature)
      grouped = sampled.rewards.reshape(-1, self._config.group)[:count]
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
    config, programs = self._config, self._programs
    samples, greedy = [], []
    others = {'eval_kl_exact': self._reference}
    if self._previous is not None:
      others['eval_kl_step'] = self._previous
    total_kl = dict.fromkeys(others, 0.0)
    for start in range(0, len(self._asked), config.prompts):
      asked, count, prompts, key = self._held_out(start)
      rounds = []
      for i in range(config.eval_samples // config.group):
        sampled = self._sample(
          asked,
          prompts,
          jax.random.fold_in(key, i),
          config.eval_temperature or config.temperature,
          programs.eval_rollout,
        )
        rewards = sampled.rewards
        rounds.append(rewards.reshape(-1, config.group)[:count])
        counts = np.arange(rewards.size) < count * config.group
        completions = sampled.completions._replace(
          lengths=sampled.lengths * counts
        )
        tokens = completions.tokens
        hidden = programs.hidden(self.state.params, prompts, tokens)
        for name, params in others.items():
          other = Reference(params, programs.hidden(params, prompts, tokens))
          kl = programs.held_out_kl(
            self.state.params, hidden, other, completions
          )
          total_kl[name] += float(kl) * rewards.size
      samples.append(np.concatenate(rounds, axis=1))
      rewards = self._sample(asked, prompts, key, 0.0).rewards
      greedy.append(rewards.reshape(-1, config.group)[:count, 0])
    samples = np.concatenate(samples)
    return sampled_evaluation(
      samples, np.concatenate(greedy), self.question_identity
    ) | {name: kl / samples.size for name, kl in total_kl.items()}

  def _prompts(self, questions: list[tasks.Question]) -> Prompts:
    """Prompts on the mesh, `copies` times each; processes encode their own."""
    count, rows = len(questions) * self._copies, sharding.rows(self._mesh)

    @functools.cache
    def padded(start: int, stop: int) -> Prompts:
      return pad_prompts(
        [
          self._tokenizer.encode_prompt(questions[i // self._copies].prompt)
          for i in range(start, stop)
        ],
        self._prompt_width,
        self._tokenizer.pad_id,
      )

    def part(index):
      return padded(*index[0].indices(count)[:2])

    return Prompts(
      sharding.place(
        (count, self._prompt_width), rows, lambda i: part(i).tokens
      ),
      sharding.place((count,), rows, lambda i: part(i).lengths),
    )

  def _sample(
    self, questions, prompts: Prompts, key, temperature: float, rollout=None
  ) -> _Rollout:
    """Samples completions; each process rewards those of its own devices."""
    rollout = rollout or self._programs.rollout
    completions = rollout(self.state.params, prompts, key, temperature)
    lengths, terminated = processes.fetch(
      (completions.lengths, completions.terminated)
    )
    own = processes.own_rows(completions.tokens)
    rows = list(own)
    rewards = np.zeros(lengths.size, np.float32)
    texts = {row: self._answers.text(own[row][: lengths[row]]) for row in rows}
    rewards[rows], failures = tasks.score(
      self._task,
      [questions[row // self._config.group] for row in rows],
      list(texts.values()),
      terminated[rows],
    )
    rewards, failures = processes.total(rewards), processes.total(failures)
    return _Rollout(
      prompts, completions, lengths, terminated, rewards, int(failures), texts
    )

  def _shown(
    self, step: int, questions: list[tasks.Question], rollout: _Rollout
  ) -> list[dict[str, Any]]:
    """The first completions that lie here, to be read by people."""
    return [
      {
        'step': step + 1,
        'prompt': questions[row // self._config.group].prompt,
        'completion': text,
        'reward': float(rollout.rewards[row]),
        'tokens': int(rollout.lengths[row]),
        'terminated': bool(rollout.terminated[row]),
      }
      for row, text in list(rollout.texts.items())[
        : self._config.log_completions
      ]
    ]


def _prompt_width(tokenizer: Tokenizer, task: tasks.Task) -> int:
  """Tokens of the longest prompt: one compiled shape for all of them."""
  widths = []
  for question in {*task.train, *task.evaluation}:
    try:
      width = len(tokenizer.encode_prompt(question.prompt))
    except Exception as error:  # the library raises nothing more precise
      raise ConfigError(
        f'the tokenizer cannot encode {question.prompt!r}: {error}'
      ) from error
    if not width:
      raise ConfigError(
        f'the prompt {question.prompt!r} has no tokens: there is nothing to '
        'predict the first token from'
      )
    widths.append(width)
  return max(widths)
