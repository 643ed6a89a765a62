"""Verifiable rewards, computed in worker processes with a time-out each.

What a completion earns is found by code that may hang or crash: symbolic
algebra on whatever the policy wrote, or a user's function. Python can neither
interrupt nor contain that from within, so it runs in processes that are killed
and replaced. They import this module: it must load fast, without JAX.
"""

import ast
import concurrent.futures
import functools
import importlib
import logging
import math
import multiprocessing
import numbers
import os
import pickle
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import resource_tracker

import pebble

Verifier = Callable[[str, str, str], float]  # (prompt, completion, answer)

_START_LIMIT = 120.0  # seconds a worker may take to import what it needs
_POLL = 1.0  # seconds between two looks at a pool that may have broken
_RIGHT = 0.999  # reasoning-gym pays less for a partly right answer
_PLAIN = re.compile(
  r'[+-]?(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)(?:\.[0-9]+)?'
  r'|[+-]?[0-9]+/0*[1-9][0-9]*'
)


class VerifierError(Exception):
  """A completion has no verdict: its verifier failed or its worker died.

  What the verifier raised is in the message. The object itself stays in the
  worker, since many exceptions cannot be unpickled.
  """


@dataclass(frozen=True)
class MathVerifier:
  r"""Pays 1.0 for a final answer that equals the gold answer, else 0.0.

  math-verify finds the final answer (preferring `\boxed{}`) and decides:
  `0.5` equals `1/2`. It reads a bare word as a product of its letters, so
  golds that are words are not for this verifier. Not limited in time.
  """

  def __call__(self, prompt: str, completion: str, answer: str) -> float:
    r"""Returns 1.0 or 0.0; an answer is such as `72` or `\frac{3}{4}`."""
    gold = _gold(answer)
    # Its own time-outs are signals, which the pool's kill makes needless.
    target = _math_verify().parse(completion, parsing_timeout=None)
    return float(_math_verify().verify(gold, target, timeout_seconds=None))

  def warm_up(self):
    """Imports math-verify and has it compile its patterns."""
    self('', '\\boxed{1}', '1')


@dataclass(frozen=True)
class ReasoningGymVerifier:
  """Pays 1.0 for what a reasoning-gym data set scores as fully right.

  The answer is the whole entry, as `encode_entry` writes it: a Python literal,
  because JSON would turn tuples into lists and integer keys into strings,
  which for example `arc_agi` then scores as wrong.

  Attributes:
    name: The data set's name, such as `chain_sum`.
    config: Its configuration as (key, value) pairs; hashable.
  """

  name: str
  config: tuple[tuple[str, object], ...] = ()

  def __call__(self, prompt: str, completion: str, answer: str) -> float:
    """Returns 1.0 or 0.0; raises what the data set's own code raises."""
    data_set = _data_set(self.name, self.config)
    entry = ast.literal_eval(answer)
    return float(data_set.score_answer(completion.strip(), entry) >= _RIGHT)

  def warm_up(self):
    """Imports reasoning-gym and makes the data set."""
    _data_set(self.name, self.config)


@dataclass(frozen=True)
class FunctionVerifier:
  """Pays what a user's function returns.

  Attributes:
    target: `module:function`, called as function(prompt, completion, answer).
      The module may be in the current directory.
  """

  target: str

  def __call__(self, prompt: str, completion: str, answer: str) -> float:
    """Returns the function's result, unchecked."""
    return _function(self.target)(prompt, completion, answer)

  def warm_up(self):
    """Imports the function's module."""
    _function(self.target)


