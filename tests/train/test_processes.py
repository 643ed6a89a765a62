"""Several processes on the loopback address as one run."""

import signal
import socket
import time

import jax
import numpy as np
import pytest

from train import loop, pretrained, sharding

FLAGS = dict(prompts=4, group=4, steps=2, eval_samples=4)
MESH = 'data=2,fsdp=2,tensor=2'
SECONDS = 240  # until a process is given up: cores may be busy


@pytest.fixture
def model(make_folder):
  return make_folder(width=16, kv_heads=4, layers=1, vocab_size=32)


@pytest.fixture
def start(runner, model):
  """Starts processes that share the eight devices; none outlives the test."""
  started = []

  def run(count, last=None, **changes):
    """`last`: flags of the last one alone."""
    with socket.socket() as probe:
      probe.bind(('127.0.0.1', 0))
      port = probe.getsockname()[1]
    new = []
    for i in range(count):
      flags = FLAGS | dict(model=model, mesh=MESH) | changes
      if flags.get('resume'):
        flags = changes
      if i == count - 1:
        flags = flags | (last or {})
      new.append(
        runner.start(
          '--distributed',
          devices=8 // count,
          coordinator_address=f'127.0.0.1:{port}',
          num_processes=count,
          process_id=i,
          **flags,
        )
      )
    started.extend(new)
    return new

  yield run
  for process in started:
    process.kill()
    process.wait()


def ended(processes):
  """The exit status and the output of each."""
  outputs = [process.communicate(timeout=SECONDS) for process in processes]
  return [p.returncode for p in processes], outputs


def first_step(out, processes):
  """Waits for the first line of metrics."""
  until = time.monotonic() + SECONDS
  file = out / 'metrics.jsonl'
  while not (file.exists() and file.read_text()):
    assert all(p.poll() is None for p in processes), ended(processes)
    assert time.monotonic() < until
    time.sleep(0.05)


def assert_close(got, want):
  assert len(got) == len(want)
  for a, b in zip(got, want, strict=True):
    assert a.keys() == b.keys()
    for name in ('loss', 'grad_norm', 'entropy', 'reward_mean', 'kl_exact'):
      assert a[name] == pytest.approx(b[name], rel=1e-4, abs=1e-5), name
    for name in ('sampled_tokens', 'completion_tokens', 'reward_failures'):
      assert a[name] == b[name]


def test_two_processes_are_one_run_and_four_resume_it(
  runner, model, start, tmp_path, monkeypatch
):
  status, outputs = ended(start(2, out=tmp_path / 'two'))
  assert status == [0, 0], outputs
  assert 'Held-out reward' in outputs[0][0]
  assert 'reward' not in outputs[1][0]  # one process speaks
  monkeypatch.setattr(sharding, 'all_devices', jax.devices)
  flags = FLAGS | dict(model=str(model), mesh=MESH)
  loop.run(runner.config(**flags | dict(out=tmp_path / 'one', steps=3)))
  one, two = (
    runner.timeless(tmp_path / 'one'),
    runner.timeless(tmp_path / 'two'),
  )
  assert_close(
    [{k: v for k, v in r.items() if k[:5] != 'eval_'} for r in two],
    [{k: v for k, v in r.items() if k[:5] != 'eval_'} for r in one[:2]],
  )
  status, outputs = ended(
    start(4, out=tmp_path / 'two', resume=True, steps=3, mesh='fsdp=8')
  )
  assert status == [0, 0, 0, 0], outputs
  assert 'resumed after step 2' in outputs[0][0]
  assert_close(runner.timeless(tmp_path / 'two')[2:], one[2:])
  # Visible weights may differ by a rounding where the sums differ.
  saved = [
    pretrained.load_huggingface(tmp_path / name / 'model').read()['embed']
    for name in ('one', 'two')
  ]
  same = np.mean(saved[0] == saved[1])
  assert same > 0.9
  np.testing.assert_allclose(*map(np.float32, saved), rtol=2**-7, atol=1e-2)


