"""The loop: prompts, rollout, rewards, advantages, step, and again."""

import datetime
import functools
import resource
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train import advantages, arms, plot, pretrained, tasks
from train.answers import Answers
from train.config import Config, ConfigError
from train.evaluate import Evaluator
from train.policy import Policy, load_policy
from train.progress import Progress
from train.rollout import cast, generate, pad_prompts
from train.run_folder import RunFolder
from train.scoring import completion_hidden
from train.step import Batch, Reference, TrainState, train_step


def run(config: Config) -> dict[str, Any]:
  """Runs one configuration from start to end.

  Returns:
    The summary, as written to `summary.json`.

  Raises:
    ConfigError, PretrainedError, TaskError: before anything is written.
  """
  started = time.monotonic()
  folder = RunFolder(config.out or _default_folder(config))
  compute_dtype = _compute_dtype(config)
  task = tasks.load_task(config.task)
  arm = arms.ARMS[config.arm]
  print(f'Loading {config.model}', flush=True)
  policy = load_policy(config.model, task, arm.param_dtype)
  trainer = Trainer(config, task, policy, compute_dtype)
  answer, share = task.best_constant
  folder.create(
    config,
    compute_dtype=jnp.dtype(compute_dtype).name,
    best_constant=answer,
    best_constant_share=share,
    parameters=sum(x.size for x in jax.tree.leaves(policy.params)),
    task_fingerprint=task.fingerprint(),
  )
  _announce(config, policy, compute_dtype, folder.path)

  rewards = []
  with Progress(config.steps) as progress:
    progress.note('evaluating held-out questions')
    before = latest = trainer.evaluate()
    progress.line(_evaluation_line(0, before))
    progress.note('compiling')
    for step in range(config.steps):
      record = {'step': step + 1} | trainer.step(step)
      last = step + 1 == config.steps
      due = config.eval_every and (step + 1) % config.eval_every == 0
      if last or due:
        latest = trainer.evaluate()
        progress.line(_evaluation_line(step + 1, latest))
        record['eval_reward'] = latest.mean
        record['eval_standard_error'] = latest.standard_error
      rewards.append(record['reward_mean'])
      folder.append_metrics(record)
      progress.step(record)

  params = nnx.to_pure_dict(trainer.state.params)
  pretrained.save_huggingface(
    folder.path / 'model',
    policy.config,
    params,
    policy.tokenizer,
    dtype=arm.param_dtype,
  )
  quarter = max(len(rewards) // 4, 1)
  gain, gain_error = latest.gain_over(before)
  summary = {
    'reward_first_quarter': float(np.mean(rewards[:quarter])),
    'reward_last_quarter': float(np.mean(rewards[-quarter:])),
    'eval_before': before.mean,
    'eval_before_standard_error': before.standard_error,
    'eval_after': latest.mean,
    'eval_after_standard_error': latest.standard_error,
    'eval_gain': gain,
    'eval_gain_standard_error': gain_error,
    'eval_questions': int(before.expected.size),
    'best_constant': answer,
    'best_constant_share': share,
    'kl_exact_last': record.get('kl_exact'),
    'reward_failures': trainer.reward_failures,
    'seconds': time.monotonic() - started,
    'peak_memory_gib': _peak_memory_gib(),
  }
  folder.write_summary(summary)
  plot.plot_runs([folder.path], folder.path / 'reward.png')
  _report(config, summary, folder.path)
  return summary


class Trainer:
  """A policy in training: its state and the compiled functions around it."""

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
    self._answers = Answers(policy.tokenizer, policy.config.vocab_size)
    self._prompt_width = max(
      len(self._tokenizer.encode(q.prompt))
      for q in {*task.train, *task.evaluation}
    )
    longest = self._prompt_width + config.max_new_tokens
    if longest > policy.config.context:
      raise ConfigError(
        f'prompts of up to {self._prompt_width} tokens and '
        f'{config.max_new_tokens} new tokens exceed the context of '
        f'{config.model}, {policy.config.context} tokens'
      )
    shared = dict(temperature=config.temperature, compute_dtype=compute_dtype)
    self._evaluator = Evaluator(
      policy.graphdef,
      task,
      self._answers,
      questions=config.eval_questions,
      prompt_width=self._prompt_width,
      max_new_tokens=config.max_new_tokens,
      **shared,
    )
    key = jax.random.key(config.seed)
    self._rollout_key = jax.random.fold_in(key, 0)
    tx = arms.optimizer(
      arms.ARMS[config.arm], config.lr, jax.random.fold_in(key, 1)
    )
    self._reference = None
    if config.kl_every:  # a copy: the state's buffers are donated
      self._reference = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).copy(), policy.params
      )
    self.state = TrainState(policy.params, jax.jit(tx.init)(policy.params))
    self.reward_failures = 0

    terminators = jnp.asarray(self._answers.terminators)

    @jax.jit
    def rollout(params, prompts, key):
      return generate(
        nnx.merge(policy.graphdef, cast(params, compute_dtype)),
        prompts,
        key,
        group=config.group,
        max_new_tokens=config.max_new_tokens,
        terminators=terminators,
        **shared,
      )

    @jax.jit
    def reference_hidden(params, prompts, tokens):
      model = nnx.merge(policy.graphdef, cast(params, compute_dtype))
      return completion_hidden(
        model, prompts, tokens, compute_dtype=compute_dtype
      )

    self._rollout = rollout
    self._reference_hidden = reference_hidden
    self._train_step = train_step(policy.graphdef, tx, **shared)
    self._advantages = jax.jit(
      functools.partial(advantages.dr_grpo, group=config.group)
    )

  def evaluate(self):
    """Expected reward of the policy as it is now, on held-out questions."""
    return self._evaluator(self.state.params)

  def step(self, step: int) -> dict[str, Any]:
    """One rollout and one update; returns the step's metrics.

    Everything random is a function of the seed and `step`.
    """
    config = self._config
    started = time.monotonic()
    order = tasks.data_order(
      len(self._task.train), config.seed, step * config.prompts, config.prompts
    )
    questions = [self._task.train[i] for i in order]
    prompts = pad_prompts(
      [self._tokenizer.encode(q.prompt) for q in questions],
      self._prompt_width,
      self._tokenizer.pad_id,
    )
    key = jax.random.fold_in(self._rollout_key, step)
    completions = self._rollout(self.state.params, prompts, key)
    sampled = jax.device_get(completions)
    rewards, failures = tasks.score(
      self._task,
      [q for q in questions for _ in range(config.group)],
      [
        self._answers.text(tokens[:length])
        for tokens, length in zip(sampled.tokens, sampled.lengths, strict=True)
      ],
      sampled.terminated,
    )
    self.reward_failures += failures
    sampled_at = time.monotonic()

    batch = Batch(prompts, completions, self._advantages(jnp.asarray(rewards)))
    reference = None
    if config.kl_every and step % config.kl_every == 0:
      hidden = self._reference_hidden(
        self._reference, prompts, completions.tokens
      )
      reference = Reference(self._reference, hidden)
    self.state, metrics = self._train_step(self.state, batch, reference)
    metrics = {k: float(v) for k, v in jax.device_get(metrics).items()}
    if not np.isfinite([metrics['loss'], metrics['grad_norm']]).all():
      raise FloatingPointError(
        f'step {step + 1}: loss {metrics["loss"]}, gradient norm '
        f'{metrics["grad_norm"]}'
      )
    ended = time.monotonic()
    tokens = int(sampled.lengths.sum())
    groups = rewards.reshape(-1, config.group)
    return {
      'reward_mean': float(rewards.mean()),
      'kl_exact': metrics.pop('kl_exact', None),
      'kl_k3': metrics.pop('kl_k3', None),
      **metrics,
      'mixed_groups': float((groups.min(1) < groups.max(1)).mean()),
      'completion_tokens': tokens / rewards.size,
      'truncated_fraction': float(1 - sampled.terminated.mean()),
      'reward_failures': failures,
      'rollout_seconds': sampled_at - started,
      'train_seconds': ended - sampled_at,
      'tokens_per_second': tokens / (sampled_at - started),
    }


