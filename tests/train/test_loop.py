import json
import math
import os
import pathlib
import weakref
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train import loop, pretrained, run_folder, tasks, trainer
from train.config import ConfigError
from train.run_folder import RunFolder
from train.tasks import Question, Task
from train.tokenizer import CharTokenizer

pytestmark = pytest.mark.usefixtures('runner')

METRICS = (
  'step reward_mean kl_exact kl_k1 kl_k2 kl_k3 entropy grad_norm '
  'mismatch_k1 mismatch_k3 mismatch_probability phantom_clip_fraction '
  'changed_fraction stuck_fraction completion_tokens truncated_fraction '
  'rollout_seconds train_seconds tokens_per_second'
).split()
SUMMARY = (
  'reward_first_quarter reward_last_quarter eval_before eval_after eval_gain '
  'eval_gain_standard_error eval_questions best_constant best_constant_share '
  'kl_exact_last reward_failures seconds peak_memory_gib'
).split()
SAMPLED = ('eval_sampled', 'eval_greedy', 'eval_pass_at_2', 'eval_pass_at_4')


@dataclass(frozen=True)
class Broken(Task):
  def reward(self, question, completion, *, terminated):
    raise ZeroDivisionError('no such answer')


@pytest.fixture
def trainers(monkeypatch):
  """The trainers that `loop.run` makes, which note the keys of rollouts."""
  made = []

  class Trainer(loop.Trainer):
    def __init__(self, *args, **kwargs):
      super().__init__(*args, **kwargs)
      made.append(self)
      self.keys, rollout = [], self._programs.rollout

      def spy(params, prompts, key, temperature):
        if temperature:
          self.keys.append(jax.random.key_data(key).tolist())
        return rollout(params, prompts, key, temperature)

      spy._cache_size = rollout._cache_size
      self._programs = self._programs._replace(rollout=spy, eval_rollout=spy)

  monkeypatch.setattr(loop, 'Trainer', Trainer)
  return made


def assert_same_bits(a, b):
  a, b = np.asarray(a), np.asarray(b)
  assert (a.dtype, a.shape) == (b.dtype, b.shape)
  assert a.tobytes() == b.tobytes()


def test_no_step_runs_beside_the_weights_that_the_run_was_loaded_with(
  runner, monkeypatch, tmp_path
):
  loaded, alive = [], []
  load = loop.load_policy

  def watch(*args):
    policy = load(*args)
    loaded.extend(map(weakref.ref, jax.tree.leaves(policy.params)))
    return policy

  class Trainer(loop.Trainer):
    def step(self, step):
      alive.append([ref() is not None for ref in loaded])
      return super().step(step)

  monkeypatch.setattr(loop, 'load_policy', watch)
  monkeypatch.setattr(loop, 'Trainer', Trainer)
  loop.run(runner.config(steps=1, out=tmp_path / 'run'))
  assert loaded and alive == [[False] * len(loaded)]


