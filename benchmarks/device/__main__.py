"""Checks and timings of one accelerator, in under six minutes.

    python -m benchmarks.device --json FILE.json          # on a GPU or TPU
    python -m benchmarks.device --small --json            # seconds, on a CPU

First what must be true: on this device the library's bits are those that NumPy
computes here in integers, and these are the ones frozen in `reference.py`,
made on a CPU. Then timings, as far as the time budget goes. Every result is
named and `pass`, `fail` with numbers, or `skipped` with the reason; the exit
status is 1 if one fails.

Timings are medians of repeats on donated, warm state, up to the moment when
the device is done; kinds of rounding alternate within a repeat (forwards, then
backwards). `achieved` bytes/s count what the scheme must read and write (28
bytes a parameter for FP32 shadow and moments with BF16 gradients and weights,
26 for `residual16`), `compiled` ones what XLA says that the program accesses.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

# As `python -m train` runs: XLA reads the flag when it starts.
_DETERMINISTIC = ' --xla_gpu_deterministic_ops=true'
if _DETERMINISTIC not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '') + _DETERMINISTIC

import jax  # noqa: E402

from benchmarks import optimizer_step  # noqa: E402
from benchmarks.device import (  # noqa: E402
  model_timings,
  optimizer_checks,
  optimizer_timings,
  rounding_checks,
)
from benchmarks.device.results import (  # noqa: E402
  Numbers,
  Run,
  peak_memory,
  say,
)
from benchmarks.device.settings import FULL, SMALL, Setting  # noqa: E402


def main(argv: list[str] | None = None) -> int:
  """Runs everything and writes JSON: 1 if a result fails."""
  parser = _parser()
  options = parser.parse_args(argv)
  if options.json not in (
    None,
    '-',
  ):  # seen before minutes pass
    path = pathlib.Path(options.json)
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      path.touch()
    except OSError as error:
      parser.error(f'--json: {error}')
  on_cpu = jax.default_backend() == 'cpu'
  setting = options.setting or (SMALL if on_cpu else FULL)
  report = measure(setting, options.budget)
  text = json.dumps(report, indent=2, allow_nan=False) + '\n'
  if options.json == '-':
    print(text, end='')
  elif options.json:
    path.write_text(text)
  return int(report['status'] == 'fail')


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m benchmarks.device', description=__doc__.splitlines()[0]
  )
  size = parser.add_mutually_exclusive_group()
  size.add_argument(
    '--small',
    dest='setting',
    action='store_const',
    const=SMALL,
    help='small timings (default on a CPU)',
  )
  size.add_argument(
    '--full',
    dest='setting',
    action='store_const',
    const=FULL,
    help='a model of 1.5B parameters (default on accelerators)',
  )
  parser.add_argument(
    '--budget',
    type=float,
    default=330,
    help='seconds after which the timings that remain are skipped',
  )
  parser.add_argument(
    '--json',
    metavar='FILE',
    nargs='?',
    const='-',
    help='where to write the report; without FILE, standard output',
  )
  return parser


def measure(setting: Setting, budget: float) -> Numbers:
  """All results, correctness first.

  Args:
    setting: sizes of the timings.
    budget: seconds from now after which no timing starts.
  """
  start = time.monotonic()
  run = Run(budget)
  device = optimizer_step.machine()
  for name, check in checks().items():
    run.record('checks', name, check)
  optimizer_timings.measure(setting, run)
  model_timings.measure(setting, run)
  run.record('timings', 'peak_memory', peak_memory)
  results = run.results['checks'] | run.results['timings']
  failed, skipped = (
    [name for name, result in results.items() if result['status'] == status]
    for status in ('fail', 'skipped')
  )
  report = {
    'status': 'fail' if failed else 'pass',
    'failed': failed,
    'skipped': skipped,
    'device': device,
    'setting': dataclasses.asdict(setting),
    'budget_seconds': budget,
    'seconds': time.monotonic() - start,
    **run.results,
  }
  say(
    f'{report["status"]} after {report["seconds"]:.0f} s, failed: '
    f'{", ".join(failed) or "none"}, skipped: {", ".join(skipped) or "none"}'
  )
  return report


def checks() -> dict[str, Callable[[], Numbers]]:
  """What must be true on any device, by name."""
  return rounding_checks.checks() | optimizer_checks.checks()


if __name__ == '__main__':
  sys.exit(main())
