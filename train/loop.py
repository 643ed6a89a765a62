"""A run from start to end: evaluate, step, report, save, and stop when told."""

import datetime
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train import arms, plot, pretrained, processes, sharding, trackers
from train.chat import load_chat
from train.checkpoint import IDENTITY, Checkpoints
from train.config import PROCESS_FLAGS, Config, ConfigError
from train.evaluate import Evaluation
from train.fingerprint import fingerprint
from train.policy import Policy, load_policy
from train.progress import Progress
from train.run_folder import RunFolder, settings
from train.tasks import Task
from train.trainer import Trainer

# Flags that each of several processes may have its own value of.
_OWN = (*PROCESS_FLAGS, 'out')


class Interrupted(Exception):  # noqa: N818 - not an error
  """The run was told to stop and has saved a checkpoint."""

  def __init__(self, signum: int, message: str):
    """Remembers the signal."""
    super().__init__(message)
    self.signum = signum


def run(config: Config) -> dict[str, Any]:
  """Runs one configuration, or resumes it.

  Returns:
    The summary, as written to `summary.json`; an empty one on all but the
    first of several processes.

  Raises:
    ConfigError, MeshError, PretrainedError, TaskError: before anything is
      written; CheckpointError, a ConfigError, also when none can be saved.
    FloatingPointError: where training diverges.
    Interrupted: after SIGTERM or SIGINT.
  """
  started = time.monotonic()

  def prepare():
    trackers.check(config)
    mesh = sharding.make_mesh(config.mesh)
    folder = RunFolder(
      config.out or _default_folder(config),
      config.resume,
      write=processes.first(),
    )
    task = config.load_task()
    return [folder, task, mesh, _load_policy(config, task, mesh)]

  prepared = processes.on_each(prepare)
  folder, task, mesh = prepared[:3]
  with jax.set_mesh(mesh):
    # Not held here: `_run` frees the weights once the state is made.
    return _run(config, task, prepared.pop(), folder, started)


def _load_policy(config: Config, task: Task, mesh: Mesh) -> Policy:
  processes.say(f'Loading {config.model}')
  policy = load_policy(config.model, task, mesh)
  if config.chat_template == 'none':
    return policy
  tokenizer = load_chat(
    policy.tokenizer,
    config.chat_template,
    system_prompt=config.system_prompt,
    variables=json.loads(config.chat_template_args),
  )
  return policy._replace(tokenizer=tokenizer)