def test_a_run_leaves_everything_behind_and_its_seed_repeats_it(
  runner, trainers, tmp_path, capsys
):
  flags, out = runner.flags, tmp_path / 'runs' / 'first'
  more = dict(eval_every=2, eval_samples=5)
  summary = loop.run(runner.config(out=out, **more))
  output = capsys.readouterr().out
  assert 'loss scaling' not in output  # an arm that needs none
  files = {'config.json', 'metrics.jsonl', 'summary.json', 'reward.png'}
  files |= {'evaluation_before.json', 'checkpoints', 'model'}
  files |= {'completions.jsonl'}
  assert {file.name for file in out.iterdir()} == files
  assert (out / 'reward.png').read_bytes().startswith(b'\x89PNG')

  records = runner.read(out)
  assert [record['step'] for record in records] == [1, 2, 3]
  for record in records:
    assert set(METRICS) <= set(record)
    assert 1 <= record['completion_tokens'] <= flags['max_new_tokens']
    assert all(0 <= record[k] <= 1 for k in record if k.endswith('_fraction'))
    assert all(record[name] > 0 for name in runner.times)
    assert record['reward_failures'] == 0
    # Decoding and the training forward of one policy differ by rounding.
    assert abs(record['mismatch_k1']) < 1e-5
    assert record['phantom_clip_fraction'] == 0
  for name in ('eval_reward', 'eval_kl_exact', *SAMPLED):
    assert [name in r for r in records] == [False, True, True]
  assert 0 < np.mean([record['reward_mean'] for record in records]) < 1
  # The reference is the policy before its first step, and only then.
  for name in ('kl_exact', 'kl_k1', 'kl_k2', 'kl_k3'):
    assert records[0][name] == 0
  assert records[2]['kl_exact'] > 0
  assert records[0]['changed_fraction'] > 0.1

  written = (out / 'completions.jsonl').read_text().splitlines()
  shown = [json.loads(line) for line in written]
  assert [entry['step'] for entry in shown] == [1] * 4 + [2] * 4 + [3] * 4
  prompts = {q.prompt for q in trainers[0]._task.train}
  for entry in shown:
    assert entry['prompt'] in prompts
    assert entry['reward'] in (0, 1) and 1 <= entry['tokens']
    assert not entry['reward'] or entry['terminated']

  assert summary == json.loads((out / 'summary.json').read_text())
  assert set(SUMMARY) <= set(summary)
  assert summary['eval_questions'] == flags['eval_questions']
  assert summary['reward_first_quarter'] == records[0]['reward_mean']
  assert summary['reward_last_quarter'] == records[2]['reward_mean']
  assert summary['eval_after'] == records[2]['eval_reward']
  assert summary['kl_exact_last'] == records[2]['kl_exact']
  for name in SAMPLED:
    assert summary[name] == records[2][name]
    assert 0 <= summary[f'{name}_standard_error'] < 0.5

  config = json.loads((out / 'config.json').read_text())
  assert flags.items() <= config.items()
  assert config['compute_dtype'] == 'float32'  # resolved from auto, on a CPU
  assert config['arm'] == 'bf16-sr' and config['temperature'] == 1.0
  assert config['out'] == str(out) and config['model'] == str(runner.model)
  assert config['versions']['jax'] == jax.__version__
  assert {'python', 'jaxlib', 'flax', 'optax', 'numpy'} <= set(
    config['versions']
  )

  [trainer] = trainers
  # No step repeats another, and no evaluation a step; the evaluations, of ten
  # batches each, ask the same with the same noise.
  assert len(trainer.keys) == 3 + 2 * 10
  assert len(set(map(tuple, trainer.keys))) == 3 + 10
  saved = pretrained.load_huggingface(out / 'model')
  jax.tree.map(
    assert_same_bits, saved.read(), nnx.to_pure_dict(trainer.state.params)
  )
  assert saved.read()['embed'].dtype == jnp.bfloat16
  start = pretrained.load_huggingface(runner.model).read()
  assert np.any(saved.read()['embed'] != start['embed'])
  for function in (
    trainer._programs.rollout,
    trainer._programs.hidden,
    trainer._programs.held_out_kl,
    trainer._programs.train_step,
    trainer._evaluator._probabilities,
  ):
    assert function._cache_size() == 1  # one compilation for the whole run

  # The same from the command line.
  assert runner.main(out=tmp_path / 'second', **more) == 0
  assert runner.timeless(tmp_path / 'second') == runner.timeless(out)
  output, errors = capsys.readouterr()
  assert 'Held-out reward' in output and 'step 3/3' in output
  assert 'sampled' in output and 'pass at 4' in output
  assert str(tmp_path / 'second' / 'reward.png') in output.replace('\n', '')
  assert errors == ''


def test_the_divergence_is_measured_every_other_step(
  runner, trainers, tmp_path
):
  loop.run(runner.config(out=tmp_path / 'run', arm='fp32', kl_every=2))
  records = runner.read(tmp_path / 'run')
  assert [r['kl_exact'] is None for r in records] == [False, True, False]
  assert [r.get('kl_k1') is None for r in records] == [False, True, False]
  assert records[0]['kl_exact'] == 0 < records[2]['kl_exact']
  [trainer] = trainers
  assert (
    trainer._programs.train_step._cache_size() == 2
  )  # with a reference, without
  summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
  assert summary['kl_exact_last'] == records[2]['kl_exact']


