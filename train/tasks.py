"""Verifiable tasks: questions with one right answer, and their reward.

A task is a few fixed solved lines (shots), then a question that ends in `=`.
Most questions are drawn from reasoning-gym, whose item i of seed s is item 0
of seed s + i: two data sets with near seeds are almost the same questions. So
one pool is drawn, reduced to distinct questions and split. `3 + 5` and `5 + 3`
fall on the same side of the split. What distinct questions do to the mix is
undone by taking turns between strata of difficulty.
"""

import collections
import functools
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

MAX_CONSTANT_SHARE = 0.15  # what always giving one answer must stay below
_EVALUATION_SHARE = 0.25  # of the distinct questions of each stratum
_JUDGED = 2048  # shortest train sequence whose best constant means something
_OTHER_ANSWERS = 64  # per question in the self-check
# Squares of larger rewards, and differences of small ones, fail in float32.
_LARGEST = 1e9


class TaskError(ValueError):
  """A task is unknown or not fit to be trained on."""


@dataclass(frozen=True)
class Question:
  """One question as the policy sees it.

  Attributes:
    prompt: The shots and the question; ends in `=`, no space after it.
    answer: The right answer, such as `46` or `-3`.
    difficulty: The stratum that it was balanced by.
  """

  prompt: str
  answer: str
  difficulty: str


@dataclass(frozen=True)
class Task:
  """Questions to train and to evaluate on, and what an answer earns.

  A subclass may override `reward` (and `accepted`); `score` contains what it
  raises.

  Attributes:
    name: The task's name.
    train: Questions to train on, strata in turn. Small strata repeat.
    evaluation: As `train`; shares no question with it.
    best_constant: The most frequent answer in `train`, and its share.
    stops: Strings that end a completion, beside end-of-text.
    listed: Whether `accepted` lists all that earns 1.
  """

  name: str
  train: tuple[Question, ...]
  evaluation: tuple[Question, ...]
  best_constant: tuple[str, float]
  stops: tuple[str, ...] = ('\n',)
  listed: bool = True

  def accepted(self, question: Question) -> tuple[str, ...]:
    """Returns every completion (before its terminator) that earns 1."""
    return (question.answer, ' ' + question.answer)

  def reward(
    self, question: Question, completion: str, *, terminated: bool
  ) -> float:
    """Returns 1.0 for an accepted completion that ended by itself, else 0.0.

    Args:
      question: The question asked.
      completion: What was sampled before the first newline or eos.
      terminated: Whether a newline or eos came before the maximum length.
    """
    return float(bool(terminated) and completion in self.accepted(question))

  def verdicts(
    self,
    questions: Sequence[Question],
    completions: Sequence[str],
    terminated: Sequence[bool],
  ) -> list[float | Exception]:
    """Returns what each completion earns, or what its reward raised."""
    verdicts: list[float | Exception] = []
    for question, text, ended in zip(
      questions, completions, terminated, strict=True
    ):
      try:
        reward = self.reward(question, text, terminated=bool(ended))
      except Exception as error:  # a user's reward may raise anything
        reward = error
      verdicts.append(reward)
    return verdicts

  def fingerprint(self) -> str:
    """Returns a SHA-256 over all questions and answers, in order."""
    content = [
      [(q.prompt, q.answer, q.difficulty) for q in questions]
      for questions in (self.train, self.evaluation)
    ]
    return hashlib.sha256(json.dumps([self.name, content]).encode()).hexdigest()


@dataclass(frozen=True)
class _Draw:
  """A reasoning-gym generator, the number of items to draw, its config."""

  generator: str
  items: int
  config: Mapping[str, object]

  def data_set(self):
    import reasoning_gym  # here because the import takes seconds

    return reasoning_gym.create_dataset(
      self.generator, seed=0, size=self.items, **self.config
    )


@dataclass(frozen=True)
class _Definition:
  """How a task is made.

  Attributes:
    stratum: The stratum of a question and its answer; None leaves it out.
    shots: Solved questions that precede every question, separated by `;`.
    text: Format of a question, filled from a drawn item's metadata.
    draws: Where the questions are drawn from.
    enumerated: Questions and answers made here, if they are not drawn.
  """

  stratum: Callable[[str, str], str | None]
  shots: str = ''
  text: str = ''
  draws: Sequence[_Draw] = ()
  enumerated: Callable[[], Iterable[tuple[str, str]]] | None = None

  def shot_lines(self) -> list[str]:
    return self.shots.split(';') if self.shots else []


