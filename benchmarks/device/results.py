"""Named results: each `pass`, `fail` with numbers, or `skipped` and why."""

import sys
import time
from collections.abc import Callable
from typing import Any

import jax

Numbers = dict[str, Any]


class Failed(Exception):
  """A result that is wrong; `numbers` says how."""

  def __init__(self, **numbers):
    """Keeps what was seen."""
    super().__init__(str(numbers))
    self.numbers = numbers


class Skipped(Exception):
  """A result that this device or this setting does not have."""


class Run:
  """Collects results and knows how much time is left."""

  def __init__(self, budget: float):
    """No timing starts later than `budget` seconds from now."""
    self.deadline = time.monotonic() + budget
    self.results = {'checks': {}, 'timings': {}}

  def record(
    self, kind: str, name: str, function: Callable[[], Numbers]
  ) -> bool:
    """Calls a function; its numbers, or why there are none, get the name."""
    start = time.monotonic()
    try:
      result = {'status': 'pass', **function()}
    except Skipped as why:
      result = {'status': 'skipped', 'reason': str(why)}
    except Failed as error:
      result = {'status': 'fail', **error.numbers}
    except Exception as error:  # the other results are worth having
      if kind == 'timings' and 'RESOURCE_EXHAUSTED' in str(error):
        reason = f'out of memory: {str(error)[:200]}'
        result = {'status': 'skipped', 'reason': reason}
      else:
        message = f'{type(error).__name__}: {str(error)[:1000]}'
        result = {'status': 'fail', 'error': message}
    result['total_seconds'] = time.monotonic() - start
    self.results[kind][name] = result
    about = ', '.join(
      f'{k} {v:.4g}' if isinstance(v, float) else f'{k} {v}'
      for k, v in result.items()
      if k != 'status' and not isinstance(v, list)
    )
    say(f'{result["status"]:8}{name:30} {about}')
    return result['status'] == 'pass'

  def timed(
    self, name: str, reserve: float, function: Callable[[], Numbers]
  ) -> None:
    """`record` for a timing: skipped with no more than `reserve` seconds left.

    Adds the device's peak memory so far.
    """

    def within_budget():
      if (left := self.deadline - time.monotonic()) <= reserve:
        raise Skipped(
          f'the time budget leaves {max(left, 0):.0f} s, and this may take '
          f'{reserve:g} s'
        )
      return function() | memory_statistics()

    self.record('timings', name, within_budget)

  def seconds(
    self, calls: dict[str, Callable[[], Any]], rounds: int
  ) -> dict[str, list[float]]:
    """Times calls in turns, one round at least, until the time is up."""
    seconds = {name: [] for name in calls}
    for i in range(rounds):
      if i and time.monotonic() > self.deadline:
        break
      for name in list(calls)[:: 1 if i % 2 == 0 else -1]:
        start = time.perf_counter()
        jax.block_until_ready(calls[name]())
        seconds[name].append(time.perf_counter() - start)
    return seconds


def peak_memory() -> Numbers:
  """Of all that ran before."""
  if not (peak := memory_statistics()):
    raise Skipped('the device keeps no memory statistics')
  return peak


def memory_statistics() -> Numbers:
  """Peak and limit, empty where the device does not keep them."""
  stats = jax.devices()[0].memory_stats() or {}
  names = 'peak_bytes_in_use', 'bytes_limit'
  return {name: stats[name] for name in names if name in stats}


def say(line: str) -> None:
  """Tells of progress; the report alone is on standard output."""
  print(line, file=sys.stderr, flush=True)