def load_function(target: str) -> Callable:
  """Returns the function that `module:function` names, imported.

  Raises:
    ValueError: The syntax is wrong, the module is missing or fails to import,
      or what it has by that name is missing or not callable.
  """
  module_name, _, name = target.partition(':')
  parts = [*module_name.split('.'), name]
  if not all(part.isidentifier() for part in parts):
    raise ValueError(f'{target!r} is not of the form module:function')
  _add_to_path(os.getcwd())
  try:
    module = importlib.import_module(module_name)
  except Exception as error:
    if isinstance(error, ModuleNotFoundError) and (
      f'{module_name}.'.startswith(f'{error.name}.')
    ):
      raise ValueError(f'{target}: no module named {error.name!r}') from error
    raise ValueError(
      f'{target}: importing {module_name} failed: {_described(error)}'
    ) from error
  if not hasattr(module, name):
    raise ValueError(f'{target}: {module_name} has no {name!r}')
  function = getattr(module, name)
  if not callable(function):
    raise ValueError(
      f'{target} is not callable but of type {type(function).__name__}'
    )
  return function


def encode_entry(entry: Mapping[str, object]) -> str:
  """Returns a reasoning-gym entry as the answer of its verifier.

  Raises:
    ValueError: The entry holds something that has no literal.
  """
  encoded = repr(_plain(entry))
  try:
    same = ast.literal_eval(encoded) == entry
  except (ValueError, SyntaxError):
    same = False
  if not same:
    raise ValueError(
      f'an entry cannot be written as a Python literal: {encoded[:200]}'
    )
  return encoded


def extract_gold(text: str) -> str:
  r"""Returns the gold answer that the solution of a data set's row ends with.

  It follows the last `####` (GSM8K; thousands commas and `$` are removed),
  else it is the content of the last balanced `\boxed{...}`, else all of the
  text. It may be empty: see `check_golds`.
  """
  _, mark, answer = text.rpartition('####')
  if mark:
    answer = answer.replace('\\$', '').replace('$', '')
    return re.sub(r'(?<=\d),(?=\d{3}(?!\d))', '', answer).strip()
  for box in reversed(list(re.finditer(r'\\boxed\s*\{', text))):
    depth = 1
    for token in re.compile(r'\\.|[{}]', re.DOTALL).finditer(text, box.end()):
      depth += {'{': 1, '}': -1}.get(token[0], 0)
      if depth == 0:
        return text[box.end() : token.start()].strip()
  return text.strip()


def check_golds(
  answers: Sequence[str], *, workers: int, timeout: float
) -> list[str | None]:
  """Returns what is wrong with each gold answer, None where nothing is.

  A row whose gold answer is empty, or that math-verify cannot read within the
  time-out (`9^{9^{9^9}}`), could never be answered right.
  """
  problems: list[str | None] = [None] * len(answers)
  slow = []  # most golds are plain: reading all would take minutes
  for i, answer in enumerate(answers):
    if not answer.strip():
      problems[i] = 'the gold answer is empty'
    elif not _PLAIN.fullmatch(answer.strip()):
      slow.append(i)
  if not slow:
    return problems
  with VerifierPool(_Readable(), workers=workers, timeout=timeout) as pool:
    none = [''] * len(slow)
    readable = pool(none, none, [answers[i] for i in slow])
  for i, found in zip(slow, readable, strict=True):
    if found != 1:
      reason = f' ({found})' if isinstance(found, Exception) else ''
      problems[i] = (
        f'math-verify cannot read the gold answer {answers[i]!r:.200}{reason}'
      )
  return problems


@dataclass(frozen=True)
class _Readable(MathVerifier):
  """Pays 1.0 for a gold answer that math-verify can read."""

  def __call__(self, prompt: str, completion: str, answer: str) -> float:
    return float(not all(isinstance(x, str) for x in _gold(answer)))


