"""The forecast, against RN stepped by brute force, and its command line."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import sr_optax
from sr_optax import __main__ as command

BF16, FP16 = jnp.bfloat16, jnp.float16
DTYPES = {'bfloat16': BF16, 'float16': FP16}


def steps_by_brute_force(weights, lr, dtype, limit):
  """Steps of size lr until RN shows a change, in the faster direction."""
  q = jnp.asarray(weights).astype(jnp.float32).astype(dtype)
  link = sr_optax.nearest_rounding(dtype=dtype)

  @jax.jit
  def count(step):
    def body(carry, k):
      p, state, found = carry
      updates, state = link.update(jnp.full(p.shape, step), state, p)
      p = optax.apply_updates(p, updates)
      return (p, state, jnp.where((found == 0) & (p != q), k, found)), None

    start = (q, link.init(q), jnp.zeros(q.shape, jnp.int32))
    carry, _ = jax.lax.scan(body, start, 1 + jnp.arange(limit))
    return carry[2]

  up, down = (np.asarray(count(jnp.float32(sign * lr))) for sign in (1, -1))
  up, down = (np.where(n == 0, np.inf, n) for n in (up, down))
  return np.minimum(up, down)


@pytest.mark.parametrize('name', DTYPES)
@pytest.mark.parametrize('lr', [1e-6, 2.0**-17, 1e-3])
def test_shares_and_steps_equal_stepping_by_brute_force(name, lr):
  rng = np.random.default_rng(0)
  weights = np.concatenate(
    [
      rng.normal(0, 0.02, 501),
      rng.lognormal(-3, 2, 301),
      2.0 ** np.arange(-14, 6),  # binade edges
      [0.0, 1.0, -1.0],
    ]
  ).astype(np.float32)
  got = sr_optax.forecast_sticking({'w': weights}, lr, betas=(0.9, 0.95))
  got = getattr(got.leaves['w'], name)
  steps = steps_by_brute_force(weights, lr, DTYPES[name], 200)
  largest = steps_by_brute_force(
    weights, lr * math.sqrt(0.1 / 0.05), DTYPES[name], 1
  )
  assert got.steady == (steps == 1).mean()
  assert got.movable == (largest == 1).mean()
  ranked = np.sort(steps)  # half of 824 weights: the 412th
  assert got.steps_to_half == ranked[(steps.size + 1) // 2 - 1]


def half_distance(value, dtype):
  """Distance to the midpoint towards the neighbour nearer to 0."""
  code = np.array(value, dtype).view(np.uint16)
  below = (code - np.uint16(1)).view(dtype).astype(np.float64)
  return (value - below) / 2


@pytest.mark.parametrize(
  'value, name, half',
  [
    # At a binade edge the neighbour towards 0 is at half the distance.
    (1.0, 'bfloat16', 2.0**-9),
    (1.0, 'float16', 2.0**-12),
    (1.5, 'bfloat16', 2.0**-8),
    (1.5, 'float16', 2.0**-11),
    # FP16 subnormals are 2^-24 apart.
    (3 * 2.0**-24, 'float16', 2.0**-25),
  ],
)
def test_a_weight_moves_from_half_the_distance_on(value, name, half):
  dtype = ml_dtypes.bfloat16 if name == 'bfloat16' else np.float16
  assert half_distance(value, dtype) == half
  odd = int(np.array(value, dtype).view(np.uint16)) % 2 == 1
  for lr, moves in ((half * 0.99, 0), (half * 1.01, 1), (half, odd)):
    # b1 = b2: the largest step is the steady one; a tie goes to even.
    got = sr_optax.forecast_sticking(
      {'w': jnp.full(3, value)}, lr, betas=(0.9, 0.9), eps=0
    )
    assert getattr(got.total, name).movable == moves
    assert getattr(got.total, name).steady == moves


def test_a_zero_moves_from_half_the_smallest_subnormal_on():
  zero = {'w': jnp.zeros(5, FP16)}
  got = sr_optax.forecast_sticking(zero, 1e-9).total
  assert got.bfloat16.steady == 1
  assert got.float16.steady == 0
  assert got.float16.steps_to_half == math.ceil(2**-25 / 1e-9)


def test_sums_and_medians_run_over_all_leaves():
  params = {
    'a': jnp.full((3, 5), 1.5, BF16),  # 15 weights: 2^-8 / 2^-10 = 4 steps
    'b': [jnp.full(7, 0.375, jnp.float32)],  # 7 weights: 1 step
    'count': jnp.arange(3),
  }
  # Both values are even, so that they leave one step beyond the midpoint.
  got = sr_optax.forecast_sticking(params, 1.01 * 2**-10, eps=0)
  assert list(got.leaves) == ['a', 'b/0']
  assert [leaf.count for leaf in got.leaves.values()] == [15, 7]
  assert got.leaves['a'].bfloat16.steps_to_half == 4
  assert got.leaves['b/0'].bfloat16.steps_to_half == 1
  assert got.total.count == 22
  assert got.total.bfloat16.steps_to_half == 4  # the 11th of 22
  assert got.total.bfloat16.steady == 7 / 22
  assert got.total.bfloat16.movable == 1  # a step of 10 lr


def test_steps_that_an_fp32_shadow_loses_never_end():
  # FP32 is 2^-18 apart at 64: half of that is more than 1e-6.
  got = sr_optax.forecast_sticking({'w': jnp.full(3, 64.0)}, 1e-6)
  assert got.total.bfloat16.steps_to_half == math.inf


def test_values_beyond_fp16_saturate_and_non_finite_ones_never_move():
  weights = jnp.array([1e6, jnp.nan, jnp.inf], jnp.float32)
  got = sr_optax.forecast_sticking({'w': weights}, 17.0, betas=(0.9, 0.9))
  # 65504 is 32 above its neighbour.
  assert got.total.float16.steady == pytest.approx(1 / 3)
  assert got.total.bfloat16.steady == 0
  assert got.total.bfloat16.steps_to_half == math.inf


def test_largest_adam_steps_stay_within_the_bound():
  tx = optax.scale_by_adam(b1=0.9, b2=0.999, eps=0)
  params = {'w': jnp.zeros(1)}
  state, largest = tx.init(params), 0
  for k in range(120):  # gradients that grow by b2 / b1: the worst case
    g = {'w': jnp.full(1, (0.999 / 0.9) ** k * 1e-3)}
    updates, state = tx.update(g, state)
    largest = max(largest, float(updates['w'][0]))
  got = sr_optax.forecast_sticking(params, 1.0, eps=0)
  assert got.largest_step == pytest.approx(10)
  # Late in training (no bias correction left) the ratio tends to 7.27.
  assert 1 < largest <= got.largest_step


def test_eps_shrinks_a_step_beside_small_gradients():
  params = {'w': jnp.ones(3)}
  got = sr_optax.forecast_sticking(params, 1.0, eps=1e-8, gradient_rms=3e-8)
  assert got.steady_step == pytest.approx(0.75)
  got = sr_optax.forecast_sticking(params, 1.0)
  assert got.steady_step == pytest.approx(1)


def test_leaves_are_taken_in_chunks(monkeypatch):
  from sr_optax import forecast

  weights = np.random.default_rng(2).normal(0, 1, (11, 13)).astype(np.float32)
  whole = sr_optax.forecast_sticking({'w': weights}, 1e-3)
  monkeypatch.setattr(forecast, '_CHUNK', 17)
  assert sr_optax.forecast_sticking({'w': weights}, 1e-3) == whole


def test_a_leaf_of_size_zero_forecasts_nothing():
  got = sr_optax.forecast_sticking({'w': jnp.zeros((0, 3))}, 1e-6).total
  assert got.count == got.bfloat16.movable == 0
  assert math.isnan(got.bfloat16.steps_to_half)


@pytest.mark.parametrize(
  'options, message',
  [
    (dict(learning_rate=0.0), 'learning_rate'),
    (dict(learning_rate=math.nan), 'learning_rate'),
    (dict(learning_rate=1.0, betas=(0.9, 0.8)), 'betas'),
    (dict(learning_rate=1.0, betas=(0.9, 1.0)), 'betas'),
    (dict(learning_rate=1.0, eps=-1.0), 'eps'),
    (dict(learning_rate=1.0, gradient_rms=0.0), 'gradient_rms'),
  ],
)
def test_options_out_of_range_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    sr_optax.forecast_sticking({'w': jnp.ones(3)}, **options)


def test_trees_without_weights_are_refused():
  with pytest.raises(TypeError, match='float leaf'):
    sr_optax.forecast_sticking({'w': jnp.arange(3)}, 1e-6)


# The command line.


@pytest.fixture
def checkpoint(tmp_path):
  numpy = pytest.importorskip('safetensors.numpy')
  rng = np.random.default_rng(0)
  tensors = {
    'embed': rng.normal(0, 0.02, (31, 17)).astype(ml_dtypes.bfloat16),
    'norm': np.ones(17, np.float32),
    'ids': np.arange(5),
  }
  numpy.save_file(tensors, tmp_path / 'model-1.safetensors')
  numpy.save_file(
    {'head': rng.normal(0, 1, (7, 3)).astype(np.float16)},
    tmp_path / 'model-2.safetensors',
  )
  return tmp_path


def test_a_folder_prints_one_aligned_row_a_tensor(checkpoint, capsys):
  assert command.main([str(checkpoint), '--lr', '1e-6']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].startswith('Adam at lr 1e-06: steady step 1e-06')
  names = [line.split()[0] for line in lines[2:]]
  assert names == ['leaf', 'head', 'norm', 'embed', 'all']
  assert len({len(line) for line in lines[2:]}) == 1
  # From 1.0 down to the midpoint 1 - 2^-9; there 1e-6 is 17 ulps of an FP32
  # shadow, 2^-24 each: 2^15 / 17 = 1927.5 steps.
  norm = lines[4].split()
  assert norm[1:5] == ['17', '0.00%', '0.00%', '1,928']
  assert lines[-1].split()[1] == str(31 * 17 + 17 + 21)


def test_one_file_and_the_top_leaves(checkpoint, capsys):
  file = str(checkpoint / 'model-1.safetensors')
  assert command.main([file, '--lr', '1e-6', '--top', '1']) == 0
  lines = capsys.readouterr().out.splitlines()
  assert [line.split()[0] for line in lines[3:]] == ['norm', '(1', 'all']


def test_the_command_runs_as_a_module(checkpoint):
  run = subprocess.run(
    [sys.executable, '-m', 'sr_optax', str(checkpoint), '--lr', '1e-6'],
    capture_output=True,
    text=True,
  )
  assert run.returncode == 0, run.stderr
  assert 'embed' in run.stdout and not run.stderr


def fails(capsys, *arguments):
  assert command.main([str(a) for a in arguments]) == 2
  captured = capsys.readouterr()
  assert not captured.out
  return captured.err


def test_bad_files_are_errors_on_stderr_with_status_2(checkpoint, capsys):
  assert 'no such file' in fails(capsys, checkpoint / 'x', '--lr', '1e-6')
  corrupt = checkpoint / 'corrupt.safetensors'
  corrupt.write_bytes(b'no header here')
  message = fails(capsys, corrupt, '--lr', '1e-6')
  assert 'corrupt.safetensors: cannot be read' in message
  empty = checkpoint / 'folder'
  empty.mkdir()
  assert 'no .safetensors file' in fails(capsys, empty, '--lr', '1e-6')
  from safetensors.numpy import save_file

  save_file({'ids': np.arange(3)}, empty / 'ids.safetensors')
  assert 'expected float tensors' in fails(capsys, empty, '--lr', '1e-6')


def test_bad_options_are_errors_with_status_2(checkpoint, capsys):
  for lr in ('0', '-1e-6', 'nan'):
    assert 'learning_rate' in fails(capsys, checkpoint, f'--lr={lr}')
  for arguments in ([], [str(checkpoint)], [str(checkpoint), '--lr', 'x']):
    with pytest.raises(SystemExit) as error:
      command.main(arguments)
    assert error.value.code == 2


def test_a_missing_package_says_how_to_install_it(
  tmp_path, capsys, monkeypatch
):
  monkeypatch.setitem(sys.modules, 'safetensors', None)
  message = fails(capsys, tmp_path, '--lr', '1e-6')
  assert "pip install 'sr-optax[forecast]'" in message
