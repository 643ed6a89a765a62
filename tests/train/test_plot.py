import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from train import plot
from train.config import Config
from train.run_folder import RunFolder

REWARDS = (0.1, 0.3, 0.2, 0.4, 0.5, 0.7)


def write(path, steps=6, summary=True, **changes):
  """A run folder as a run leaves it; without KL at every other step."""
  config = dataclasses.replace(Config(), out=path, **changes)
  folder = RunFolder(path)
  folder.create(config, best_constant_share=0.25)
  for i in range(steps):
    kl = 0.1 * i if i % 2 == 0 else None
    record = {'step': i + 1, 'reward_mean': REWARDS[i], 'kl_exact': kl}
    record |= {'changed_fraction': 0.01, 'mismatch_k3': 1e-6}
    record |= {'displacement_slope': float('nan') if i == 0 else 0.9}
    if i == steps - 1:
      record |= {'eval_reward': 0.6, 'eval_standard_error': 0.05}
    folder.append_metrics(record)
  if summary:
    folder.write_summary(
      {'eval_before': 0.2, 'eval_before_standard_error': 0.03}
    )
  return path


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
  monkeypatch.chdir(tmp_path)

  def run(*arguments):
    monkeypatch.setattr(sys, 'argv', ['plot', *map(str, arguments)])
    try:
      status = plot.main()
    except SystemExit as stop:
      status = stop.code
    return status, capsys.readouterr()

  return run


def test_two_runs_are_drawn_into_one_picture(command, tmp_path):
  runs = [
    write(tmp_path / 'a', arm='bf16'),
    # One that goes on, and is shorter than the moving average.
    write(tmp_path / 'b', steps=2, summary=False, seed=3),
  ]
  for arguments, file in (
    (runs, 'runs.png'),
    ([runs[0], '--out', 'one.png'], 'one.png'),
  ):
    status, (output, error) = command(*arguments)
    assert (status, output, error) == (0, f'{file}\n', '')
    picture = image.imread(file)
    height, width, _ = picture.shape
    assert width > height > 500
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 9


def test_series_leave_out_steps_without_a_number(tmp_path):
  run = plot._Run(write(tmp_path / 'a'))
  np.testing.assert_allclose(
    run.series('step', 'kl_exact'), [[1, 3, 5], [0, 0.2, 0.4]]
  )
  np.testing.assert_array_equal(
    run.series('step', 'displacement_slope')[0], [2, 3, 4, 5, 6]
  )
  assert run.series('step', 'no_such_metric').shape == (2, 0)


def test_held_out_rewards_begin_before_the_first_step(tmp_path):
  run = plot._Run(write(tmp_path / 'a'))
  np.testing.assert_array_equal(
    run.held_out(), [[0, 6], [0.2, 0.6], [0.03, 0.05]]
  )
  going_on = plot._Run(write(tmp_path / 'b', summary=False))
  np.testing.assert_array_equal(going_on.held_out(), [[6], [0.6], [0.05]])


def test_a_label_says_what_sets_a_run_apart(tmp_path):
  a, b = (
    plot._Run(write(tmp_path / name, arm=name, lr=lr))
    for name, lr in (('bf16', 1e-6), ('bf16-sr', 2e-6))
  )
  assert a.label([a]) == 'bf16'
  assert b.label([a, b]) == 'bf16-sr, lr 2e-06'


def test_what_is_no_run_is_refused(command, tmp_path):
  good = write(tmp_path / 'good')
  (tmp_path / 'empty').mkdir()
  write(tmp_path / 'new', steps=0)
  corrupt = write(tmp_path / 'corrupt')
  (corrupt / 'metrics.jsonl').write_text('{"step": 1\n')
  for arguments, message in (
    (['missing'], 'missing is no run folder'),
    (['empty'], 'empty is no run folder'),
    ([good, 'empty'], 'empty is no run folder'),
    (['new'], 'new holds no steps yet'),
    (['corrupt'], 'metrics.jsonl is corrupt'),
    ([good, '--out', 'no/folder.png'], 'No such file or directory'),
    ([good, '--out', 'runs.docx'], "Format 'docx' is not supported"),
    ([], 'expected at least one run folder'),
  ):
    status, (_, error) = command(*arguments)
    assert status == 2, arguments
    assert message in error
    assert 'Traceback' not in error
    assert not Path('runs.png').exists()
