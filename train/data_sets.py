"""Tasks from a user's data: JSONL files, and all data sets of reasoning-gym.

Their answers cannot be listed, so held-out reward is sampled, and verifiers in
worker processes decide. Train and held-out questions are distinct.
"""

import ast
import dataclasses
import functools
import hashlib
import json
import os
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
_GARBAGE = ('', ' ', 'abc', '0' * 50, 'yes', 'I do not know.')


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
    workers = max((os.cpu_count() or 2) // 2, 1)
    return verifiers.VerifierPool(
      self.verifier, workers=workers, timeout=self.timeout
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
  if '{question}' not in template:
    raise TaskError(f'the template {template!r} has no {{question}} in it')
  if reward:
    try:
      verifiers.load_function(reward)
    except ValueError as error:
      raise TaskError(str(error)) from error
    verifier = verifiers.FunctionVerifier(reward)
  else:
    verifier = verifiers.MathVerifier()

  def read(file: Path) -> dict[str, str]:
    rows = _read(file, checked=not reward)
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
    config: its own settings.
    template: text with `{question}` in it.
    stops: strings that end a completion, beside end-of-text.
    timeout: seconds a verdict may take.

  Raises:
    TaskError: unknown name or setting; or the data set's scorer does not pay
      its own answers, or pays garbage.
  """
  import reasoning_gym  # here because the import takes seconds

  try:
    data_set = reasoning_gym.create_dataset(
      name, seed=0, size=_GYM_ITEMS, **(config or {})
    )
    items = list(data_set)
  except Exception as error:  # each data set raises what it likes
    raise TaskError(f'{GYM}{name}: {error}') from error
  pool = {}
  for item in items:
    text = template.replace('{question}', item['question'])
    pool[text] = verifiers.encode_entry(item)
  pairs = [(k, _freeze(v)) for k, v in (config or {}).items()]
  verifier = verifiers.ReasoningGymVerifier(name, tuple(pairs))
  _self_check(name, verifier, list(pool.values())[:20])
  train, evaluation = _split(pool, _HELD_OUT)

  def shown(entry: str) -> str:
    return str(ast.literal_eval(entry)['answer'])

  return _task(name, train, evaluation, stops, verifier, timeout, shown)


def _freeze(value: Any) -> Any:
  return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _self_check(name, verifier, entries: Sequence[str]) -> None:
  def pays(completion: str, entry: str) -> float:
    try:
      return verifier('', completion, entry)
    except Exception:  # raising on garbage is common, and contained
      return 0.0

  for entry in entries:
    gold = str(ast.literal_eval(entry)['answer'])
    if pays(gold, entry) < 1:
      raise TaskError(f'{GYM}{name}: its scorer refuses its answer {gold!r}')
    for text in _GARBAGE:
      if text.strip() != gold and pays(text, entry) > 0:
        raise TaskError(f'{GYM}{name}: its scorer pays for {text[:20]!r}')


def _read(file: Path, *, checked: bool) -> dict[str, str]:
  """Gold answers by question; the first of equal questions counts."""
  rows: dict[str, str] = {}
  try:
    lines = file.read_text(encoding='utf-8').splitlines()
  except (OSError, UnicodeDecodeError) as error:
    raise TaskError(f'cannot read {file}: {error}') from error
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    try:
      row = json.loads(line)
      if not isinstance(row, dict):
        raise ValueError('expected a JSON object')
      question, answer = _field(row, _QUESTIONS), _field(row, _ANSWERS)
      if checked:
        answer = verifiers.extract_gold(answer)
        verifiers.check_gold(answer)
    except ValueError as error:
      raise TaskError(f'{file}, line {number}: {error}') from error
    rows.setdefault(question, answer)
  if len(rows) < 2:
    raise TaskError(f'{file}: expected two questions or more, got {len(rows)}')
  return rows


def _field(row: dict[str, Any], names: Sequence[str]) -> str:
  for name in names:
    value = row.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
      value = str(value)
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