class VerifierPool:
  """Verdicts on completions, from worker processes.

  The processes are spawned: this one runs JAX's threads, which do not survive
  a fork. A script that uses it needs the `if __name__ == '__main__'` guard.
  They start at once, in the current directory, and import in the background.

  Attributes:
    timeout: Seconds that a completion may take.
  """

  def __init__(self, verifier: Verifier, *, workers: int, timeout: float):
    """Starts the workers.

    Args:
      verifier: What to call; it is pickled. If it has a method `warm_up`, each
        worker calls that first, which no time-out counts.
      workers: Number of processes.
      timeout: Seconds per completion.

    Raises:
      ValueError: A number is out of range.
    """
    if workers < 1:
      raise ValueError(f'workers must be at least 1, not {workers}')
    if not (timeout > 0 and math.isfinite(timeout)):
      raise ValueError(f'timeout must be positive seconds, not {timeout}')
    self.timeout = timeout
    self._workers = workers
    self._initargs = (pickle.dumps(verifier), os.getcwd())
    self._closed = False
    self._pool = self._started()

  def __enter__(self) -> 'VerifierPool':
    """Returns the pool."""
    return self

  def __exit__(self, *_):
    """Closes the pool."""
    self.close()

  def close(self):
    """Kills the workers, whatever they do."""
    if not self._closed:
      self._closed = True
      self._stop()

  def __call__(
    self,
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
  ) -> list[float | Exception]:
    """Returns a reward for each completion, in order.

    Where there is none, an exception stands in its place: a TimeoutError, or a
    VerifierError if the verifier raised, its worker died or its result is not
    a finite real number.

    Raises:
      ValueError: The arguments differ in length.
      RuntimeError: The pool is closed.
    """
    if self._closed:
      raise RuntimeError('the pool of verifiers is closed')
    rows = list(zip(prompts, completions, answers, strict=True))
    results = self._judged(rows)
    # An idle worker's death breaks the whole pool, and so may a death faster
    # than its acknowledgement: what that took along has a second chance.
    lost = [i for i, r in enumerate(results) if isinstance(r, _Lost)]
    if lost:
      again = self._judged([rows[i] for i in lost])
      for i, result in zip(lost, again, strict=True):
        results[i] = result
    return results

  def _judged(self, rows: list[tuple[str, str, str]]) -> list:
    if not self._pool.active:
      self._restart()
    futures = []
    try:
      for row in rows:
        try:
          futures.append(
            self._pool.schedule(_judge, args=row, timeout=self.timeout)
          )
        except RuntimeError:  # it broke just now; the rest are lost
          break
      stalled = self._wait(futures)
      results = [self._result(future, stalled) for future in futures]
    finally:
      for future in futures:  # what an interrupt left, or a broken pool
        future.cancel()
    if stalled:
      self._restart()
    return results + [_broken()] * (len(rows) - len(futures))

  def _wait(self, futures: list) -> bool:
    """Waits until all is done or the pool is broken; returns if it stalled."""
    pending, progress = set(futures), time.monotonic()
    while pending:
      done, pending = concurrent.futures.wait(pending, _POLL)
      if done:
        progress = time.monotonic()
      elif not self._pool.active:
        return False  # tasks that it had not sent yet are never done
      elif time.monotonic() - progress > self.timeout + _START_LIMIT:
        return True
    return False

  def _result(self, future, stalled: bool) -> float | Exception:
    if not future.done():
      if not stalled:
        return _broken()
      return TimeoutError(f'no worker was ready within {_START_LIMIT:g} s')
    error = future.exception()
    if isinstance(error, TimeoutError):
      return TimeoutError(f'no verdict within {self.timeout:g} s')
    if isinstance(error, pebble.ProcessExpired):
      return VerifierError(f'the worker died (exit code {error.exitcode})')
    if isinstance(error, BrokenProcessPool):
      return _broken()
    if error is not None:
      return VerifierError(_described(error))
    reward, problem = future.result()
    return reward if problem is None else VerifierError(problem)

  def _started(self) -> pebble.ProcessPool:
    pool = pebble.ProcessPool(
      max_workers=self._workers,
      initializer=_start,
      initargs=self._initargs,
      context=multiprocessing.get_context('spawn'),
    )
    # A worker ignores Ctrl-C only once Python has loaded. Until then it is
    # blocked: workers inherit that, and so do the threads that replace them.
    # Multiprocessing's own helper would unblock it when it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
      pool.active  # noqa: B018, asking starts it
    finally:
      signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool

  def _stop(self):
    self._pool.stop()
    self._pool.join()

  def _restart(self):
    self._stop()
    self._pool = self._started()