def test_memory_does_not_grow_over_50_steps(runner, trainers, tmp_path):
  statm = pathlib.Path('/proc/self/statm')
  resident, arrays = [], []

  def measure():
    arrays.append(len(jax.live_arrays()))
    if statm.exists():
      pages = int(statm.read_text().split()[1])
      resident.append(pages * os.sysconf('SC_PAGE_SIZE'))

  loop.run(runner.config(out=tmp_path / 'run', steps=1))
  [trainer] = trainers
  for step in range(1, 51):
    trainer.step(step)
    measure()
  assert len(set(arrays)) == 1
  # After ten steps what is allocated lazily is there; then a step leaves less
  # behind than its own sequences, 15 completions and their prompts and logs.
  growth = [b - resident[10] for b in resident[10:]]
  assert max(growth, default=0) < 40 * 2**15


def test_a_reward_that_raises_counts_as_0_and_is_warned_of(
  runner, tmp_path, monkeypatch
):
  task = tasks.load_task('addition')
  parts = task.name, task.train, task.evaluation, task.best_constant
  monkeypatch.setattr(tasks, 'load_task', lambda *_, **__: Broken(*parts))
  out = tmp_path / 'run'
  with pytest.warns(UserWarning, match='ZeroDivisionError: no such answer'):
    summary = loop.run(runner.config(out=out, steps=1, arm='fp32', kl_every=0))
  [record] = runner.read(out)
  count = runner.flags['prompts'] * runner.flags['group']
  assert record['reward_mean'] == 0
  assert record['reward_failures'] == summary['reward_failures'] == count
  # No advantage, no gradient, no change; Adam does not divide 0 by 0.
  assert record['grad_norm'] == record['changed_fraction'] == 0
  assert summary['eval_gain'] == 0
  # Without a reference there is no divergence, and everybody copes.
  assert record['kl_exact'] is record['kl_k3'] is None
  assert summary['kl_exact_last'] is None
  assert (out / 'reward.png').exists()


def test_numbers_that_do_not_exist_are_null_in_a_run_folder(runner, tmp_path):
  folder = RunFolder(tmp_path)
  folder.append_metrics({'step': 1, 'displacement_slope': math.nan})
  folder.append_metrics({'step': 2, 'displacement_slope': 0.5})
  folder.write_summary({'eval_gain_standard_error': math.nan, 'seconds': 1.5})
  want = [
    {'step': 1, 'displacement_slope': None},
    {'step': 2, 'displacement_slope': 0.5},
  ]
  assert runner.read(tmp_path) == run_folder.read_metrics(tmp_path) == want
  assert json.loads((tmp_path / 'summary.json').read_text()) == {
    'eval_gain_standard_error': None,
    'seconds': 1.5,
  }


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(
  runner, tmp_path, monkeypatch, capsys
):
  step = loop.Trainer.step

  def poisoned(self, done):
    if done == 2:
      params = jax.tree.map(lambda x: x * math.nan, self.state.params)
      self.state = self.state._replace(params=params)
    return step(self, done)

  out = tmp_path / 'run'
  with monkeypatch.context() as patch:
    patch.setattr(loop.Trainer, 'step', poisoned)
    assert runner.main(out=out, steps=4, checkpoint_every=1) == 1
  error = capsys.readouterr().err
  assert 'error: training diverged at step 3: loss nan' in error
  assert not (out / 'model').exists()
  # The last checkpoint is kept, and is the one before the fault.
  assert sorted(p.name for p in (out / 'checkpoints').iterdir()) == ['1', '2']
  assert [record['step'] for record in runner.read(out)] == [1, 2]
  assert runner.main(out=out, resume=True) == 0
  assert [record['step'] for record in runner.read(out)] == [1, 2, 3, 4]


def test_a_prompt_without_tokens_is_refused():
  full, empty = Question('1+1=', '2', ''), Question('', '2', '')
  task = Task('made', (full, empty), (full,), ('2', 1.0))
  with pytest.raises(ConfigError, match="the prompt '' has no tokens"):
    trainer._prompt_width(CharTokenizer('0123+='), task)
