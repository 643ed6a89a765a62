import collections
import math
import os
import pathlib
import re
import subprocess
import sys
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest

from train import tasks
from train.tasks import Question, Task, TaskError, data_order, load_task

ROOT = pathlib.Path(__file__).parents[2]
SHOTS = dict.fromkeys(tasks.TASKS, 4) | {'arithmetic': 1, 'addition': 0}
each_task = pytest.mark.parametrize('name', tasks.TASKS)


@pytest.fixture(scope='module')
def loaded():
  return {name: load_task(name) for name in tasks.TASKS}


def exact(expression):
  """Value of an arithmetic expression, in fractions."""
  assert re.fullmatch(r'[-+*/() \d]+', expression)
  return eval(re.sub(r'(\d+)', r'Fraction(\1)', expression), {}, FRACTION)


FRACTION = {'Fraction': Fraction}


def is_right(line):
  """Whether a line `question answer` is true, worked out independently."""
  if match := re.fullmatch(r'gcd\((\d+), (\d+)\) = (\d+)', line):
    a, b, answer = map(int, match.groups())
    return math.gcd(a, b) == answer
  if match := re.fullmatch(r'(.+) = (-?\d+), ([a-z]) = (\d+)', line):
    left, right, letter, answer = match.groups()
    solutions = [
      x
      for x in range(-99, 100)
      if exact(left.replace(letter, f'({x})')) == (int(right))
    ]
    return solutions == [int(answer)]
  left, answer = re.fullmatch(r'(.+?) ?= ?(-?\d+)', line).groups()
  return exact(left) == int(answer)


def solved(question):
  return (question.prompt + ' ' + question.answer).splitlines()


def one_digit_or_two(text):
  return sorted(len(n) for n in re.findall(r'\d+', text))


@each_task
def test_every_answer_and_every_shot_is_right(loaded, name):
  task = loaded[name]
  lines = {line for q in task.train + task.evaluation for line in solved(q)}
  sample = sorted(lines)[:: 7 if name == 'simple_equations' else 1]
  assert [line for line in sample if not is_right(line)] == []


@each_task
def test_prompts_are_fixed_shots_and_a_question_up_to_the_equals_sign(
  loaded, name
):
  questions = loaded[name].train + loaded[name].evaluation
  assert all(q.prompt.endswith('=') for q in questions)
  assert len({tuple(q.prompt.splitlines()[:-1]) for q in questions}) == 1
  assert {q.prompt.count('\n') for q in questions} == {SHOTS[name]}


@each_task
def test_train_evaluation_and_shots_share_no_question(loaded, name):
  task = loaded[name]
  train = {q.prompt.splitlines()[-1] for q in task.train}
  evaluation = {q.prompt.splitlines()[-1] for q in task.evaluation}
  shots = {
    shot.rpartition(' ')[0] for shot in task.train[0].prompt.splitlines()[:-1]
  }
  assert train and evaluation
  assert not train & evaluation
  assert not shots & (train | evaluation)


@pytest.mark.parametrize('name', ['addition', 'gcd', 'products'])
def test_the_order_of_the_operands_does_not_leak_an_evaluation_question(
  loaded, name
):
  def pairs(questions):
    return {
      tuple(sorted(re.findall(r'\d+', q.prompt.splitlines()[-1])))
      for q in questions
    }

  assert not pairs(loaded[name].train) & pairs(loaded[name].evaluation)


@each_task
def test_strata_are_even_to_one_question(loaded, name):
  for questions in (loaded[name].train, loaded[name].evaluation):
    counts = collections.Counter(q.difficulty for q in questions).values()
    assert max(counts) - min(counts) <= 1


