"""Whole runs with the flags of the algorithms."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest

from train import loop, step, tasks, trainer
from train.config import Config, ConfigError
from train.tokenizer import HuggingFaceTokenizer

pytestmark = pytest.mark.usefixtures('runner')


def run(runner, folder, **flags):
  loop.run(runner.config(out=folder, kl_every=0, save_final=False, **flags))
  return runner.read(folder)


def test_several_updates_of_a_rollout_move_away_from_it(runner, tmp_path):
  # Standardised over the batch: every completion has an advantage.
  flags = dict(steps=1, loss='ppo', advantage='reinforce++', lr=0.1, arm='fp32')
  [one] = run(runner, tmp_path / 'one', **flags)
  [three] = run(runner, tmp_path / 'three', updates=3, **flags)
  # The same rollout; the ratio is 1 until the first update.
  assert one['reward_mean'] == three['reward_mean']
  assert one['clip_fraction'] == 0 < three['clip_fraction']
  # Against the policy that sampled, whatever was updated since.
  assert abs(three['mismatch_k1']) < 1e-5


def test_until_the_first_update_every_ratio_is_1_at_any_temperature(
  runner, tmp_path
):
  # The rate is so small that all updates see the weights that sampled; their
  # ratios are of two programs. A log-probability is known to some 40 roundings
  # of logits of 16 units over the temperature: 40 * 2^-21 / 0.6 = 3.2e-5, and
  # a ratio needs two.
  bound = 1e-4
  [record] = run(
    runner,
    tmp_path / 'run',
    steps=1,
    temperature=0.6,
    updates=3,
    loss='ppo',
    clip_low=bound,
    clip_high=bound,
    advantage='reinforce++',  # every completion has one
    lr=1e-12,
    arm='fp32',
  )
  assert record['changed_fraction'] == record['clip_fraction'] == 0
  # Nor is the sampler, a third program, another policy.
  assert 0 < record['mismatch_probability'] < bound
  assert record['phantom_clip_fraction'] == 0


@dataclasses.dataclass(frozen=True)
class Paired(tasks.Task):
  """Pays by question and completion: hardly another pair earns the same.

  Nothing at all for half of the questions.
  """

  def reward(self, question, completion, *, terminated):
    if zlib.crc32(question.prompt.encode()) % 2:
      return 0.0
    text = f'{question.prompt}{completion}'
    return zlib.crc32(text.encode()) % 1009 / 1009 if terminated else 0.0


@pytest.mark.parametrize('filter_groups, updates', [('off', 1), ('refill', 3)])
def test_every_advantage_is_that_of_its_prompt_and_its_completion(
  runner, tmp_path, monkeypatch, filter_groups, updates
):
  task = tasks.load_task('addition')
  task = Paired(task.name, task.train, task.evaluation, task.best_constant)
  monkeypatch.setattr(tasks, 'load_task', lambda *_, **__: task)
  batches = []

  def spy(*fields, **named):
    batches.append(step.Batch(*fields, **named))
    return batches[-1]

  monkeypatch.setattr(trainer, 'Batch', spy)
  records = run(
    runner,
    tmp_path / 'run',
    filter_groups=filter_groups,
    updates=updates,
    advantage='rloo',
    reward_scale=0.5,
    lr=1e-9,
  )
  tokenizer = HuggingFaceTokenizer.from_directory(runner.model)
  questions = {question.prompt: question for question in task.train}
  group, asked, found = runner.flags['group'], set(), 0
  for batch in jax.device_get(batches):
    prompts, completions = batch.prompts, batch.completions
    rewards = []
    for row, (length, ended) in enumerate(
      zip(completions.lengths, completions.terminated, strict=True)
    ):
      tokens = prompts.tokens[row // group, : prompts.lengths[row // group]]
      question = questions[tokenizer.decode(tokens)]
      text = tokenizer.decode(completions.tokens[row, :length])
      rewards.append(
        task.reward(question, text.split('\n')[0], terminated=ended)
      )
      asked.add(question.prompt)
    rewards = np.reshape(rewards, (-1, group))
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (group - 1)
    np.testing.assert_allclose(
      batch.advantages, 0.5 * (rewards - others).ravel(), rtol=0, atol=1e-6
    )
    mixed = np.ptp(rewards, axis=1) > 0
    found += mixed.sum()
    np.testing.assert_array_equal(
      batch.trained, np.repeat(mixed | (filter_groups == 'off'), group)
    )
  assert len(asked) > 4 and found > 0
  # The batch was put together from several rollouts.
  assert any(r['rollouts'] > 1 for r in records) == (filter_groups != 'off')


def test_micro_batches_change_nothing_but_roundings(runner, tmp_path):
  flags = dict(steps=2, arm='fp32', advantage='grpo', aggregation='token-mean')
  whole = run(runner, tmp_path / 'whole', **flags)
  parts = run(runner, tmp_path / 'parts', micro_batch=1, **flags)
  for name in ('loss', 'grad_norm', 'entropy', 'reward_mean'):
    np.testing.assert_allclose(parts[0][name], whole[0][name], rtol=1e-5)


def test_a_run_with_every_flag_resumes_bit_for_bit(runner, tmp_path):
  flags = dict(
    advantage='reinforce++-baseline',
    loss='cispo',
    aggregation='sequence-mean',
    updates=3,
    filter_groups='refill',
    refill_rounds=2,
    correction='token-masked',
    steps=3,
    eval_every=1,
  )
  whole = tmp_path / 'whole'
  loop.run(runner.config(out=whole, **flags))
  part = tmp_path / 'part'
  loop.run(runner.config(out=part, **flags | {'steps': 2}))
  loop.run(runner.config(out=part, resume=True, **flags))
  assert runner.timeless(part) == runner.timeless(whole)


def test_equal_groups_are_dropped_or_replaced(runner, tmp_path, monkeypatch):
  # An untrained policy: most groups have no right answer at all.
  flags = dict(steps=2, lr=1e-6)
  plain = run(runner, tmp_path / 'plain', **flags)
  refill = run(
    runner,
    tmp_path / 'refill',
    filter_groups='refill',
    refill_rounds=4,
    **flags,
  )
  assert all(r['rollouts'] == 1 for r in plain)
  assert all(1 <= r['rollouts'] <= 4 for r in refill)
  assert any(r['rollouts'] > 1 for r in refill)
  monkeypatch.setattr(
    tasks, 'score', lambda t, q, *_: (np.zeros(len(q), np.float32), 0)
  )
  dropped = run(
    runner, tmp_path / 'none', filter_groups='drop', arm='fp32', **flags
  )
  for record in dropped:  # nothing is left to learn from
    assert record['loss'] == record['grad_norm'] == 0
    assert record['changed_fraction'] == 0


def test_evaluation_may_sample_from_fewer_tokens(runner, tmp_path):
  # With one token left every sample is the greedy one.
  flags = dict(steps=1, eval_samples=5, arm='fp32')
  free = run(runner, tmp_path / 'free', **flags)
  one = run(runner, tmp_path / 'one', eval_top_k=1, **flags)
  assert one[0]['reward_mean'] == free[0]['reward_mean']  # the training's
  assert one[0]['eval_reward'] == free[0]['eval_reward']  # exact
  assert one[0]['eval_sampled'] == one[0]['eval_greedy']
  assert one[0]['eval_sampled'] == pytest.approx(one[0]['eval_pass_at_4'])
  assert free[0]['eval_sampled'] < free[0]['eval_pass_at_4']


@pytest.mark.parametrize(
  'flags, message',
  [
    (dict(eval_top_k=-1), 'eval_top_k: expected >= 0, got -1'),
    (dict(eval_top_p=0.0), 'eval_top_p: expected above 0 and at most 1'),
    (dict(eval_min_p=1.5), 'eval_min_p: expected between 0 and 1, got 1.5'),
    (dict(eval_temperature=0.0), 'eval_temperature: expected a positive'),
    (dict(advantage='gae'), "unknown advantage 'gae'; there are: dr-grpo"),
    (dict(loss='dpo'), "unknown loss 'dpo'; there are: policy-gradient"),
    (dict(aggregation='mean'), "unknown aggregation 'mean'"),
    (dict(correction='tis'), "unknown correction 'tis'; there are: off"),
    (dict(filter_groups='yes'), "unknown filter groups 'yes'"),
    (dict(updates=3), 'updates: expected a divisor of prompts, 8, got 3'),
    (dict(updates=0), 'updates: expected >= 1, got 0'),
    (
      dict(updates=2, micro_batch=3),
      'micro_batch: expected a divisor of the 4 prompts of an update, got 3',
    ),
    (dict(clip_low=0.1), 'the loss policy-gradient has no such bound'),
    (dict(loss='cispo', clip_low=0.1), 'the loss cispo has no such bound'),
    (dict(loss='ppo', clip_low=1.5), 'expected a positive number below 1'),
    (dict(loss='gspo', clip_high=0.0), 'clip_high: expected a positive number'),
    (dict(correction_cap=-1.0), 'correction_cap: expected a positive number'),
    (dict(refill_rounds=0), 'refill_rounds: expected >= 1, got 0'),
  ],
)
def test_settings_that_make_no_sense_are_refused(flags, message):
  with pytest.raises(ConfigError, match=message):
    Config(**flags)


def test_each_loss_has_its_own_bounds_unless_others_are_given():
  assert Config().clips == (None, None)
  assert Config(loss='ppo', clip_high=0.28).clips == (0.2, 0.28)
  assert Config(loss='gspo').clips == (3e-4, 4e-4)
  assert Config(loss='cispo').clips == (None, 4.0)