def _compute_dtype(config: Config):
  if config.compute_dtype != 'auto':
    return jnp.dtype(config.compute_dtype)
  on_cpu = jax.default_backend() == 'cpu'
  return jnp.dtype(jnp.float32 if on_cpu else jnp.bfloat16)


def _default_folder(config: Config) -> Path:
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  model = Path(config.model).name
  return Path('runs') / f'{now}-{model}-{config.task}-{config.arm}'


def _peak_memory_gib() -> float:
  # Linux counts KiB.
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _announce(config, policy, compute_dtype, path) -> None:
  count = sum(x.size for x in jax.tree.leaves(policy.params))
  arm = arms.ARMS[config.arm]
  rounding = f', {arm.rounding} rounding' if arm.rounding else ''
  print(
    f'{config.model}: {count / 1e6:.1f}M parameters in {arm.param_dtype}'
    f'{rounding}; computing in {jnp.dtype(compute_dtype).name} on '
    f'{jax.device_count()} x {jax.devices()[0].device_kind}\n'
    f'{config.task}: {config.prompts} prompts x {config.group} completions a '
    f'step, learning rate {config.lr:g}, seed {config.seed}\n'
    f'Run folder: {path}',
    flush=True,
  )


def _evaluation_line(step: int, evaluation) -> str:
  return (
    f'step {step}: expected reward on held-out questions '
    f'{evaluation.mean:.3f} ± {evaluation.standard_error:.3f}'
  )


def _report(config: Config, summary: dict[str, Any], path: Path) -> None:
  s = summary
  kl = s['kl_exact_last']
  kl = 'not measured' if kl is None else f'{kl:.3f} nats per completion'
  print(
    f'\nReward while training  {s["reward_first_quarter"]:.3f} -> '
    f'{s["reward_last_quarter"]:.3f} (first and last quarter of '
    f'{config.steps} steps)\n'
    f'Held-out reward        {s["eval_before"]:.3f} -> {s["eval_after"]:.3f}, '
    f'gain {s["eval_gain"]:+.3f} ± {s["eval_gain_standard_error"]:.3f} '
    f'(standard error, paired, {s["eval_questions"]} questions)\n'
    f'Best constant answer   {s["best_constant_share"]:.3f} '
    f'(always {s["best_constant"]!r})\n'
    f'KL to the reference    {kl}\n'
    f'Time, peak memory      {s["seconds"]:.0f} s, '
    f'{s["peak_memory_gib"]:.1f} GiB\n'
    f'Picture                {path / "reward.png"}\n'
    f'Weights                {path / "model"}'
  )
