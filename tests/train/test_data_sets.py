"""Tasks from JSONL files and reasoning-gym: loading, and whole runs."""

import ast
import json
import pathlib

import numpy as np
import pytest

from train import data_sets, loop, policy, tasks, verifiers
from train.config import Config, ConfigError
from train.tasks import TaskError

GSM8K = pathlib.Path(__file__).parents[3] / 'shared/data/gsm8k'


@pytest.fixture
def write(tmp_path):
  def write(*rows, name='data.jsonl'):
    lines = [r if isinstance(r, str) else json.dumps(r) for r in rows]
    (tmp_path / name).write_text('\n'.join(lines) + '\n')
    return tmp_path / name

  return write


def sums(count):
  return [
    {'question': f'{i}+1=', 'answer': f'#### {i + 1}'} for i in range(count)
  ]


def test_gold_answers_are_found_in_gsm8k_and_math_style(write):
  task = data_sets.load_jsonl(
    write(
      {'question': 'a', 'answer': 'so 1+1 = 2\n#### 1,234'},
      {'problem': 'b', 'solution': r'hence $\boxed{\frac{1}{2}}$.'},
      {'prompt': 'c', 'answer': 7},
      '',
      {'question': 'a', 'answer': '#### 5'},  # asked before
    ),
    held_out=write(*sums(3), name='test.jsonl'),
    template='Q: {question}',
    stops=('\n',),
  )
  assert {q.prompt: q.answer for q in task.train} == {
    'Q: a': '1234',
    'Q: b': r'\frac{1}{2}',
    'Q: c': '7',
  }
  assert sorted(q.prompt for q in task.evaluation) == [
    'Q: 0+1=', 'Q: 1+1=', 'Q: 2+1='
  ]  # fmt: skip
  assert task.stops == ('\n',) and not task.listed


def test_training_and_held_out_questions_are_distinct(write):
  task = data_sets.load_jsonl(write(*sums(100)))
  train, held_out = (
    {q.prompt for q in questions} for questions in (task.train, task.evaluation)
  )
  assert (len(train), len(held_out)) == (90, 10) and not train & held_out
  # A question keeps its side whatever the order of the file.
  other = data_sets.load_jsonl(write(*sums(100)[::-1], name='b.jsonl'))
  assert {q.prompt for q in other.evaluation} == held_out
  # One that both files ask is not trained on.
  both = data_sets.load_jsonl(
    write(*sums(9), name='c.jsonl'), held_out=write(*sums(3), name='d.jsonl')
  )
  assert len(both.train) == 6


@pytest.mark.parametrize(
  'row, message',
  [
    ('{"question": "a", ', 'line 2: Expecting property name'),
    ('[1, 2]', 'line 2: expected a JSON object'),
    ('{"answer": "1"}', 'line 2: there is none of the fields question, pro'),
    ('{"question": "a"}', 'line 2: there is none of the fields answer, sol'),
    ('{"question": "", "answer": "1"}', "line 2: question is '', expected"),
    ('{"question": "a", "answer": ""}', "line 2: answer is '', expected text"),
    ('{"question": "a", "answer": null}', 'line 2: answer is None, expected'),
    ('{"question": "a", "answer": "#### "}', 'line 2: '),
  ],
)
def test_a_broken_line_is_named(write, row, message):
  with pytest.raises(TaskError, match=message):
    data_sets.load_jsonl(write(sums(1)[0], row, *sums(3)))


def test_only_newlines_end_a_line(write):
  # JSON strings may hold what Unicode calls a line boundary.
  rows = [{'question': f'{i}+1\u2028\x85=', 'answer': i} for i in range(5)]
  rows = [json.dumps(row, ensure_ascii=False) for row in rows]
  task = data_sets.load_jsonl(write(*rows[:-1], rows[-1] + '\r'))
  questions = {q.prompt: q.answer for q in task.train + task.evaluation}
  assert questions == {f'{i}+1\u2028\x85=': str(i) for i in range(5)}


def test_files_and_rewards_that_do_not_exist_are_refused(write, tmp_path):
  with pytest.raises(TaskError, match='cannot read .*nowhere.jsonl'):
    data_sets.load_jsonl(tmp_path / 'nowhere.jsonl')
  with pytest.raises(TaskError, match='expected two questions or more, got 1'):
    data_sets.load_jsonl(write(*sums(1)))
  with pytest.raises(TaskError, match='has no {question} in it'):
    data_sets.load_jsonl(write(*sums(9)), template='Q')
  for reward in ('nothing', 'no_such_module:f', 'math:no_such_function'):
    with pytest.raises(TaskError):
      data_sets.load_jsonl(write(*sums(9)), reward=reward)


def test_verdicts_are_those_of_math_verify_and_cut_off_earns_nothing(write):
  task = data_sets.load_jsonl(write(*sums(9)))
  question = tasks.Question('q', '12', '')
  completions = [' so it is 12', 'it is \\boxed{12}', '13', '', '12']
  rewards, failures = tasks.score(
    task, [question] * 5, completions, [True, True, True, True, False]
  )
  np.testing.assert_array_equal(rewards, [1, 1, 0, 0, 0])
  assert failures == 0


def test_a_data_set_of_reasoning_gym_pays_its_own_answers():
  task = data_sets.load_gym('chain_sum', config={'max_terms': 3})
  assert not {q.prompt for q in task.train} & {
    q.prompt for q in task.evaluation
  }
  asked = task.evaluation[:3]
  gold = [str(ast.literal_eval(q.answer)['answer']) for q in asked]
  rewards, failures = tasks.score(
    task, asked * 2, [*gold, *(g + '1' for g in gold)], [True] * 6
  )
  np.testing.assert_array_equal(rewards, [1, 1, 1, 0, 0, 0])
  assert failures == 0
  assert len(task.best_constant[0]) < 5  # an answer, not a whole entry