class _Lost(VerifierError):
  """The pool broke before this completion had its turn."""


def _broken() -> _Lost:
  return _Lost('the pool of workers broke: one died while it was idle')


# In a worker: the verifier, and why there is none.
_verifier: Verifier | None = None
_problem: str | None = None


def _start(pickled: bytes, folder: str):
  """Makes this process a worker. Raises nothing: that would break the pool."""
  global _verifier, _problem
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  # A handler would wait for native code that hangs.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  os.dup2(2, 1)  # what a verifier prints is not the run's own output
  try:
    _watch()
    os.chdir(folder)
    _add_to_path(folder)
    verifier = pickle.loads(pickled)
    if hasattr(verifier, 'warm_up'):
      verifier.warm_up()
    _verifier = verifier
  except BaseException as error:
    _problem = f'a worker could not start: {_described(error)}'


def _watch():
  """Has this worker die with the process that it works for, whatever it does.

  What a verifier has started (a test of code, say) dies with the worker, which
  leads a process group: a process beside it kills the group once one of the
  two is gone.
  """
  os.setpgid(0, 0)
  pids = os.getpid(), multiprocessing.parent_process().pid
  subprocess.Popen(
    [sys.executable, '-I', '-S', '-c', _WATCH, *map(str, pids)],
    start_new_session=True,
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )


_WATCH = """
import os, signal, sys, time
worker, parent = map(int, sys.argv[1:])
def alive(pid):
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return False
  return True
while os.getppid() == worker and alive(parent):
  time.sleep(0.2)
os.killpg(worker, signal.SIGKILL)
"""


def _judge(
  prompt: str, completion: str, answer: str
) -> tuple[float, None] | tuple[None, str]:
  """Returns a reward, or what went wrong: both can be pickled."""
  if _verifier is None:
    return None, str(_problem)
  try:
    return _number(_verifier(prompt, completion, answer)), None
  except BaseException as error:
    return None, _described(error)


def _number(value: object) -> float:
  value = _plain(value)
  if not isinstance(value, numbers.Real) or not math.isfinite(value):
    raise TypeError(f'a reward must be a finite number, not {value!r:.100}')
  return float(value)


def _plain(value: object) -> object:
  """Returns a value with Python's own scalars in place of NumPy's."""
  if isinstance(value, Mapping):
    return {_plain(k): _plain(v) for k, v in value.items()}
  if type(value) in (list, tuple):
    return type(value)(map(_plain, value))
  if getattr(value, 'shape', None) == () and hasattr(value, 'item'):
    return value.item()
  return value


def _described(error: BaseException) -> str:
  """Returns an error's type, message and place, on one line."""
  try:
    message = ' '.join(str(error).split())
  except Exception:  # a user's exception may not even print
    message = '(no message)'
  frames = traceback.extract_tb(error.__traceback__)
  if not frames:
    return f'{type(error).__name__}: {message}'
  place = f'{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}'
  return f'{type(error).__name__}: {message} ({place})'


def _add_to_path(folder: str):
  if folder not in sys.path:
    sys.path.insert(0, folder)


@functools.cache
def _math_verify():
  import math_verify  # here because the import takes a while

  # It would warn in each worker that its own time-outs are off.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return math_verify


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> list:
  """Returns an answer as math-verify reads it: values, and strings."""
  text = ' '.join(answer.split())
  parse = functools.partial(_math_verify().parse, parsing_timeout=None)
  values = parse(f'${text}$')
  if all(isinstance(value, str) for value in values):
    values = parse(text) or values
  return values


@functools.lru_cache(maxsize=64)
def _data_set(name: str, config: tuple[tuple[str, object], ...]):
  import reasoning_gym  # here because the import takes seconds

  return reasoning_gym.create_dataset(name, **dict(config))


@functools.lru_cache(maxsize=64)
def _function(target: str) -> Callable:
  return load_function(target)
