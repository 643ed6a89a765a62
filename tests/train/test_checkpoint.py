import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from train import __main__, loss_scale
from train.checkpoint import IDENTITY, CheckpointError, Checkpoints

pytestmark = pytest.mark.filterwarnings(  # of coroutines that Orbax drops
  'ignore::pytest.PytestUnraisableExceptionWarning'
)

OURS = dict.fromkeys(IDENTITY, 'ours')


def state(seed=0, size=1009):
  rng = np.random.default_rng(seed)
  bits = rng.integers(0, 2**16, size).astype(np.uint16)  # NaNs among them
  return {
    'params': [jnp.asarray(bits.view(jnp.bfloat16))],
    'opt_state': (
      jnp.asarray(rng.normal(size=(7, 11)), jnp.float32),
      jnp.uint32([seed, 2**32 - 1]),
      jnp.int32(seed),
    ),
    'scaler': loss_scale.init(2.0**seed),
  }


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def contents(path):
  return {
    file.relative_to(path): file.read_bytes()
    for file in path.rglob('*')
    if file.is_file()
  }


def test_what_is_restored_is_what_was_saved_bit_for_bit(tmp_path):
  saved = state(3)
  Checkpoints(tmp_path, keep=2).save(5, saved, OURS)
  step, restored = Checkpoints(tmp_path, keep=2).restore(state(4), OURS)
  assert step == 5
  assert_same(restored, saved)


def test_the_last_few_are_kept_and_the_last_one_is_read(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=2)
  assert checkpoints.latest_step() is None
  for step in (1, 2, 9, 10):
    checkpoints.save(step, state(step), OURS)
  names = {path.name for path in (tmp_path / 'checkpoints').iterdir()}
  assert names == {'9', '10'}
  step, restored = checkpoints.restore(state(), OURS)
  assert step == checkpoints.latest_step() == 10
  assert_same(restored, state(10))


def test_saving_again_and_again_leaves_nothing_in_memory(tmp_path):
  statm = pathlib.Path('/proc/self/statm')
  if not statm.exists():
    pytest.skip('needs /proc')
  checkpoints, saved = Checkpoints(tmp_path, keep=2), state(size=2**22)
  held, arrays = [], []
  for step in range(1, 16):
    checkpoints.save(step, saved, OURS)
    pages = int(statm.read_text().split()[1])
    held.append(pages * os.sysconf('SC_PAGE_SIZE'))
    arrays.append(len(jax.live_arrays()))
  assert len(set(arrays)) == 1
  # A copy kept of each of the last ten states of 8 MiB would be 80 MiB.
  assert held[-1] - held[4] < 3 * 2**23


def test_a_half_written_checkpoint_is_ignored(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=3)
  checkpoints.save(1, state(1), OURS)
  folder = tmp_path / 'checkpoints'
  # As Orbax leaves it when it is killed.
  shutil.copytree(folder / '1', folder / '2.orbax-checkpoint-tmp')
  for path in (folder / '2.orbax-checkpoint-tmp').rglob('_*METADATA'):
    path.unlink()
  checkpoints = Checkpoints(tmp_path, keep=3)
  step, restored = checkpoints.restore(state(), OURS)
  assert step == 1
  assert_same(restored, state(1))
  checkpoints.save(2, state(2), OURS)
  assert checkpoints.restore(state(), OURS)[0] == 2


@pytest.mark.parametrize('name', IDENTITY)
def test_a_checkpoint_of_another_run_is_refused(tmp_path_factory, name):
  folder = tmp_path_factory.getbasetemp() / 'foreign'
  checkpoints = Checkpoints(folder, keep=1)
  checkpoints.save(1, state(), OURS)
  message = f"is of another run: {name} is 'theirs', the checkpoint has 'ours'$"
  with pytest.raises(CheckpointError, match=message):
    checkpoints.restore(state(), OURS | {name: 'theirs'})


def test_weights_of_another_shape_or_name_are_refused(tmp_path):
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(1, state(), OURS)
  more = state() | {'more': jnp.float32(1)}
  for other in (state(size=1013), more):
    with pytest.raises(CheckpointError, match='step 1 in .* cannot be read'):
      checkpoints.restore(other, OURS)