def test_how_many_questions_are_drawn_is_a_setting():
  few = data_sets.load_gym('chain_sum', config={'size': 31})
  assert (len(few.train), len(few.evaluation)) == (28, 3)
  other = data_sets.load_gym('chain_sum', config={'size': 31, 'seed': 99})
  assert not {q.prompt for q in few.train} & {q.prompt for q in other.train}


# The one is in the order of a set of strings, the other random.
@pytest.mark.parametrize('name', ['ransom_note', 'list_functions'])
def test_every_process_draws_the_same_questions(name, monkeypatch):
  prints = set()
  for seed in '12':
    monkeypatch.setenv('PYTHONHASHSEED', seed)
    task = data_sets.load_gym(name, config={'size': 20})
    prints.add(task.fingerprint())
  assert len(prints) == 1


# What is not used, and why.
REFUSED = {
  'composite': 'Must specify at least one dataset',
  'game_of_life_halting': "its scorer pays for 'abc'",  # bool('abc') is True
  'gsm_symbolic': 'cannot be written as a Python literal',  # fractions
  **dict.fromkeys(
    'boxnet graph_color propositional_logic rubiks_cube rush_hour'.split(),
    'it has no answers to check its scorer by',
  ),
}


@pytest.mark.slow
def test_every_data_set_of_reasoning_gym_checks_itself_or_is_refused():
  from reasoning_gym import factory  # here because the import takes seconds

  names = sorted(factory.DATASETS)
  assert len(names) > 90
  refused = {}
  for name in names:
    try:
      entries = data_sets.draw_gym(name, {'size': 40})
    except TaskError as error:
      refused[name] = str(error)
      continue
    verifier = verifiers.ReasoningGymVerifier(name)
    for question, entry in entries.items():
      gold = str(ast.literal_eval(entry)['answer'])
      assert verifier(question, gold, entry) == 1, (name, gold)
  assert refused.keys() == REFUSED.keys()
  for name, message in REFUSED.items():
    assert message in refused[name]


@pytest.mark.parametrize(
  'name, config, message',
  [
    ('no_such_set', {}, 'reasoning_gym:no_such_set: '),
    ('chain_sum', {'no_such_key': 1}, 'reasoning_gym:chain_sum: '),
    ('chain_sum', {'min_terms': 9, 'max_terms': 2}, 'gym:chain_sum: '),
  ],
)
def test_unknown_data_sets_and_settings_are_refused(name, config, message):
  with pytest.raises(TaskError, match=message):
    data_sets.load_gym(name, config=config)


REWARD = """
import time

def even(prompt, completion, answer):
  assert prompt.endswith('=') and answer.startswith('####')
  if completion[-1:] == '1':
    raise ValueError('one')
  if completion[-1:] == '3':
    time.sleep(99)
  if completion[-1:] == '5':
    return [1.0, 2.0]
  return float(completion[-1:] in tuple('02468'))
"""


@pytest.mark.filterwarnings('ignore:reward of task')
def test_a_run_on_a_file_with_a_users_reward(
  runner, write, tmp_path, monkeypatch
):
  (tmp_path / 'my_reward.py').write_text(REWARD)
  monkeypatch.chdir(tmp_path)
  flags = dict(
    task=str(write(*sums(40))),
    template='{question}',
    stop=('\n', '=='),
    reward='my_reward:even',
    reward_timeout=1.0,
    eval_questions=3,
    arm='fp32',
    kl_every=0,
    steps=2,
    eval_every=1,
  )
  out = tmp_path / 'whole'
  summary = loop.run(runner.config(out=out, **flags))
  records = runner.read(out)
  assert 0 < np.mean([r['reward_mean'] for r in records]) < 1
  assert summary['reward_failures'] > 0  # contained
  assert summary['eval_questions'] == 3
  config = json.loads((out / 'config.json').read_text())
  assert config['stop'] == ['\n', '=='] and config['eval_data'] is None
  # Resumed from the command line, where the flags come from the folder.
  part = tmp_path / 'part'
  loop.run(runner.config(out=part, **flags | {'steps': 1}))
  assert runner.main(resume=True, out=part, steps=2) == 0
  assert runner.timeless(part) == runner.timeless(out)


@pytest.mark.parametrize(
  'flags, message',
  [
    (dict(task='maths'), "unknown task 'maths'; .* or reasoning_gym:NAME"),
    (dict(reward='a:b'), 'reward and eval_data need a JSONL file as task'),
    (dict(task_config='['), 'task_config: '),
    (dict(task_config='[1]'), 'task_config: expected an object'),
    (dict(stop=('a', '')), 'a stop string must not be empty'),
    (dict(reward_timeout=0.0), 'reward_timeout: expected a positive number'),
  ],
)
def test_flags_of_tasks_that_make_no_sense_are_refused(flags, message):
  with pytest.raises(ConfigError, match=message):
    Config(**flags)


def test_the_small_models_are_not_taught_a_users_data(write):
  task = data_sets.load_jsonl(write(*sums(9)))
  with pytest.raises(ConfigError, match='warmed up on built-in tasks only'):
    policy.load_policy('tiny', task)


@pytest.mark.skipif(
  not GSM8K.exists(), reason='GSM8K is not beside the checkout'
)
def test_gsm8k_loads_whole():
  task = data_sets.load_jsonl(
    GSM8K / 'train.jsonl', held_out=GSM8K / 'test.jsonl'
  )
  assert (len(task.train), len(task.evaluation)) == (7473, 1319)
  assert task.train[0].answer == '72'
