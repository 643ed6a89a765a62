"""The picture of a run: reward, divergence and what became visible."""

import json
from pathlib import Path

import matplotlib
import numpy as np

from train.run_folder import read_metrics

matplotlib.use('Agg')
from matplotlib import pyplot as plt  # noqa: E402 - after the backend is set

_WINDOW = 5  # steps of the moving average


def plot_run(path: Path) -> Path:
  """Draws `reward.png` into a run folder from what the run wrote there."""
  records = read_metrics(path)
  config = json.loads((path / 'config.json').read_text())
  step = np.array([record['step'] for record in records])

  def series(name):
    found = [(r['step'], r[name]) for r in records if r.get(name) is not None]
    return np.array(found).reshape(-1, 2).T

  figure, (reward, kl, weights) = plt.subplots(
    1, 3, figsize=(13, 3.8), layout='constrained'
  )
  figure.suptitle(
    f'{config["model"]} on {config["task"]}, {config["arm"]}, '
    f'learning rate {config["lr"]:g}'
  )
  sampled = series('reward_mean')[1]
  reward.plot(step, sampled, '.', color='0.6', label='sampled, each step')
  if len(step) >= _WINDOW:
    mean = np.convolve(sampled, np.ones(_WINDOW) / _WINDOW, 'valid')
    label = f'sampled, mean of {_WINDOW} steps'
    reward.plot(step[_WINDOW - 1 :], mean, color='C0', label=label)
  held_out, error = series('eval_reward'), series('eval_standard_error')
  reward.errorbar(
    *held_out, error[1], fmt='o', color='C1', capsize=3, label='held out'
  )
  reward.axhline(
    config['best_constant_share'],
    color='0.4',
    linestyle=':',
    label='best constant answer',
  )
  reward.set(xlabel='step', ylabel='reward (share of right answers)')
  reward.set_ylim(0, 1)
  reward.legend(fontsize=8)
  kl.plot(*series('kl_exact'), color='C3', label='whole vocabulary')
  kl.plot(*series('kl_k3'), color='C3', alpha=0.4, label='k3 estimate')
  kl.set(xlabel='step', ylabel='KL to the reference (nats/completion)')
  kl.legend(fontsize=8)
  for name, label in (('changed', 'visibly changed'), ('stuck', 'stuck')):
    x, y = series(f'{name}_fraction')
    weights.plot(x, 100 * y, label=label)
  weights.set(xlabel='step', ylabel='weights (%)')
  weights.set_ylim(0, None)
  weights.legend(fontsize=8)
  file = path / 'reward.png'
  figure.savefig(file, dpi=120)
  plt.close(figure)
  return file