def test_with_a_truncated_file_it_is_refused_or_whole(tmp_path):
  # Some files hold nothing that is needed; none may be read as other bits.
  saved, folder = state(3, size=100_003), tmp_path / 'checkpoints'
  Checkpoints(tmp_path, keep=1).save(1, saved, OURS)
  refused = []
  for name, data in contents(folder).items():
    (folder / name).write_bytes(data[: len(data) // 2])
    try:
      _, restored = Checkpoints(tmp_path, keep=1).restore(state(), OURS)
      assert_same(restored, saved)
    except CheckpointError as error:
      assert 'the checkpoint of step 1' in str(error)
      refused.append(len(data))
    (folder / name).write_bytes(data)
  assert max(refused) > 100_000 and len(refused) >= 3


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path):
  with pytest.raises(CheckpointError, match='no complete checkpoint'):
    Checkpoints(tmp_path, keep=1).restore(state(), OURS)
  assert list(tmp_path.iterdir()) == []


# From here on whole runs, of one step.


@pytest.fixture(scope='module')
def finished(runner, tmp_path_factory):
  """A run of one step, to be copied."""
  out = tmp_path_factory.mktemp('finished') / 'run'
  assert runner.main(out=out, steps=1) == 0
  return out


@pytest.fixture
def copied(finished, tmp_path):
  return shutil.copytree(finished, tmp_path / 'run')


def refused(runner, capsys, message, out, **flags):
  """Asserts one clear message, status 2, and nothing changed."""
  before = contents(out) if out.exists() else None
  capsys.readouterr()
  assert runner.main(resume=True, out=out, **flags) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and message in error
  assert 'Traceback' not in error
  assert (contents(out) if out.exists() else None) == before
  return error


def test_there_must_be_a_run_to_resume(runner, tmp_path, capsys):
  empty = tmp_path / 'empty'
  empty.mkdir()
  message = 'is no run folder: [Errno 2] No such file or directory'
  refused(runner, capsys, message, empty)
  refused(runner, capsys, message, tmp_path / 'missing')
  # A folder of weights has a config.json, too.
  weights = shutil.copytree(runner.model, tmp_path / 'weights')
  refused(runner, capsys, 'its config.json is not a run', weights)
  (empty / 'config.json').write_text('{"arm": "bf16')
  refused(runner, capsys, 'is no run folder: Unterminated string', empty)


def test_it_must_be_named(monkeypatch, capsys):
  monkeypatch.setattr('sys.argv', ['train', '--resume'])
  with pytest.raises(SystemExit) as stop:
    __main__.main()
  assert stop.value.code == 2
  assert 'name the run folder with --out' in capsys.readouterr().err


@pytest.mark.parametrize('part', ['state', 'identity'])
def test_a_truncated_checkpoint_is_refused(runner, copied, capsys, part):
  for file in (copied / 'checkpoints' / '1' / part).rglob('*'):
    if file.is_file():
      file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
  refused(runner, capsys, 'the checkpoint of step 1', copied)


def test_a_flipped_bit_is_noticed(tmp_path):
  tree = {'w': jnp.arange(2**16, dtype=jnp.float32)}
  identity = dict.fromkeys(IDENTITY, 1)
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(1, tree, identity)
  step, same = checkpoints.restore(tree, identity)
  assert step == 1 and np.array_equal(same['w'], tree['w'])
  files = (tmp_path / 'checkpoints' / '1' / 'state').rglob('*')
  numbers = max(files, key=lambda file: file.stat().st_size)
  content = bytearray(numbers.read_bytes())
  content[len(content) // 2] ^= 1
  numbers.write_bytes(content)
  with pytest.raises(CheckpointError, match='its values are not as saved'):
    checkpoints.restore(tree, identity)


def test_a_broken_checkpoint_names_the_one_before(runner, copied, capsys):
  broken = copied / 'checkpoints' / '2'
  broken.mkdir()
  message = f'Without the folder {broken.resolve()} the run goes on from step 1'
  refused(runner, capsys, message, copied)


@pytest.mark.parametrize(
  'name, content',
  [
    ('evaluation_before.json', '[0.1'),
    ('evaluation_before.json', '[0.1]'),
    ('evaluation_before.json', '{}'),
    ('metrics.jsonl', '{"a": 1}\n'),
    ('metrics.jsonl', '[]\n'),
    ('completions.jsonl', '{"step": \n'),
  ],
)
def test_a_damaged_file_is_named(runner, copied, capsys, name, content):
  (copied / name).write_text(content)
  assert runner.main(resume=True, out=copied) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ') and name in error
  assert 'is damaged' in error or 'is corrupt' in error


def test_damaged_settings_are_refused(runner, copied, capsys):
  file = copied / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | {'prompts': 'x'}))
  refused(runner, capsys, 'config.json is damaged', copied)