def _additions() -> Iterator[tuple[str, str]]:
  for a in range(10, 100):
    for b in range(10, 100):
      yield f'{a}+{b}=', str(a + b)


def _numbers(text: str) -> list[str]:
  return re.findall(r'\d+', text)


def _arithmetic_stratum(text: str, answer: str) -> str | None:
  first, second = map(len, _numbers(text))
  if '*' in text:  # a fifth of one-digit products are 0: a constant answer
    return '1x1' if answer != '0' else None
  return {(1, 1): '1+1', (2, 1): '2+1'}.get((first, second))


def _product_stratum(text: str, answer: str) -> str | None:
  lengths = sorted(map(len, _numbers(text)))
  return f'{lengths[0]}x{lengths[1]}' if lengths[-1] <= 2 else None


def _gcd_stratum(text: str, answer: str) -> str:
  # A pair's most telling property is its answer: 58 % are 1. Answers above 6
  # have too few pairs for a stratum each.
  value = int(answer)
  return answer if value <= 6 else '7-9' if value <= 9 else 'over 9'


def _terms_stratum(text: str, answer: str) -> str | None:
  terms = len(_numbers(text))
  return f'{terms} terms' if terms in (2, 3) else None


def _equation_stratum(text: str, answer: str) -> str:
  operator = next((o for o in '+-' if f' {o} ' in text), '*')
  return f'{operator} {answer}'


def _operators_stratum(text: str, answer: str) -> str:
  return ''.join(re.findall(r' ([+-]) ', text))


# A generator of reasoning-gym draws all terms with the same number of digits,
# except that the operands of basic_arithmetic start at 0: the mixed strata
# come from there. Without parentheses its gold answers ignore precedence,
# which two terms do not notice.
_TWO = {'min_terms': 2, 'max_terms': 2}
_THREE = {'min_terms': 3, 'max_terms': 3}
_DIGIT = {'min_digits': 1, 'max_digits': 1}
_DIGITS = {'min_digits': 1, 'max_digits': 2}
_FLAT = {'min_digits': 2, 'max_digits': 2, 'allow_parentheses': False}
_SHORT = _DIGIT | {'min_terms': 2, 'max_terms': 3, 'allow_negation': False}
_DEFINITIONS = {
  'arithmetic': _Definition(
    shots='1 + 3 = 4',
    text='{expression} =',
    stratum=_arithmetic_stratum,
    draws=[
      _Draw('chain_sum', 3000, _TWO | _DIGIT),
      _Draw('basic_arithmetic', 20_000, _TWO | _FLAT | {'operators': '+-'}),
      _Draw('products', 2000, _TWO | _DIGIT),
    ],
  ),
  'gcd': _Definition(
    shots='gcd(6, 9) = 3;gcd(8, 15) = 1;gcd(12, 20) = 4;gcd(4, 14) = 2',
    text='gcd({numbers[0]}, {numbers[1]}) =',
    stratum=_gcd_stratum,
    draws=[_Draw('gcd', 8000, {'min_value': 2, 'max_value': 20})],
  ),
  'products': _Definition(
    shots='3 * 4 = 12;12 * 5 = 60;7 * 8 = 56;11 * 14 = 154',
    text='{expression} =',
    stratum=_product_stratum,
    draws=[
      _Draw('products', 4000, _TWO | _DIGITS),
      _Draw('basic_arithmetic', 10_000, _TWO | _FLAT | {'operators': '*'}),
    ],
  ),
  'basic_arithmetic': _Definition(
    shots='5 - 3 = 2;4 * 2 + 1 = 9;6 / 3 = 2;( 2 + -7 ) + 4 = -1',
    text='{expression} =',
    stratum=_terms_stratum,
    draws=[_Draw('basic_arithmetic', 8000, _SHORT)],
  ),
  'simple_equations': _Definition(
    shots='3*x + 5 = 11, x = 2;8*b = 64, b = 8;'
    '4*n - 7 = 13, n = 5;k + 6 = 7, k = 1',
    text='{equation}, {variable} =',
    stratum=_equation_stratum,
    draws=[
      _Draw('simple_equations', 4000, _TWO | {'min_value': 1, 'max_value': 9})
    ],
  ),
  'chain_sum': _Definition(
    shots='1 + 3 + 2 = 6;7 - 2 + 4 = 9;3 - 8 - 1 = -6;5 + 9 - 4 = 10',
    text='{expression} =',
    stratum=_operators_stratum,
    draws=[_Draw('chain_sum', 8000, _THREE | _DIGIT)],
  ),
  'addition': _Definition(stratum=lambda *_: '2+2', enumerated=_additions),
}
TASKS = tuple(_DEFINITIONS)


