import json
import os
import signal
import time

import numpy as np
import pytest

from train import loop, loss_scale

STEPS = 20
ARMS = {
  'bf16-sr': {},
  'bf16-sr-sticky': {},
  'fp16': {'compute_dtype': 'float16'},  # so that there is a loss scaler
}


@pytest.fixture(scope='module', autouse=True)
def impatient():
  """Has the loss scaler grow within these runs, and overflow."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loss_scale, 'GROWTH_INTERVAL', 3)
    yield


@pytest.fixture(scope='module')
def whole(runner, tmp_path_factory):
  """Makes a run of 20 steps in one go, once for each arm."""
  made = {}

  def make(arm):
    if arm not in made:
      out = tmp_path_factory.mktemp(arm) / 'run'
      flags = dict(steps=STEPS, eval_every=7, arm=arm, **ARMS[arm])
      assert runner.main(out=out, **flags) == 0
      rewards = [record['reward_mean'] for record in runner.read(out)]
      assert len(set(rewards)) > 3  # there is something to learn from
      made[arm] = out
    return made[arm]

  return make


def assert_same_run(runner, got, want):
  """Everything a run leaves but times, memory and checkpoints."""
  assert runner.timeless(got) == runner.timeless(want)
  weights = 'model/model.safetensors'
  assert (got / weights).read_bytes() == (want / weights).read_bytes()
  summaries = [
    json.loads((path / 'summary.json').read_text()) for path in (got, want)
  ]
  for summary in summaries:
    del summary['seconds'], summary['peak_memory_gib']
  assert summaries[0] == summaries[1]


@pytest.mark.parametrize(
  'arm',
  [
    'bf16-sr',
    pytest.param('bf16-sr-sticky', marks=pytest.mark.slow),
    pytest.param('fp16', marks=pytest.mark.slow),
  ],
)
def test_7_steps_and_13_more_are_20_steps_bit_for_bit(
  runner, whole, tmp_path, capsys, arm
):
  out = tmp_path / 'run'
  flags = dict(eval_every=7, arm=arm, **ARMS[arm])
  assert runner.main(out=out, steps=7, **flags) == 0
  capsys.readouterr()
  assert runner.main(out=out, resume=True, steps=STEPS) == 0
  assert 'resumed after step 7' in capsys.readouterr().out
  assert_same_run(runner, out, whole(arm))
  if arm == 'fp16':
    scales = [record['loss_scale'] for record in runner.read(out)]
    assert scales[0] == 2.0**16 < scales[6] < max(scales)


def test_a_finished_run_is_resumed_to_itself(runner, whole):
  out = whole('bf16-sr')
  before = runner.read(out)
  assert runner.main(out=out, resume=True) == 0
  assert runner.read(out) == before


def wait_for_line(process, out, line):
  """Waits until a process has written so many lines of metrics."""
  file = out / 'metrics.jsonl'
  deadline = time.monotonic() + 120
  while not file.exists() or file.read_text().count('\n') < line:
    assert process.poll() is None, process.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.005)


def test_told_to_terminate_it_saves_a_checkpoint_and_can_go_on(
  runner, whole, tmp_path
):
  want, out = whole('bf16-sr'), tmp_path / 'run'
  process = runner.start(out=out, steps=STEPS, eval_every=7)
  wait_for_line(process, out, 2)
  process.send_signal(signal.SIGTERM)
  output, error = process.communicate(timeout=120)
  assert process.returncode == 128 + signal.SIGTERM == 143
  done = len(runner.read(out))
  assert 2 <= done < STEPS
  assert f'stopped after step {done}; its checkpoint is saved' in error
  assert f'python -m train --resume --out {out}' in error
  assert 'Traceback' not in error
  assert [p.name for p in (out / 'checkpoints').iterdir()] == [str(done)]
  assert not (out / 'model').exists()
  assert runner.main(out=out, resume=True) == 0
  assert_same_run(runner, out, want)


@pytest.mark.parametrize('kills', [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_in_the_same_metrics(
  runner, whole, tmp_path, kills
):
  want, out = whole('bf16-sr'), tmp_path / 'run'
  rng = np.random.default_rng()
  for kill in range(kills):
    flags = dict(steps=STEPS, eval_every=7, checkpoint_every=1 + kills % 2)
    process = runner.start(out=out, resume=kill > 0, **flags)
    # Lines that no checkpoint covers go when the run starts again.
    file = out / 'metrics.jsonl'
    lines = file.read_text().count('\n') if kill else 0
    wait_for_line(process, out, min(lines + 1, STEPS - 1))
    time.sleep(rng.uniform(0, 0.2))
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
  assert runner.main(out=out, resume=True) == 0
  assert_same_run(runner, out, want)


def test_killed_before_its_first_checkpoint_it_starts_again(
  runner, whole, tmp_path
):
  want, out = whole('bf16-sr'), tmp_path / 'run'

  class Killed(BaseException):
    pass

  def kill(self, step):
    raise Killed

  with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
    patch.setattr(loop.Trainer, 'step', kill)
    runner.main(out=out, steps=STEPS, eval_every=7)
  assert runner.main(out=out, resume=True) == 0
  assert_same_run(runner, out, want)


def interrupt(times, monkeypatch):
  """Has SIGINT come so many times during the second step."""
  step = loop.Trainer.step

  def interrupted(self, done):
    record = step(self, done)
    for _ in range(times * (done == 1)):
      signal.raise_signal(signal.SIGINT)
    return record

  monkeypatch.setattr(loop.Trainer, 'step', interrupted)


def test_interrupted_once_it_ends_after_the_step(
  runner, tmp_path, monkeypatch, capsys
):
  interrupt(1, monkeypatch)
  before, out = signal.getsignal(signal.SIGINT), tmp_path / 'run'
  assert runner.main(out=out) == 128 + signal.SIGINT == 130
  error = capsys.readouterr().err
  assert 'interrupt again to stop at once' in error
  assert 'stopped after step 2; its checkpoint is saved' in error
  assert [record['step'] for record in runner.read(out)] == [1, 2]
  assert os.listdir(out / 'checkpoints') == ['2']
  assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_twice_it_stops_at_once(
  runner, tmp_path, monkeypatch, capsys
):
  interrupt(2, monkeypatch)
  out = tmp_path / 'run'
  assert runner.main(out=out, checkpoint_every=1) == 130
  assert 'nothing was saved of this step' in capsys.readouterr().err
  assert [record['step'] for record in runner.read(out)] == [1]
  assert os.listdir(out / 'checkpoints') == ['1']
