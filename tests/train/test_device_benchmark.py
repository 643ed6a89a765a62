"""The device check itself: whole in a small setting, and that it sees faults.

No time is asserted: what the figures are is the device's affair.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.device import __main__ as device
from benchmarks.device import optimizer_checks, reference
from benchmarks.device.results import Failed
from sr_optax import link, noise, residual, rounding

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures('quick_compile')
TIMED = (
  'memory_bandwidth',
  'optimizer_nearest',
  'optimizer_fresh',
  'optimizer_sticky',
  'optimizer_residual16',
  'rollout',
  'train_step',
)


def run(path, *flags):
  """The command in this process: exit status and report."""
  file = path / 'report.json'
  status = device.main(['--small', *flags, '--json', str(file)])
  return status, json.loads(file.read_text())


def failing(checks):
  return {name for name, x in checks.items() if x['status'] == 'fail'}


def test_the_small_setting_passes_all_checks_and_has_all_timings():
  done = subprocess.run(
    [sys.executable, '-m', 'benchmarks.device', '--small', '--json'],
    cwd=ROOT,
    env=os.environ
    | {'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  report = json.loads(done.stdout)  # nothing else is there
  assert report['status'] == 'pass'
  assert set(report['checks']) == set(device.checks())
  for name, result in report['checks'].items():
    assert result['status'] == 'pass', name
  for name in TIMED:
    result = report['timings'][name]
    assert result['status'] == 'pass' and result['seconds'] > 0, name
  assert report['timings']['rollout']['tokens_per_second'] > 0
  assert report['timings']['optimizer_fresh']['achieved_bytes_per_second'] > 0
  # A CPU keeps no statistics; whatever is skipped says why.
  memory = report['timings']['peak_memory']
  assert memory['status'] == 'pass' or memory['reason']


def test_without_time_left_the_timings_say_so_and_nothing_fails(
  tmp_path, monkeypatch
):
  some = ('noise_wide', 'residual16_roundtrip')
  checks = {name: device.checks()[name] for name in some}
  monkeypatch.setattr(device, 'checks', lambda: checks)
  status, report = run(tmp_path, '--budget', '0')
  assert status == 0
  assert [x['status'] for x in report['checks'].values()] == ['pass', 'pass']
  for name in TIMED:
    result = report['timings'][name]
    assert result['status'] == 'skipped' and 'budget' in result['reason'], name


def truncating(x, u, target, apply_noise=rounding.apply_noise):
  return apply_noise(x, jnp.zeros_like(u), target)


def losing_nan(x, u, target, apply_noise=rounding.apply_noise):
  # Integers alone, as in many kernels: 0x7FFFFFFF + 0x8000 is -0.
  q = apply_noise(x, u, target)
  word = lax.bitcast_convert_type(x, jnp.uint32)
  all_ones = (word & jnp.uint32(0x7FFFFFFF)) == jnp.uint32(0x7FFFFFFF)
  return jnp.where(all_ones, jnp.zeros_like(q), q)


def other_leaf(words, paths, leaf_words=noise.leaf_words):
  return leaf_words(words, ['w'] * len(paths))


def without_carry(weight, lo, u, join=residual.join):
  return join(weight, lo, jnp.zeros_like(u))


def off_by_one(q, p, difference=link.difference):
  return difference(q, p) * jnp.float32(1.5)


FAULTS = {
  'truncation': (
    rounding,
    'apply_noise',
    truncating,
    {'rounding_bfloat16', 'trajectory_fresh', 'nearest_float16'},
  ),
  'a NaN of all ones is lost': (
    rounding,
    'apply_noise',
    losing_nan,
    {'nan_bfloat16', 'nan_float16'},
  ),
  'every leaf has the same noise': (
    noise,
    'leaf_words',
    other_leaf,
    {'noise', 'round_tree_bfloat16', 'trajectory_sticky'},
  ),
  'the residual forgets the carry': (
    residual,
    'join',
    without_carry,
    {'residual16_roundtrip', 'trajectory_residual16'},
  ),
  'updates overshoot': (
    link,
    'difference',
    off_by_one,
    {'trajectory_nearest', 'apply_updates_bfloat16'},
  ),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_a_planted_fault_fails(fault, tmp_path, monkeypatch):
  module, name, function, expected = FAULTS[fault]
  checks = {name: device.checks()[name] for name in sorted(expected)}
  monkeypatch.setattr(device, 'checks', lambda: checks)
  monkeypatch.setattr(module, name, function)
  status, report = run(tmp_path, '--budget', '0')
  assert status == 1 and report['status'] == 'fail'
  assert failing(report['checks']) == expected


def test_an_elided_cast_fails(monkeypatch):
  # Weights that stay FP32 inside the program, with all their bits.
  monkeypatch.setattr(
    optimizer_checks.sr_optax,
    'init_from_shadow',
    lambda tx, shadow: (shadow, None),
  )
  with pytest.raises(Failed) as error:
    optimizer_checks.check_casts()
  assert error.value.numbers['rounded_off_grid'] > 0.9


def test_the_numpy_rounding_is_the_fraction_in_counts():
  # Without the library: of 2^16 draws as many round away as bits are dropped.
  word = np.full(2**16, 0x3F801234, np.uint32)
  u = np.arange(2**16, dtype=np.uint32) << 16
  up = reference.expected_rounding(word, u, reference.BF16) == 0x3F81
  assert up.sum() == 0x1234
  # FP16 drops 13 bits of 0x1234: 0x1234 / 2^13, in 2^16 draws 8 times as many.
  code = reference.expected_rounding(word, u, reference.FP16)
  assert (code == 0x3C01).sum() == 0x1234 * 8


def test_a_report_that_cannot_be_written_is_refused_at_once(tmp_path, capsys):
  (tmp_path / 'file').touch()
  with pytest.raises(SystemExit) as stop:
    device.main(['--small', '--json', str(tmp_path / 'file' / 'report.json')])
  assert stop.value.code == 2
  assert '--json: ' in capsys.readouterr().err