def load_task(
  name: str,
  *,
  train_size: int = 6000,
  evaluation_size: int = 240,
  seed: int = 0,
) -> Task:
  """Builds a task; the same arguments give the same questions everywhere.

  A shorter `train` or `evaluation` is the start of a longer one. Strata take
  turns, so sizes that they do not divide leave a mix uneven by one question;
  a stratum that runs out of distinct questions starts again.

  Args:
    name: One of `TASKS`.
    train_size: Number of questions in `train`.
    evaluation_size: Number of questions in `evaluation`.
    seed: Chooses which distinct questions are evaluated on, and the order.

  Raises:
    TaskError: If the name is unknown, a size is not positive, or one constant
      answer would earn `MAX_CONSTANT_SHARE` or more in training.
  """
  if name not in _DEFINITIONS:
    raise TaskError(f'unknown task {name!r}; there are: {", ".join(TASKS)}')
  if min(train_size, evaluation_size) < 1:
    raise TaskError(
      'sizes must be positive, got '
      f'train_size={train_size}, evaluation_size={evaluation_size}'
    )
  train_strata, evaluation_strata = _split(name, seed)
  judged = _in_turns(train_strata, max(train_size, _JUDGED))
  answer, share = best_constant(judged)
  if share >= MAX_CONSTANT_SHARE:
    raise TaskError(
      f'{name}: always answering {answer!r} would earn {share:.3f}, '
      f'{MAX_CONSTANT_SHARE} or more'
    )
  train = judged[:train_size]
  return Task(
    name=name,
    train=train,
    evaluation=_in_turns(evaluation_strata, evaluation_size),
    best_constant=best_constant(train),
  )


@functools.cache
def _pool(name: str) -> dict[str, tuple[str, str]]:
  """Returns `{text: (answer, stratum)}` of all distinct questions but shots."""
  definition = _DEFINITIONS[name]
  if definition.enumerated is not None:
    items = definition.enumerated()
  else:
    items = (
      (definition.text.format_map(item['metadata']), item['answer'])
      for draw in definition.draws
      for item in draw.data_set()
    )
  shots = {
    _group(shot.rpartition('=')[0] + '=') for shot in definition.shot_lines()
  }
  pool = {}
  for text, answer in items:
    stratum = definition.stratum(text, answer)
    if stratum is not None and _group(text) not in shots:
      pool[text] = (answer, stratum)
  return pool


def _group(text: str) -> str:
  """Returns what a question shares with its like: order of terms, letters."""
  text = re.sub('[a-z]', 'x', text)
  skeleton = re.sub(r'\d+', '#', text)
  if set(re.findall(r'[-+*/]', skeleton)) in (set(), {'+'}, {'*'}):
    return skeleton + ' '.join(sorted(_numbers(text)))
  return text


def _split(
  name: str, seed: int
) -> tuple[list[list[Question]], list[list[Question]]]:
  """Returns the strata of distinct questions to train and to evaluate on."""

  def rank(text: str) -> bytes:  # a shuffle that no library version changes
    return hashlib.sha256(f'{seed}:{text}'.encode()).digest()

  strata = collections.defaultdict(list)
  for text, (answer, stratum) in _pool(name).items():
    strata[stratum].append((text, answer))
  train, evaluation = [], []
  for stratum, members in sorted(strata.items()):
    groups = sorted({_group(text) for text, _ in members}, key=rank)
    held_out = set(groups[: max(1, round(len(groups) * _EVALUATION_SHARE))])
    train.append([])
    evaluation.append([])
    for text, answer in sorted(members, key=lambda member: rank(member[0])):
      prompt = '\n'.join((*_DEFINITIONS[name].shot_lines(), text))
      side = evaluation if _group(text) in held_out else train
      side[-1].append(Question(prompt, answer, stratum))
  return train, evaluation