def test_strata_are_what_their_names_say(loaded):
  for q in loaded['products'].train:
    digits = one_digit_or_two(q.prompt.splitlines()[-1])
    assert q.difficulty == f'{digits[0]}x{digits[1]}'
  strata = {name: {q.difficulty for q in loaded[name].train} for name in SHOTS}
  assert strata['products'] == {'1x1', '1x2', '2x2'}
  assert strata['arithmetic'] == {'1+1', '2+1', '1x1'}
  assert strata['chain_sum'] == {'++', '+-', '-+', '--'}
  assert strata['basic_arithmetic'] == {'2 terms', '3 terms'}
  assert strata['addition'] == {'2+2'}
  assert len(strata['simple_equations']) == 3 * 9


@each_task
def test_no_constant_answer_earns_15_percent(loaded, name):
  task = loaded[name]
  for questions in (task.train, task.evaluation):
    shares = collections.Counter(q.answer for q in questions)
    assert max(shares.values()) / len(questions) < 0.15
  answer, share = task.best_constant
  counts = collections.Counter(q.answer for q in task.train)
  assert counts[answer] == max(counts.values())
  assert share == counts[answer] / len(task.train)


def test_a_task_that_a_constant_answer_solves_is_refused(monkeypatch):
  definition = tasks._Definition(
    stratum=lambda *_: 'all',
    enumerated=lambda: ((f'{i} - {i}=', '0') for i in range(100)),
  )
  monkeypatch.setitem(tasks._DEFINITIONS, 'nothing', definition)
  with pytest.raises(TaskError, match="always answering '0' would earn 1.000"):
    load_task('nothing')


def test_addition_is_all_pairs_of_two_digit_numbers_split_three_to_one():
  task = load_task('addition', train_size=6075, evaluation_size=2025)
  texts = {q.prompt for q in task.train + task.evaluation}
  # 4095 unordered pairs, a quarter held out; sizes in ordered pairs vary by
  # the number of doubles among them: at most 90.
  full = load_task('addition', train_size=7000, evaluation_size=3000)
  assert abs(len(set(full.train)) - 6075) <= 90
  assert len(set(full.train)) + len(set(full.evaluation)) == 90 * 90
  assert texts <= {f'{a}+{b}=' for a in range(10, 100) for b in range(10, 100)}


@each_task
def test_the_self_check_passes(loaded, name):
  tasks.self_check(loaded[name])


@pytest.mark.parametrize('accept_too', ['', ' ', 'abc', '0' * 50, '\x00'])
def test_the_self_check_finds_a_reward_for_garbage(loaded, accept_too):
  @dataclass(frozen=True)
  class Generous(Task):
    def reward(self, question, completion, *, terminated):
      return float(
        terminated and completion in (accept_too, *self.accepted(question))
      )

  task = Generous('generous', *_parts(loaded['gcd']))
  with pytest.raises(TaskError, match='generous.*must earn 0.0, got 1.0'):
    tasks.self_check(task)


def test_the_self_check_finds_a_reward_that_looks_for_a_substring(loaded):
  @dataclass(frozen=True)
  class Substring(Task):
    def reward(self, question, completion, *, terminated):
      return float(terminated and question.answer in completion)

  with pytest.raises(TaskError, match='must earn 0.0, got 1.0'):
    tasks.self_check(Substring('substring', *_parts(loaded['gcd'])))


def _parts(task):
  return task.train, task.evaluation, task.best_constant


def test_an_answer_earns_1_with_and_without_one_leading_space_if_it_ended():
  question = Question('1 + 3 =', '4', '1+1')
  task = Task('one', (question,), (question,), ('4', 1.0))
  assert task.accepted(question) == ('4', ' 4')
  for completion in ('4', ' 4'):
    assert task.reward(question, completion, terminated=True) == 1.0
    assert task.reward(question, completion, terminated=False) == 0.0
  for completion in ('  4', '4 ', '\t4', '4.0', '+4', '04', '4=4', '-4'):
    assert task.reward(question, completion, terminated=True) == 0.0


