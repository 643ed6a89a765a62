import json
import math
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from train import __main__, loop, pretrained, run_folder, tasks
from train.config import Config
from train.run_folder import RunFolder
from train.tasks import Task

pytestmark = pytest.mark.usefixtures('quick_compile', 'compile_once')

METRICS = (
  'step reward_mean kl_exact kl_k3 entropy grad_norm changed_fraction '
  'stuck_fraction completion_tokens truncated_fraction rollout_seconds '
  'train_seconds tokens_per_second'
).split()
SUMMARY = (
  'reward_first_quarter reward_last_quarter eval_before eval_after eval_gain '
  'eval_gain_standard_error eval_questions best_constant best_constant_share '
  'kl_exact_last reward_failures seconds peak_memory_gib'
).split()
@dataclass(frozen=True)
class Broken(Task):
  def reward(self, question, completion, *, terminated):
    raise ZeroDivisionError('no such answer')


@pytest.fixture
def use(monkeypatch):
  """Gives `loop.run` a task of another kind, and remembers its trainer."""
  trainers = []

  class Trainer(loop.Trainer):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      trainers.append(self)
      self.keys, rollout = [], self._rollout

      def spy(params, prompts, key):
        self.keys.append(jax.random.key_data(key).tolist())
        return rollout(params, prompts, key)

      spy._cache_size = rollout._cache_size
      self._rollout = spy

  def use(kind):
    task = tasks.load_task('addition', train_size=101, evaluation_size=53)
    parts = task.name, task.train, task.evaluation, task.best_constant
    monkeypatch.setattr(tasks, 'load_task', lambda name: kind(*parts))
    monkeypatch.setattr(loop, 'Trainer', Trainer)
    return trainers

  return use


def assert_same_bits(a, b):
  a, b = np.asarray(a), np.asarray(b)
  assert (a.dtype, a.shape) == (b.dtype, b.shape)
  assert a.tobytes() == b.tobytes()


def test_a_run_leaves_everything_behind_and_its_seed_repeats_it(
  use, make_folder, tmp_path, monkeypatch, capsys
):
  trainers = use(Even)
  model, out = make_folder(), tmp_path / 'runs' / 'first'
  summary = loop.run(Config(model=str(model), out=out, eval_every=2, **FLAGS))
  files = {'config.json', 'metrics.jsonl', 'summary.json', 'reward.png'}
  assert {file.name for file in out.iterdir()} == files | {'model'}
  assert (out / 'reward.png').read_bytes().startswith(b'\x89PNG')

  records = read(out)
  assert [record['step'] for record in records] == [1, 2, 3]
  for record in records:
    assert set(METRICS) <= set(record)
    assert 1 <= record['completion_tokens'] <= FLAGS['max_new_tokens']
    assert all(0 <= record[k] <= 1 for k in record if k.endswith('_fraction'))
    assert all(record[name] > 0 for name in TIMES)
    assert record['reward_failures'] == 0
    # Decoding and the training forward of one policy differ by rounding.
    assert abs(record['mismatch_k1']) < 1e-5
  assert [('eval_reward' in r) for r in records] == [False, True, True]
  assert 0 < np.mean([record['reward_mean'] for record in records]) < 1
  # The reference is the policy before its first step, and only then.
  assert records[0]['kl_exact'] == records[0]['kl_k3'] == 0
  assert records[2]['kl_exact'] > 0
  assert records[0]['changed_fraction'] > 0.1

  assert summary == json.loads((out / 'summary.json').read_text())
  assert set(SUMMARY) <= set(summary)
  assert summary['eval_questions'] == FLAGS['eval_questions']
  assert summary['reward_first_quarter'] == records[0]['reward_mean']
  assert summary['reward_last_quarter'] == records[2]['reward_mean']
  assert summary['eval_after'] == records[2]['eval_reward']
  assert summary['kl_exact_last'] == records[2]['kl_exact']

  config = json.loads((out / 'config.json').read_text())
  assert FLAGS.items() <= config.items()
  assert config['compute_dtype'] == 'float32'  # resolved from auto, on a CPU
  assert config['arm'] == 'bf16-sr' and config['temperature'] == 1.0
  assert config['out'] == str(out) and config['model'] == str(model)
  assert config['versions']['jax'] == jax.__version__
  assert {'python', 'jaxlib', 'flax', 'optax', 'numpy'} <= set(
    config['versions']
  )

  [trainer] = trainers
  assert len(set(map(tuple, trainer.keys))) == 3  # no step repeats another
  saved = pretrained.load_huggingface(out / 'model')
  jax.tree.map(
    assert_same_bits, saved.params, nnx.to_pure_dict(trainer.state.params)
  )
  assert saved.params['embed'].dtype == jnp.bfloat16
  start = pretrained.load_huggingface(model).params
  assert np.any(saved.params['embed'] != start['embed'])
  for function in (
    trainer._rollout,
    trainer._reference_hidden,
    trainer._train_step,
    trainer._evaluator._probabilities,
  ):
    assert function._cache_size() == 1  # one compilation for the whole run

  # The same from the command line, and evaluated less often.
  flags = FLAGS | {'model': model, 'out': tmp_path / 'second'}
  argv = [f'--{k.replace("_", "-")}={v}' for k, v in flags.items()]
  monkeypatch.setattr(sys, 'argv', ['train', *argv])
  capsys.readouterr()
  assert __main__.main() == 0
  again = read(tmp_path / 'second')

  def timeless(record):
    return {
      k: v
      for k, v in record.items()
      if k not in TIMES and not k.startswith('eval_')
    }

  assert list(map(timeless, again)) == list(map(timeless, records))
  output, errors = capsys.readouterr()
  assert 'Held-out reward' in output and 'step 3/3' in output
  assert str(tmp_path / 'second' / 'reward.png') in output.replace('\n', '')
  assert errors == ''