def _run(
  config: Config,
  task: Task,
  policy: Policy,
  folder: RunFolder,
  started: float,
) -> dict[str, Any]:
  compute_dtype = _compute_dtype(config)
  fingerprints = {
    'task_fingerprint': task.fingerprint(),
    'prompt_fingerprint': policy.tokenizer.prompt_fingerprint,
  }
  known = settings(config)
  shared = {name: x for name, x in known.items() if name not in _OWN}
  processes.same(shared | fingerprints)
  trainer = Trainer(config, task, policy, compute_dtype)
  resolved = {
    'compute_dtype': jnp.dtype(compute_dtype).name,
    'loss_scaling': trainer.loss_scaling,
    'best_constant': task.best_constant[0],
    'best_constant_share': task.best_constant[1],
    'parameters': sum(x.size for x in jax.tree.leaves(policy.params)),
    **fingerprints,
    'weights_fingerprint': fingerprint(policy.params, jnp.bfloat16),
  }
  policy = policy._replace(params=None)  # frees the FP32 copy
  known |= resolved
  identity = {name: known[name] for name in IDENTITY}
  checkpoints = Checkpoints(folder.path, keep=config.keep)
  first = 0
  if config.resume:
    folder.warn_of_other_versions()
    processes.same({'last checkpoint': checkpoints.latest_step()})
    if checkpoints.latest_step() is not None:
      first, trainer.state = checkpoints.restore(trainer.state, identity)
  processes.on_first(lambda: folder.create(config, **resolved))
  processes.on_each(lambda: folder.wait(processes.SILENCE))
  processes.on_first(lambda: folder.keep_metrics(first))
  _announce(config, resolved, folder.path, first)

  def save(step: int) -> None:
    checkpoints.save(step, trainer.state, identity)

  with (
    _Signals() as signals,
    Progress(config.steps, first, quiet=not processes.first()) as progress,
    trackers.Trackers(
      config, folder, first, write=processes.first()
    ) as tracked,
  ):
    progress.note('evaluating held-out questions')
    before = latest = _evaluation_before(folder, trainer, first)
    progress.line(_evaluation_line(0, before))
    progress.note('compiling')
    for step in range(first, config.steps):
      last = step + 1 == config.steps
      due = config.eval_every and (step + 1) % config.eval_every == 0
      if config.eval_samples and (last or due):
        trainer.keep_previous()
      record = {'step': step + 1} | trainer.step(step)
      if last or due:
        latest = trainer.evaluate()
        progress.line(_evaluation_line(step + 1, latest))
        record['eval_reward'] = latest.mean
        record['eval_standard_error'] = latest.standard_error
        if config.eval_samples:
          record |= trainer.evaluate_sampled()
      folder.append_metrics(record)
      folder.append_completions(trainer.completions)
      tracked.write(record)
      progress.step(record)
      every = config.checkpoint_every
      final = last and config.save_final
      told = signals.told()
      if final or told or (every and (step + 1) % every == 0):
        save(step + 1)
      if told and not last:
        raise Interrupted(
          told,
          f'stopped after step {step + 1}; its checkpoint is saved. Go on '
          f'with: python -m train --resume --out {folder.path}',
        )
    if first >= config.steps:  # nothing was left to do
      latest = trainer.evaluate()

  if config.save_final:
    pretrained.save_huggingface(
      folder.path / 'model',
      policy.config,
      nnx.to_pure_dict(trainer.state.params),
      policy.tokenizer,
      dtype=arms.ARMS[config.arm].param_dtype,
      fetch=processes.fetch,
      write=processes.first(),
    )
  if not processes.first():
    return {}
  summary = _summary(folder, before, latest) | {
    'best_constant': task.best_constant[0],
    'best_constant_share': task.best_constant[1],
    'seconds': time.monotonic() - started,
    'peak_memory_gib': _peak_memory_gib(),
  }
  folder.write_summary(summary)
  if config.save_final:
    plot.plot_runs([folder.path], folder.path / 'reward.png')
  _report(config, summary, folder.path)
  return summary


class _Signals:
  """Notes SIGTERM and SIGINT; a second SIGINT stops at once."""

  def __init__(self):
    self.received = 0

  def told(self) -> int:
    """The signal that this or another process has received, or 0."""
    return processes.highest(self.received)

  def __enter__(self) -> '_Signals':
    self._previous = {
      number: signal.signal(number, self._handle)
      for number in (signal.SIGTERM, signal.SIGINT)
    }
    return self

  def __exit__(self, *exception) -> None:
    for number, handler in self._previous.items():
      signal.signal(number, handler)

  def _handle(self, number: int, _) -> None:
    if self.received and number == signal.SIGINT:
      raise KeyboardInterrupt
    self.received = number
    print(
      'stopping after this step (interrupt again to stop at once)',
      file=sys.stderr,
    )


def _evaluation_before(
  folder: RunFolder, trainer: Trainer, first: int
) -> Evaluation:
  """The evaluation of the untrained policy; a resumed run reads it."""
  path = folder.path / 'evaluation_before.json'
  if first:
    try:
      expected = np.array(json.loads(path.read_text()), np.float64)
    except (OSError, ValueError, TypeError) as error:
      raise ConfigError(f'{path} is damaged: {error}') from error
    if expected.shape != trainer.question_identity.shape:
      raise ConfigError(f'{path} is damaged: {expected.size} values')
    return Evaluation(expected, trainer.question_identity)
  before = trainer.evaluate()
  folder.write_json(path.name, before.expected.tolist())
  return before


