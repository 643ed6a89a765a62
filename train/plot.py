"""Pictures of runs: `python -m train.plot RUN [RUN ...]`."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import tyro

from train.config import ConfigError
from train.run_folder import read_config, read_metrics

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is set

_WINDOW = 5  # steps of the moving average
_BEFORE = ('eval_before', 'eval_before_standard_error')


@dataclasses.dataclass(frozen=True)
class Arguments:
  """Draws reward, KL, sticking and mismatch of one or several runs."""

  runs: tyro.conf.Positional[tuple[Path, ...]]
  """Run folders."""
  out: Path = Path('runs.png')
  """The picture."""


class _Run:
  """A run's settings, and its metrics as arrays."""

  def __init__(self, path: Path):
    self.config = read_config(path)
    self._records = read_metrics(path)
    if not self._records:
      raise ConfigError(f'{path} holds no steps yet')
    summary = path / 'summary.json'
    self._summary = json.loads(summary.read_text()) if summary.exists() else {}

  def label(self, runs: Sequence['_Run']) -> str:
    """What sets this run apart from the others."""
    names = ('model', 'task', 'arm', 'lr', 'seed')
    differing = [
      name
      for name in names
      if name == 'arm' or len({run.config[name] for run in runs}) > 1
    ]
    return ', '.join(
      f'{name} {self.config[name]:g}'
      if name in ('lr', 'seed')
      else str(self.config[name])
      for name in differing
    )

  def held_out(self) -> np.ndarray:
    """Steps, held-out rewards and standard errors, the start included."""
    after = self.series('step', 'eval_reward', 'eval_standard_error')
    if 'eval_before' not in self._summary:
      return after
    start = [self._summary[n] for n in _BEFORE]
    return np.concatenate([[[0.0], *([x] for x in start)], after], axis=1)

  def series(self, *names: str) -> np.ndarray:
    """The named metrics at the steps that have all of them, a row each."""
    rows = [
      [record[name] for name in names]
      for record in self._records
      if all(record.get(name) is not None for name in names)
    ]
    return np.array(rows, float).reshape(-1, len(names)).T


def plot_runs(paths: Sequence[Path], out: Path) -> None:
  """Draws runs side by side, a colour each.

  Raises:
    ConfigError: if a path is no run folder.
  """
  runs = [_Run(Path(path)) for path in paths]
  figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout='constrained')
  first = runs[0].config
  figure.suptitle(
    f'{first["model"]} on {first["task"]}: {first["prompts"]} prompts x '
    f'{first["group"]} completions a step, learning rate {first["lr"]:g}'
  )
  (reward, kl, trade), (changed, slope, mismatch) = axes
  for i, run in enumerate(runs):
    color, label = f'C{i}', run.label(runs)
    step, sampled = run.series('step', 'reward_mean')
    reward.plot(step, sampled, '.', color=color, alpha=0.3)
    window = min(_WINDOW, len(sampled))
    mean = np.convolve(sampled, np.ones(window) / window, 'valid')
    reward.plot(step[window - 1 :], mean, color=color, label=label)
    reward.errorbar(*run.held_out(), fmt='o', color=color, capsize=3)
    kl.plot(*run.series('step', 'kl_exact'), color=color)
    kl_at, reward_at = run.series('kl_exact', 'reward_mean')
    if len(kl_at) >= window:
      kernel = np.ones(window) / window
      trade.plot(
        np.convolve(kl_at, kernel, 'valid'),
        np.convolve(reward_at, kernel, 'valid'),
        '.-',
        color=color,
      )
    x, y = run.series('step', 'changed_fraction')
    changed.plot(x, 100 * y, color=color)
    slope.plot(*run.series('step', 'displacement_slope'), color=color)
    mismatch.plot(*run.series('step', 'mismatch_k3'), color=color)
  reward.axhline(first['best_constant_share'], color='0.4', linestyle=':')
  reward.set(
    title=f'Reward: steps, mean of {_WINDOW}, held out (circles)',
    ylabel='share of right answers; dotted: best constant',
  )
  reward.legend(fontsize=9)
  kl.set(title='KL to the reference', ylabel='nats per completion')
  trade.set(
    title=f'Reward against KL, means of {_WINDOW} steps',
    xlabel='nats per completion',
    ylabel='share of right answers',
  )
  changed.set(title='Weights visibly changed by a step', ylabel='%')
  changed.set_ylim(0, None)
  slope.set(
    title='Visible against true displacement from the start',
    ylabel='slope; 1: nothing sticks',
  )
  mismatch.set(
    title='Sampler against training forward (k3)', ylabel='nats per token'
  )
  slope.set_ylim(0, 1.3)
  for ax in (reward, kl, changed, slope, mismatch):
    ax.set_xlabel('step')
  figure.savefig(out, dpi=110)
  plt.close(figure)


def main() -> int:
  """Parses the command line and draws; 2 for what the user can mend."""
  arguments = tyro.cli(Arguments, prog='python -m train.plot')
  try:
    if not arguments.runs:
      raise ConfigError('expected at least one run folder')
    plot_runs(arguments.runs, arguments.out)
  except (ValueError, OSError) as error:  # Matplotlib's, of a format, too
    print(f'error: {error}', file=sys.stderr)
    return 2
  print(arguments.out)
  return 0


if __name__ == '__main__':
  sys.exit(main())