def test_a_reward_that_raises_counts_as_0_and_is_warned_of(
  use, make_folder, tmp_path
):
  use(Broken)
  out = tmp_path / 'run'
  flags = FLAGS | dict(steps=1, arm='fp32', kl_every=0)
  with pytest.warns(UserWarning, match='ZeroDivisionError: no such answer'):
    summary = loop.run(Config(model=str(make_folder()), out=out, **flags))
  [record] = read(out)
  count = FLAGS['prompts'] * FLAGS['group']
  assert record['reward_mean'] == 0
  assert record['reward_failures'] == summary['reward_failures'] == count
  # No advantage, no gradient, no change; Adam does not divide 0 by 0.
  assert record['grad_norm'] == record['changed_fraction'] == 0
  assert summary['eval_gain'] == 0
  # Without a reference there is no divergence, and everybody copes.
  assert record['kl_exact'] is record['kl_k3'] is None
  assert summary['kl_exact_last'] is None
  assert (out / 'reward.png').exists()


def test_numbers_that_do_not_exist_are_null_in_a_run_folder(tmp_path):
  folder = RunFolder(tmp_path)
  folder.append_metrics({'step': 1, 'displacement_slope': math.nan})
  folder.append_metrics({'step': 2, 'displacement_slope': 0.5})
  folder.write_summary({'eval_gain_standard_error': math.nan, 'seconds': 1.5})
  want = [
    {'step': 1, 'displacement_slope': None},
    {'step': 2, 'displacement_slope': 0.5},
  ]
  assert read(tmp_path) == run_folder.read_metrics(tmp_path) == want
  assert json.loads((tmp_path / 'summary.json').read_text()) == {
    'eval_gain_standard_error': None,
    'seconds': 1.5,
  }


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
  use, make_folder, tmp_path, monkeypatch, capsys
):
  use(Even)

  def diverged(self, step):
    raise FloatingPointError(f'step {step + 1}: loss {math.nan}')

  monkeypatch.setattr(loop.Trainer, 'step', diverged)
  flags = {**FLAGS, 'model': make_folder(), 'out': tmp_path / 'run'}
  argv = [f'--{k.replace("_", "-")}={v}' for k, v in flags.items()]
  monkeypatch.setattr(sys, 'argv', ['train', *argv])
  assert __main__.main() == 1
  assert 'error: training diverged at step 1: loss nan' in (
    capsys.readouterr().err
  )
  assert not (tmp_path / 'run' / 'model').exists()