def test_a_signal_to_one_stops_all_with_a_checkpoint(start, tmp_path):
  out = tmp_path / 'run'
  running = start(2, out=out, steps=100_000)
  first_step(out, running)
  running[1].send_signal(signal.SIGTERM)
  status, outputs = ended(running)
  assert status == [128 + signal.SIGTERM] * 2, outputs
  assert [p.name.isdigit() for p in (out / 'checkpoints').iterdir()] == [True]


@pytest.mark.parametrize('killed', [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_process_that_dies_ends_the_others(start, tmp_path, killed):
  out = tmp_path / 'run'
  running = start(2, out=out, steps=100_000)
  first_step(out, running)
  running[killed].kill()
  status, outputs = ended(running)
  assert status[killed] == -signal.SIGKILL
  assert status[1 - killed] != 0
  assert outputs[1 - killed][1]  # says something


@pytest.mark.parametrize(
  'flags, message',
  [
    (dict(mesh='data=7'), 'does not multiply to the 8 devices'),
    (dict(mesh='tensor=8'), 'not divisible by tensor=8'),
    (dict(prompts=1, eval_samples=0, mesh='data=8'), 'cannot be spread evenly'),
  ],
)
def test_what_cannot_run_is_refused_by_every_process(
  start, tmp_path, flags, message
):
  status, outputs = ended(start(2, out=tmp_path / 'run', **flags))
  assert status == [2, 2], outputs
  assert all(message in errors for _, errors in outputs)
  assert not (tmp_path / 'run').exists()


DIFFER = 'the processes differ in: lr, seed'
FAILED = 'process 1 has failed; it says why'


@pytest.mark.parametrize(
  'last, message, elsewhere',
  [
    (dict(seed=3, lr=0.5), DIFFER, DIFFER),
    (dict(mesh='data=5'), 'does not multiply to the 8 devices', FAILED),
    (dict(model='/nowhere/x'), '/nowhere/x is not a directory', FAILED),
  ],
)
def test_what_is_wrong_with_one_process_ends_all(
  start, tmp_path, last, message, elsewhere
):
  out = tmp_path / 'run'
  status, outputs = ended(start(2, out=out, last=last))
  assert status == [2, 2], outputs
  assert elsewhere in outputs[0][1] and message in outputs[1][1]
  assert not out.exists()


@pytest.mark.slow
def test_a_run_folder_that_only_one_process_sees_is_noticed(start, tmp_path):
  last = dict(out=tmp_path / 'elsewhere')
  status, outputs = ended(start(2, out=tmp_path / 'run', last=last))
  assert status == [2, 2], outputs
  assert 'is not on a file system that all processes see' in outputs[1][1]
  assert 'process 1 has failed' in outputs[0][1]


CRASH = """
import multiprocessing, sys

def reward(*texts):
  return 0.0

if multiprocessing.parent_process() is None and '--process-id=1' in sys.argv:
  from train import trainer

  def step(self, step):
    raise RuntimeError('out of memory, say')

  trainer.Trainer.step = step
"""


@pytest.mark.slow
def test_an_error_that_nobody_expects_ends_all(start, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'crash.py').write_text(CRASH)
  rows = [f'{{"question": "{i}+1=", "answer": "{i + 1}"}}' for i in range(40)]
  (tmp_path / 'sums.jsonl').write_text('\n'.join(rows))
  own = dict(task='sums.jsonl', template='{question}', reward='crash:reward')
  running = start(
    2, out='run', steps=9, eval_samples=0, eval_questions=4, **own
  )
  status, outputs = ended(running)
  assert 'RuntimeError: out of memory, say' in outputs[1][1]
  assert 'error: process 1 of 2 gives up' in outputs[1][1]
  assert status[1] == 1 and status[0] not in (0, None)