def _summary(
  folder: RunFolder, before: Evaluation, after: Evaluation
) -> dict[str, Any]:
  records = folder.metrics()
  rewards = [record['reward_mean'] for record in records]
  quarter = max(len(rewards) // 4, 1)
  gain, gain_error = after.gain_over(before)
  last = records[-1]
  return {
    'steps': len(records),
    'reward_first_quarter': float(np.mean(rewards[:quarter])),
    'reward_last_quarter': float(np.mean(rewards[-quarter:])),
    'eval_before': before.mean,
    'eval_before_standard_error': before.standard_error,
    'eval_after': after.mean,
    'eval_after_standard_error': after.standard_error,
    'eval_gain': gain,
    'eval_gain_standard_error': gain_error,
    'eval_questions': int(before.expected.size),
    'kl_exact_last': last.get('kl_exact'),
    'skipped_steps': last.get('skipped_steps'),
    'reward_failures': sum(r['reward_failures'] for r in records),
    **{
      k: v
      for k, v in last.items()
      if k.startswith('eval_')
      and v is not None
      and k not in ('eval_reward', 'eval_standard_error')
    },
  }


def _compute_dtype(config: Config):
  if config.compute_dtype != 'auto':
    return jnp.dtype(config.compute_dtype)
  on_cpu = jax.default_backend() == 'cpu'
  return jnp.dtype(jnp.float32 if on_cpu else arms.ARMS[config.arm].param_dtype)


def _default_folder(config: Config) -> Path:
  now = datetime.datetime.now().strftime('%Y%m%d-%H%M%S')
  model = Path(config.model).name
  task = Path(config.task).stem.replace(':', '-')  # a name or a file
  return Path('runs') / f'{now}-{model}-{task}-{config.arm}'


def _peak_memory_gib() -> float:
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / (2**30 if sys.platform == 'darwin' else 2**20)


def _announce(config: Config, resolved, path: Path, first: int) -> None:
  arm = arms.ARMS[config.arm]
  rounding = f', {arm.rounding} rounding' if arm.rounding else ''
  scaling = ''
  if arm.loss_scaling:
    scaling = f'; loss scaling {resolved["loss_scaling"]}'
  mesh = ', '.join(
    f'{axis} {size}' for axis, size in jax.sharding.get_mesh().shape.items()
  )
  mesh = f' ({mesh})' if jax.device_count() > 1 else ''
  processes.say(
    f'{config.model}: {resolved["parameters"] / 1e6:.1f}M parameters in '
    f'{arm.param_dtype}{rounding}; computing in {resolved["compute_dtype"]} on '
    f'{jax.device_count()} x {jax.devices()[0].device_kind}{mesh}{scaling}\n'
    f'{config.task}: {config.prompts} prompts x {config.group} completions a '
    f'step, learning rate {config.lr:g}, seed {config.seed}\n'
    f'Run folder: {path}' + (f', resumed after step {first}' if first else '')
  )


def _evaluation_line(step: int, evaluation: Evaluation) -> str:
  return (
    f'step {step}: expected reward on held-out questions '
    f'{evaluation.mean:.3f} ± {evaluation.standard_error:.3f}'
  )


def _report(config: Config, summary: dict[str, Any], path: Path) -> None:
  s = summary
  kl = s['kl_exact_last']
  kl = 'not measured' if kl is None else f'{kl:.3f} nats per completion'
  lines = [
    f'Reward while training  {s["reward_first_quarter"]:.3f} -> '
    f'{s["reward_last_quarter"]:.3f} (first and last quarter of '
    f'{s["steps"]} steps)',
    f'Held-out reward        {s["eval_before"]:.3f} -> {s["eval_after"]:.3f}, '
    f'gain {s["eval_gain"]:+.3f} ± {s["eval_gain_standard_error"]:.3f} '
    f'(standard error, paired, {s["eval_questions"]} questions)',
    f'Best constant answer   {s["best_constant_share"]:.3f} '
    f'(always {s["best_constant"]!r})',
    f'KL to the reference    {kl}',
    f'Time, peak memory      {s["seconds"]:.0f} s, '
    f'{s["peak_memory_gib"]:.1f} GiB',
  ]
  if config.save_final:
    lines += [
      f'Picture                {path / "reward.png"}',
      f'Weights                {path / "model"}',
    ]
  if config.eval_samples:
    sampled = ', '.join(
      f'{name.removeprefix("eval_").replace("_", " ")} {s[name]:.3f}'
      for name in s
      if f'{name}_standard_error' in s
      and name not in ('eval_before', 'eval_after', 'eval_gain')
    )
    lines.insert(2, f'Held-out, sampled      {sampled}')
  print('\n' + '\n'.join(lines))
