"""Several processes as one run, on JAX's multi-controller runtime.

All processes run the same program on the same mesh. What differs: each makes
the prompts of its own devices and rewards the completions that lie there, and
the first one prints and writes. Rewards are small, so all processes then know
all of them, and decide alike.
"""

import hashlib
import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

from train.config import Config, ConfigError

# Seconds: until all processes have come; until all have loaded model and data;
# until one that has fallen silent is given up, which ends the others; that the
# first one leaves the others to say what went wrong with them.
START, LOADING, SILENCE, PARTING = 300, 3600, 60, 5


def initialize(config: Config) -> None:
  """Joins the other processes, before JAX is used for anything else.

  Without a coordinator JAX finds out by itself (TPU slices, SLURM, GKE, Open
  MPI).

  Raises:
    ConfigError: if they cannot be found.
  """
  if not config.distributed:
    return
  try:
    jax.distributed.initialize(
      coordinator_address=config.coordinator_address,
      num_processes=config.num_processes,
      process_id=config.process_id,
      initialization_timeout=START,
      heartbeat_timeout_seconds=SILENCE,
    )
  except (ValueError, RuntimeError) as error:
    raise ConfigError(
      f'distributed: {error}; outside of TPU slices, SLURM and the like name '
      '--coordinator-address HOST:PORT, --num-processes and --process-id'
    ) from error


def first() -> bool:
  """Whether this is the process that prints and writes."""
  return jax.process_index() == 0


def say(text: str) -> None:
  """Prints on the first process."""
  if first():
    print(text, flush=True)


def total(values: Any) -> np.ndarray:
  """Sums small host values over all processes; every process calls it."""
  values = np.asarray(values)
  if jax.process_count() == 1:
    return values
  return np.sum(multihost_utils.process_allgather(values), axis=0)


def highest(value: int) -> int:
  """The largest of the processes' values; every process calls it."""
  if jax.process_count() == 1:
    return value
  return int(np.max(multihost_utils.process_allgather(np.int32(value))))


def same(values: dict[str, Any]) -> None:
  """Makes sure that all processes were given the same; all of them call it.

  Raises:
    ConfigError: on every process, naming what differs.
  """
  if jax.process_count() == 1:
    return
  texts = [json.dumps(value).encode() for value in values.values()]
  digests = [hashlib.sha256(text).digest() for text in texts]
  own = np.array([np.frombuffer(digest, np.uint32) for digest in digests])
  found = multihost_utils.process_allgather(own)  # [processes, values, 8]
  differ = np.any(found != found[:1], axis=(0, 2))
  names = [name for name, x in zip(values, differ, strict=True) if x]
  if names:
    raise ConfigError(f'the processes differ in: {", ".join(names)}')


def fetch(tree: Any) -> Any:
  """Arrays as NumPy, whole, on every process; every process calls it."""
  if jax.process_count() == 1:
    return jax.device_get(tree)
  return multihost_utils.process_allgather(tree, tiled=True)


def own_rows(array: jax.Array) -> dict[int, np.ndarray]:
  """The rows that lie here; every row is owned by exactly one process."""
  rows = {}
  for shard in array.addressable_shards:
    if shard.replica_id == 0:
      start = shard.index[0].start or 0
      rows |= dict(enumerate(np.asarray(shard.data), start))
  return dict(sorted(rows.items()))


def on_each(action: Callable[[], Any]) -> Any:
  """Does something on every process, however long it takes each.

  Returns:
    What it returns here.

  Raises:
    ConfigError: where it fails on other processes only; else what it raises.
  """
  if jax.process_count() == 1:
    return action()
  result, failure = None, None
  try:
    result = action()
  except Exception as error:  # raised again below
    failure = error
  # Collectives give up sooner on those who are late (Gloo after 30 s).
  meet = multihost.get_barrier_sync_fn()
  meet(key=f'sr_optax_{next(_meetings)}', timeout_ms=1000 * LOADING)
  failed = multihost_utils.process_allgather(np.int32(failure is not None))
  if failure is not None:
    raise failure
  if np.any(failed):
    raise ConfigError(f'process {np.argmax(failed)} has failed; it says why')
  return result


_meetings = itertools.count()


def on_first(action: Callable[[], Any]) -> None:
  """Does something on the first process while the others wait.

  Raises:
    ConfigError: on the others, if it fails on the first.
  """
  on_each(lambda: action() if first() else None)


def run(main: Callable[[], int]) -> int:
  """Runs one of several processes, or the only one, to its exit status."""
  try:
    status = main()
  except Exception:
    if jax.process_count() == 1:
      raise
    # Left to Python, JAX would wait for the others, which wait for this one.
    traceback.print_exc()
    rank = f'process {jax.process_index()} of {jax.process_count()}'
    hint = 'where another ended before it, that one says why'
    print(f'error: {rank} gives up; {hint}', file=sys.stderr)
    status = 1
  return _leave(status)


def _leave(status: int) -> int:
  """Ends one of several processes that failed; else returns the status.

  Where the others fail likewise, all leave with this status. Where they do
  not, they wait for this one in vain: it goes without the usual farewell, and
  JAX's coordination service ends them, at the latest after `SILENCE`.
  """
  if status == 0 or jax.process_count() == 1:
    return status
  sys.stdout.flush()
  sys.stderr.flush()
  if first():  # its end ends the service, and with it the others
    time.sleep(PARTING)
  os._exit(status)
