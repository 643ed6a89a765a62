"""Whole runs with the flags of the algorithms."""

import numpy as np
import pytest

from train import loop, tasks
from train.config import Config, ConfigError

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