def test_a_run_of_several_processes_is_resumed_by_one(runner, copied):
  file = copied / 'config.json'
  several = dict(
    distributed=True,
    coordinator_address='10.0.0.1:1234',
    num_processes=2,
    process_id=0,
  )
  file.write_text(json.dumps(json.loads(file.read_text()) | several))
  assert runner.main(resume=True, out=copied) == 0


def test_a_run_with_other_settings_is_refused_with_all_the_reasons(
  runner, copied, capsys
):
  error = refused(
    runner, capsys, 'is of another run', copied, lr=2e-3, seed=8, arm='bf16'
  )
  assert 'lr is 0.002, the checkpoint has 0.001' in error
  assert 'seed is 8, the checkpoint has 7' in error
  assert "arm is 'bf16', the checkpoint has 'bf16-sr'" in error
  assert 'temperature' not in error
  # The gain is paired by question.
  message = 'eval_questions is 31, the checkpoint has 29'
  refused(runner, capsys, message, copied, eval_questions=31)


def test_other_questions_are_refused(
  runner, copied, capsys, monkeypatch, more_questions
):
  monkeypatch.setattr('train.tasks.load_task', more_questions)
  refused(runner, capsys, 'task_fingerprint is', copied)


def test_metrics_that_are_corrupt_or_lack_steps_are_refused(
  runner, copied, capsys
):
  (copied / 'metrics.jsonl').write_text('{"step": 1\n')
  assert runner.main(resume=True, out=copied) == 2
  assert 'metrics.jsonl is corrupt' in capsys.readouterr().err
  (copied / 'metrics.jsonl').write_text('')
  assert runner.main(resume=True, out=copied) == 2
  assert 'metrics.jsonl lacks steps before 1' in capsys.readouterr().err


def test_other_versions_are_warned_of(runner, copied):
  file = copied / 'config.json'
  config = json.loads(file.read_text())
  config['versions'] |= {'jax': '0.1.2'}
  file.write_text(json.dumps(config))
  with pytest.warns(UserWarning, match='bits may differ: jax 0.1.2 -> ') as all:
    assert runner.main(resume=True, out=copied) == 0
  assert len([w for w in all if 'versions' in str(w.message)]) == 1
  assert json.loads(file.read_text())['versions']['jax'] == jax.__version__


def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_before(
  runner, copied, tmp_path, monkeypatch, capsys
):
  save = ocp.CheckpointManager.save

  def full(self, step, *args, **kwargs):
    if step > 1:
      raise OSError(28, 'No space left on device')
    return save(self, step, *args, **kwargs)

  kept = contents(copied / 'checkpoints')
  with monkeypatch.context() as patch:
    patch.setattr(ocp.CheckpointManager, 'save', full)
    flags = dict(steps=3, checkpoint_every=1)
    assert runner.main(resume=True, out=copied, **flags) == 2
  error = capsys.readouterr().err
  assert 'error: the checkpoint of step 2 could not be written' in error
  assert 'No space left on device' in error
  assert 'the last complete checkpoint: step 1 is intact' in error
  assert contents(copied / 'checkpoints') == kept
  assert runner.main(resume=True, out=copied) == 0
  assert [record['step'] for record in runner.read(copied)] == [1, 2, 3]
