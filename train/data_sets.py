"""Tasks from a user's data: JSONL files, and all data sets of reasoning-gym.

Their answers cannot be listed, so held-out reward is sampled, and verifiers in
worker processes decide. Train and held-out questions are distinct.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from train import verifiers
from train.tasks import Question, Task, TaskError, best_constant

GYM = 'reasoning_gym:'
_QUESTIONS, _ANSWERS = ('question', 'problem', 'prompt'), ('answer', 'solution')
_HELD_OUT = 0.1  # of the distinct questions, where no file names them
_GYM_ITEMS = 4000
_WORKERS = max((os.cpu_count() or 2) // 2, 1)  # that run verifiers
# No zeros: they are a right answer where it is 0, or within a tolerance of it.
_GARBAGE = ('', ' ', 'abc', '7' * 50, 'yes', 'I do not know.')


@dataclasses.dataclass(frozen=True)
class DataTask(Task):
  """A task that a verifier decides, one completion a call.

  Attributes:
    verifier: see `verifiers`.
    timeout: seconds a completion may take.
  """

  stops: tuple[str, ...] = ()
  listed: bool = False
  verifier: verifiers.Verifier | None = None
  timeout: float = 5.0

  def verdicts(
    self,
    questions: Sequence[Question],
    completions: Sequence[str],
    terminated: Sequence[bool],
  ) -> list[float | Exception]:
    """What each completion earns; cut off ones earn 0 unread."""
    rows = [i for i, ended in enumerate(terminated) if ended]
    found = self._pool(
      [questions[i].prompt for i in rows],
      [completions[i] for i in rows],
      [questions[i].answer for i in rows],
    )
    verdicts: list[float | Exception] = [0.0] * len(questions)
    for i, verdict in zip(rows, found, strict=True):
      verdicts[i] = verdict
    return verdicts

  @functools.cached_property
  def _pool(self) -> verifiers.VerifierPool:
    return verifiers.VerifierPool(
      self.verifier, workers=_WORKERS, timeout=self.timeout
    )


def load_jsonl(
  path: Path,
  *,
  held_out: Path | None = None,
  template: str = '{question}',
  stops: tuple[str, ...] = (),
  reward: str = '',
  timeout: float = 5.0,
) -> DataTask:
  r"""Loads a data set with one JSON object a line.

  The question is its field `question`, `problem` or `prompt`; the answer that
  of `answer` or `solution`, of which the gold answer is what follows `####`
  (GSM8K), else the last `\boxed{}` (MATH), else all of it.

  Args:
    path: questions to train on.
    held_out: questions to evaluate on; None: every tenth of `path`, by hash.
    template: text with `{question}` in it.
    stops: strings that end a completion, beside end-of-text.
    reward: `module:function`, called as function(prompt, completion, answer);
      empty: math-verify.
    timeout: seconds a verdict may take.

  Raises:
    TaskError: naming file and line; or the reward cannot be imported.
  """
  _check(template)
  if reward:
    try:
      verifiers.load_function(reward)
    except ValueError as error:
      raise TaskError(str(error)) from error
    verifier = verifiers.FunctionVerifier(reward)
  else:
    verifier = verifiers.MathVerifier()

  def read(file: Path) -> dict[str, str]:
    rows = _read(file, None if reward else timeout)
    return {template.replace('{question}', q): a for q, a in rows.items()}

  train = read(path)
  if held_out is None:
    train, evaluation = _split(train, _HELD_OUT)
  else:
    evaluation = read(held_out)
    train = {q: a for q, a in train.items() if q not in evaluation}
  return _task(path.stem, train, evaluation, stops, verifier, timeout)


def load_gym(
  name: str,
  *,
  config: dict[str, Any] | None = None,
  template: str = '{question}',
  stops: tuple[str, ...] = (),
  timeout: float = 5.0,
) -> DataTask:
  """Makes a task of a reasoning-gym data set.

  Args:
    name: of the data set, such as `chain_sum`.
    config: its own settings, among them `size`, the number of questions drawn
      (4000; some data sets take a tenth of a second for each), and `seed`.
    template: text with `{question}` in it.
    stops: strings that end a completion, beside end-of-text.
    timeout: seconds a verdict may take.

  Raises:
    TaskError: unknown name or setting; an entry that cannot be written down;
      or the data set's scorer does not pay its own answers, or pays garbage.
  """
  _check(template)
  pool = {
    template.replace('{question}', question): entry
    for question, entry in _drawn(name, config or {}).items()
  }
  verifier = _gym_verifier(name, config or {})
  train, evaluation = _split(pool, _HELD_OUT)

  def shown(entry: str) -> str:
    return str(ast.literal_eval(entry)['answer'])

  return _task(name, train, evaluation, stops, verifier, timeout, shown)


def _check(template: str) -> None:
  if '{question}' not in template:
    raise TaskError(f'the template {template!r} has no {{question}} in it')


def _drawn(name: str, config: dict[str, Any]) -> dict[str, str]:
  """What `draw_gym` returns, from a process with a fixed hash seed.

  Some data sets go through sets in their order or use Python's global
  generator. Resumed runs, and all processes of one, must ask the same.
  """
  folders = [str(Path(__file__).parents[1]), os.environ.get('PYTHONPATH')]
  path = os.pathsep.join(filter(None, folders))
  done = subprocess.run(
    # -P: whatever lies in the current directory is not imported.
    [sys.executable, '-P', '-c', 'from train import data_sets as d; d._main()'],
    input=json.dumps([name, config]),
    env=os.environ | {'PYTHONHASHSEED': '0', 'PYTHONPATH': path},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    reason = done.stderr.strip().rpartition('\n')[2]
    raise TaskError(f'{GYM}{name}: {reason or done.returncode}')
  pool, problem = json.loads(done.stdout)
  if problem is not None:
    raise TaskError(problem)
  return pool


def _main() -> None:
  """What `_drawn` runs: arguments and result are JSON."""
  pool, problem = {}, None
  with contextlib.redirect_stdout(sys.stderr):  # some data sets print
    try:
      pool = draw_gym(*json.load(sys.stdin))
    except TaskError as error:
      problem = str(error)
  print(json.dumps([pool, problem]))


def draw_gym(name: str, config: dict[str, Any]) -> dict[str, str]:
  """Draws a data set of reasoning-gym and checks its scorer.

  Args:
    name: of the data set.
    config: its own settings.

  Returns:
    Entries, see `verifiers.encode_entry`, by question.

  Raises:
    TaskError: see `load_gym`.
  """
  import reasoning_gym  # here because the import takes seconds

  random.seed(0)
  np.random.seed(0)
  try:
    data_set = reasoning_gym.create_dataset(
      name, **{'seed': 0, 'size': _GYM_ITEMS} | config
    )
    pool = {x['question']: verifiers.encode_entry(x) for x in data_set}
  except Exception as error:  # each data set raises what it likes
    raise TaskError(f'{GYM}{name}: {error}') from error
  _self_check(name, _gym_verifier(name, config), list(pool.values())[:20])
  return pool


def _gym_verifier(name, config) -> verifiers.ReasoningGymVerifier:
  pairs = ((key, _freeze(value)) for key, value in config.items())
  return verifiers.ReasoningGymVerifier(name, tuple(pairs))


def _freeze(value: Any) -> Any:
  return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _self_check(name, verifier, entries: Sequence[str]) -> None:
  def pays(completion: str, entry: str) -> float:
    try:
      return verifier('', completion, entry)
    except Exception:  # raising on garbage is common, and contained
      return 0.0

  for entry in entries:
    gold = ast.literal_eval(entry)['answer']
    if gold is None:
      raise TaskError(f'{GYM}{name}: it has no answers to check its scorer by')
    gold = str(gold)
    if pays(gold, entry) < 1:
      raise TaskError(f'{GYM}{name}: its scorer refuses its answer {gold!r}')
    for text in _GARBAGE:
      if text.strip().lower() != gold.lower() and pays(text, entry) > 0:
        raise TaskError(f'{GYM}{name}: its scorer pays for {text[:20]!r}')


def _read(file: Path, timeout: float | None) -> dict[str, str]:
  """Gold answers by question; the first of equal questions counts.

  Args:
    file: of JSON lines.
    timeout: seconds that math-verify may take for a gold answer; None: answers
      are not its business.
  """
  try:
    # Not `splitlines`: JSON strings may hold U+2028 and the like.
    lines = file.read_text(encoding='utf-8').split('\n')
  except (OSError, UnicodeDecodeError) as error:
    raise TaskError(f'cannot read {file}: {error}') from error
  rows: dict[str, tuple[str, int]] = {}
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      if not isinstance(row, dict):
        raise ValueError('expected a JSON object')
      question, answer = _field(row, _QUESTIONS), _field(row, _ANSWERS)
    except (ValueError, RecursionError) as error:
      raise TaskError(f'{file}, line {number}: {error}') from error
    if timeout is not None:
      answer = verifiers.extract_gold(answer)
    rows.setdefault(question, (answer, number))
  if timeout is not None:
    problems = verifiers.check_golds(
      [answer for answer, _ in rows.values()], workers=_WORKERS, timeout=timeout
    )
    for (_, number), problem in zip(rows.values(), problems, strict=True):
      if problem is not None:
        raise TaskError(f'{file}, line {number}: {problem}')
  if len(rows) < 2:
    raise TaskError(f'{file}: expected two questions or more, got {len(rows)}')
  return {question: answer for question, (answer, _) in rows.items()}


def _field(row: dict[str, Any], names: Sequence[str]) -> str:
  for name in names:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
      value = str(value) if math.isfinite(value) else value
    if isinstance(value, str) and value.strip():
      return value
    if name in row:
      raise ValueError(f'{name} is {value!r}, expected text')
  raise ValueError(f'there is none of the fields {", ".join(names)}')


def _split(pool: dict[str, str], share: float):
  """Training and held-out questions, by a hash that nothing else changes."""

  def rank(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()

  order = sorted(pool, key=rank)
  count = min(max(round(share * len(order)), 2), len(order) - 1)
  held_out, train = order[:count], order[count:]
  return {q: pool[q] for q in train}, {q: pool[q] for q in held_out}


def _task(
  name, train, evaluation, stops, verifier, timeout, shown=str
) -> DataTask:
  if len(train) < 1 or len(evaluation) < 2:
    raise TaskError(
      f'{name}: {len(train)} questions to train on and {len(evaluation)} to '
      'evaluate on are too few'
    )
  train, evaluation = (
    tuple(Question(q, a, '') for q, a in rows.items())
    for rows in (train, evaluation)
  )
  answers = [dataclasses.replace(q, answer=shown(q.answer)) for q in train]
  # Evaluated on from the front: in an order that no file decides.
  shuffled = np.random.default_rng(0).permutation(len(evaluation))
  return DataTask(
    name=name,
    train=train,
    evaluation=tuple(evaluation[i] for i in shuffled),
    best_constant=best_constant(answers),
    stops=stops,
    verifier=verifier,
    timeout=timeout,
  )