def test_scores_are_float32_in_order():
  questions = [Question(f'{i} + 0 =', str(i), '1+1') for i in range(5)]
  task = Task('five', tuple(questions), (), ('0', 0.2))
  rewards, failures = tasks.score(
    task, questions, ['0', '2', ' 2', '3', ''], [True, True, True, False, True]
  )
  assert rewards.dtype == np.float32
  assert rewards.tolist() == [1, 0, 1, 0, 0]
  assert failures == 0


def test_a_reward_that_fails_earns_0_is_counted_and_warned_of_once():
  @dataclass(frozen=True)
  class Fragile(Task):
    def reward(self, question, completion, *, terminated):
      return {'nan': math.nan, 'text': 'much'}.get(completion) or (
        1 / int(completion)
      )

  question = Question('1 =', '1', 'all')
  task = Fragile('fragile', (question,), (), ('1', 1.0))
  completions = ['1', '0', 'x', 'nan', 'text', '2', '1']
  with pytest.warns(UserWarning) as caught:
    rewards, failures = tasks.score(task, [question] * 7, completions, [1] * 7)
  assert rewards.tolist() == [1, 0, 0, 0, 0, 0.5, 1]
  assert failures == 4
  assert len(caught) == 1
  assert 'fragile' in str(caught[0].message)
  assert 'ZeroDivisionError: division by zero' in str(caught[0].message)


def test_lists_of_unequal_length_are_refused():
  question = Question('1 =', '1', 'all')
  task = Task('one', (question,), (), ('1', 1.0))
  with pytest.raises(ValueError, match='shorter'):
    tasks.score(task, [question] * 2, ['1'], [True] * 2)


def test_another_process_with_another_hash_seed_makes_the_same_questions(
  loaded,
):
  program = (
    'from train.tasks import *\n'
    'for name in TASKS: print(name, load_task(name).fingerprint())'
  )
  result = subprocess.run(
    [sys.executable, '-c', program],
    cwd=ROOT,
    env=os.environ | {'PYTHONHASHSEED': '1234'},
    capture_output=True,
    text=True,
    check=True,
  )
  want = [f'{name} {task.fingerprint()}' for name, task in loaded.items()]
  assert result.stdout.splitlines() == want


def test_the_seed_changes_the_split_and_a_longer_task_begins_like_a_shorter():
  task = load_task('gcd', train_size=500, evaluation_size=41)
  longer = load_task('gcd', train_size=701, evaluation_size=97)
  assert longer.train[:500] == task.train
  assert longer.evaluation[:41] == task.evaluation
  other = load_task('gcd', train_size=500, evaluation_size=41, seed=1)
  assert set(other.evaluation) != set(task.evaluation)
  prints = {t.fingerprint() for t in (task, longer, other)}
  assert len(prints) == 3


def test_an_unknown_task_or_a_size_of_nothing_is_an_error_that_helps():
  with pytest.raises(TaskError, match='mathematics') as caught:
    load_task('mathematics')
  assert all(name in str(caught.value) for name in tasks.TASKS)
  with pytest.raises(TaskError, match='train_size=0'):
    load_task('gcd', train_size=0)


def test_each_epoch_of_the_data_order_is_another_permutation():
  order = data_order(13, seed=5, start=0, count=13 * 4)
  epochs = [order[i : i + 13] for i in range(0, len(order), 13)]
  assert all(sorted(epoch) == list(range(13)) for epoch in epochs)
  assert len(set(map(tuple, epochs))) == 4
  assert data_order(13, seed=6, start=0, count=13) != epochs[0]


def test_any_slice_of_the_data_order_agrees_with_the_whole():
  whole = data_order(7, seed=3, start=0, count=40)
  for start in range(30):
    for count in (0, 1, 6, 7, 8, 10):
      assert data_order(7, 3, start, count) == whole[start : start + count]


@pytest.mark.parametrize(
  'arguments', [(0, 0, 0, 1), (5, -1, 0, 1), (5, 0, -1, 1)]
)
def test_a_data_order_of_nothing_or_before_the_start_is_an_error(arguments):
  with pytest.raises(ValueError, match='expected task_size >= 1'):
    data_order(*arguments)