def _in_turns(
  strata: Sequence[Sequence[Question]], size: int
) -> tuple[Question, ...]:
  questions = []
  for i in range(size):
    turn, stratum = divmod(i, len(strata))
    questions.append(strata[stratum][turn % len(strata[stratum])])
  return tuple(questions)


def best_constant(questions: Sequence[Question]) -> tuple[str, float]:
  """The most frequent answer, and its share."""
  counts = collections.Counter(q.answer for q in questions)
  answer, count = counts.most_common(1)[0]
  return answer, count / len(questions)


def score(
  task: Task,
  questions: Sequence[Question],
  completions: Sequence[str],
  terminated: Sequence[bool],
) -> tuple[np.ndarray, int]:
  """Scores completions; a reward that raises earns 0.

  Returns:
    The rewards, float32 `[B]`, and how many of them failed: raised, or were
    no number up to 1e9. The first failure is reported as a warning.
  """
  rewards = np.zeros(len(questions), np.float32)
  failures = 0
  verdicts = task.verdicts(questions, completions, terminated)
  for i, verdict in enumerate(verdicts):
    try:
      if isinstance(verdict, Exception):
        raise verdict
      if not abs(reward := float(verdict)) <= _LARGEST:
        raise ValueError(f'the reward is {reward}')
      rewards[i] = reward
    except Exception as error:  # a user's reward may be anything
      if not failures:
        warnings.warn(
          f'reward of task {task.name} failed and counts as 0: '
          f'{type(error).__name__}: {error}',
          stacklevel=2,
        )
      failures += 1
  return rewards, failures


def data_order(task_size: int, seed: int, start: int, count: int) -> list[int]:
  """Returns indices of training questions at positions from `start` on.

  Position p lies in epoch p // task_size, a permutation drawn from the seed
  and the epoch alone: a resumed run goes on where it stopped.

  >>> data_order(5, seed=0, start=3, count=4) == data_order(5, 0, 0, 7)[3:]
  True
  """
  if task_size < 1 or min(seed, start, count) < 0:
    raise ValueError(
      'expected task_size >= 1 and seed, start, count >= 0, got '
      f'{task_size}, {seed}, {start}, {count}'
    )
  order = []
  while len(order) < count:
    epoch, offset = divmod(start + len(order), task_size)
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    permutation = generator.permutation(task_size).tolist()
    order += permutation[offset : offset + count - len(order)]
  return order


def self_check(task: Task) -> None:
  """Checks that right answers earn 1 and anything else 0.

  Raises:
    TaskError: With the first completion that earns the wrong reward.
  """
  questions = dict.fromkeys(task.train + task.evaluation)  # distinct, in order
  answers = list(dict.fromkeys(q.answer for q in questions))
  stride = -(-len(answers) // _OTHER_ANSWERS)
  for i, question in enumerate(questions):
    gold = question.answer
    garbage = ['', ' ', 'abc', '0' * 50, '\x00', (gold * 10_240)[:10_240]]
    garbage += [gold + '0', '1 ' + gold, gold + ' or 7']
    garbage += [a for a in answers[i % stride :: stride] if a != gold]
    right = list(task.accepted(question))
    completions = right + garbage + right
    terminated = [True] * len(right + garbage) + [False] * len(right)
    want = [1.0] * len(right) + [0.0] * len(garbage + right)
    got, failures = score(
      task, [question] * len(completions), completions, terminated
    )
    if failures or not np.array_equal(got, want):
      j = next((j for j, w in enumerate(want) if got[j] != w), 0)
      raise TaskError(
        f'{task.name}: {question.prompt!r} answered {completions[j][:60]!r} '
        f'(terminated: {terminated[j]}) must earn {want[j]}, got {got[j]}; '
        f'{failures} rewards failed'
      )
  definition = _DEFINITIONS.get(task.name)
  for draw in definition.draws if definition else ():
    scorer = draw.data_set()
    for question in questions:
      entry = {'answer': question.answer}
      if not scorer.score_answer(question.answer, entry) >= 0.999:
        raise TaskError(
          f'{task.name}: the scorer of {draw.generator} refuses '
          f'{question.answer!r} for {question.prompt!r}'
        )
