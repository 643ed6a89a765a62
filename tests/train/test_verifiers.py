import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from train.verifiers import (
  FunctionVerifier,
  MathVerifier,
  ReasoningGymVerifier,
  VerifierError,
  VerifierPool,
  check_golds,
  encode_entry,
  extract_gold,
  load_function,
)

ROOT = pathlib.Path(__file__).parents[2]
GSM8K = ROOT.parent / 'shared/data/gsm8k/train.jsonl'
LIMIT = 1.0  # seconds per completion

REWARDS = """
import fractions, os, signal, time

def judge(prompt, completion, answer):
  return eval(completion)

def hang():
  while True:
    pass

def fail(error):
  raise error

class Unpicklable(Exception):
  def __init__(self, one, two):
    super().__init__(f'{one} and {two}')

def ignores_ctrl_c():
  blocked = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
  return blocked and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
"""


@pytest.fixture(scope='module')
def rewards_folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('rewards')
  (folder / 'user_rewards.py').write_text(REWARDS)
  return folder


@pytest.fixture(scope='module')
def pool(rewards_folder):
  with pytest.MonkeyPatch.context() as patch:
    patch.chdir(rewards_folder)
    pool = VerifierPool(
      FunctionVerifier('user_rewards:judge'), workers=2, timeout=LIMIT
    )
  with pool:
    yield pool


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  return tmp_path


def judge(pool, *completions):
  none = [''] * len(completions)
  return pool(none, completions, none)


@pytest.mark.parametrize(
  ('text', 'gold'),
  [
    ('She sold <<48/2=24>>24.\n#### 72', '72'),
    ('#### 1,234,567', '1234567'),
    ('#### $1,200.50 ', '1200.50'),
    ('#### \\$5', '5'),
    ('#### 1\n#### -2', '-2'),
    ('#### (1,2)', '(1,2)'),
    ('Not \\boxed{3} but \\boxed{\\frac{3}{4}}.', '\\frac{3}{4}'),
    ('\\boxed{\\{1,2\\}}', '\\{1,2\\}'),
    ('\\boxed{5} and \\boxed{6', '5'),
    ('\\boxed{[0,1\\}}', '[0,1\\}'),
    ('\\boxed{8} #### 9', '9'),
    (' 3/4\n', '3/4'),
    ('####', ''),
    ('', ''),
  ],
)
def test_gold_answer_is_what_the_text_ends_with(text, gold):
  assert extract_gold(text) == gold


READABLE = (
  *('72', '-3', '+5', '1,234', '0.5', '3/4', '10/07', '1,234.5'),
  *('\\frac{3}{4}', '$\\frac34$', '2\\sqrt{3}', 'x^2+1', '(1, 2]', '50\\%'),
  *('\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}', '\\text{A}', '1\n+ 2'),
)
UNREADABLE = ('', ' \n', '\\frac{1}{', '???', ':-)', '&', '{' * 3000)


def test_golds_that_no_completion_can_match_are_found():
  answers = [*UNREADABLE, *READABLE]
  found = check_golds(answers, workers=1, timeout=3 * LIMIT)
  assert found[:2] == ['the gold answer is empty'] * 2
  for answer, problem in zip(UNREADABLE[2:], found[2:], strict=False):
    assert f'cannot read the gold answer {answer!r:.50}' in problem
  assert 'no verdict within 3 s' in found[6]  # it would take minutes
  assert found[7:] == [None] * len(READABLE)


@pytest.mark.parametrize('answer', READABLE)
def test_a_gold_that_can_be_read_pays_for_itself(answer):
  box = ' '.join(answer.strip('$').split())
  assert MathVerifier()('', f'So it is $\\boxed{{{box}}}$.', answer) == 1.0


@pytest.mark.skipif(not GSM8K.exists(), reason='needs GSM8K')
def test_golds_of_gsm8k_can_be_read():
  with GSM8K.open() as file:
    golds = [extract_gold(json.loads(next(file))['answer']) for _ in range(500)]
  assert check_golds(golds, workers=1, timeout=LIMIT) == [None] * 500
  assert golds[:2] == ['72', '10']


@pytest.mark.parametrize(
  ('completion', 'answer', 'reward'),
  [
    ('The answer is 72.', '72', 1.0),
    ('24 + 48 = 72\n#### 72', '72', 1.0),
    ('First 71, then \\boxed{72}', '72', 1.0),
    ('\\boxed{\\$72.00}', '72', 1.0),
    ('It costs 1,234 dollars', '1234', 1.0),
    ('It costs 1234 dollars', '1,234', 1.0),
    ('\\boxed{0.5}', '1/2', 1.0),
    ('1/2', '0.5', 1.0),
    ('$\\frac12$', '0.5', 1.0),
    ('\\boxed{\\dfrac{6}{8}}', '\\frac{3}{4}', 1.0),
    ('\\boxed{(x+1)^2}', 'x^2+2x+1', 1.0),
    ('\\boxed{-3}', '-3', 1.0),
    ('\\boxed{3}', '-3', 0.0),
    ('\\boxed{71}', '72', 0.0),
    ('72 is wrong, so \\boxed{71}', '72', 0.0),
    ('\\boxed{72, 73}', '72', 0.0),
    ('\\boxed{}', '72', 0.0),
    ('\\boxed{\\boxed{{{', '72', 0.0),
    ('seventy-two', '72', 0.0),
    ('}{ \\frac $$ \x00 \ud800 ???', '72', 0.0),
    ('7' * 10_000, '72', 0.0),
    ('', '72', 0.0),
    (' \n', '72', 0.0),
  ],
)
def test_a_final_answer_equal_to_the_gold_is_paid(completion, answer, reward):
  assert MathVerifier()('', completion, answer) == reward


# JSON would lose arc_agi's tuples; knights_knaves holds NumPy's strings.
@pytest.mark.parametrize('name', ['chain_sum', 'arc_agi', 'knights_knaves'])
def test_a_data_set_pays_its_own_answers_and_not_garbage(name):
  import reasoning_gym

  verifier = ReasoningGymVerifier(name, (('seed', 5), ('size', 3)))
  for entry in reasoning_gym.create_dataset(name, seed=5, size=3):
    answer = encode_entry(entry)
    assert verifier('', f' {entry["answer"]}\n', answer) == 1.0
    assert verifier('', 'garbage', answer) == 0.0
    assert verifier('', '', answer) == 0.0


def test_an_entry_without_a_literal_is_refused():
  with pytest.raises(ValueError, match='literal'):
    encode_entry({'answer': '1', 'metadata': {'object': object()}})


def test_a_user_function_is_found_in_the_current_directory(in_folder):
  (in_folder / 'found_here.py').write_text('def reward(*texts): return 0.25')
  assert load_function('found_here:reward')('a', 'b', 'c') == 0.25


@pytest.mark.parametrize(
  ('target', 'message'),
  [
    ('broken_module', 'module:function'),
    (':reward', 'module:function'),
    ('broken_module:', 'module:function'),
    ('broken_module:a:b', 'module:function'),
    ('./broken_module.py:reward', 'module:function'),
    ('no_such_module:reward', "no module named 'no_such_module'"),
    ('json.no_such_module:reward', "no module named 'json.no_such_module'"),
    ('broken_module:reward', r'ZeroDivisionError.*broken_module\.py:1'),
    ('needy_module:reward', "importing needy_module.*'no_such_module'"),
    ('json:no_such_function', "json has no 'no_such_function'"),
    ('json:__name__', 'not callable but of type str'),
  ],
)
def test_a_wrong_target_is_refused_with_the_reason(in_folder, target, message):
  (in_folder / 'broken_module.py').write_text('1 / 0')
  (in_folder / 'needy_module.py').write_text('import no_such_module')
  with pytest.raises(ValueError, match=message):
    load_function(target)


def test_a_worker_does_not_load_what_it_may_not_need():
  code = (
    'import sys, train.verifiers; heavy = {"jax", "flax", "numpy", "sympy",'
    ' "math_verify", "reasoning_gym"}; sys.exit(str(heavy & set(sys.modules))'
    ' if heavy & set(sys.modules) else 0)'
  )
  subprocess.run([sys.executable, '-c', code], cwd=ROOT, check=True)


def test_rewards_come_in_order(pool):
  completions = [f'time.sleep({(7 * i) % 3 / 100}) or {i}' for i in range(20)]
  assert judge(pool, *completions) == list(range(20))
  assert judge(pool) == []


def test_each_failure_stays_with_its_completion(pool):
  started = time.monotonic()
  cases = {
    'True': 1.0,
    'hang()': (TimeoutError, 'no verdict within 1 s'),
    'fail(KeyError("lost"))': (VerifierError, "KeyError: 'lost'"),
    'fail(Unpicklable(1, 2))': (VerifierError, 'Unpicklable: 1 and 2'),
    'fail(TimeoutError("theirs"))': (VerifierError, 'TimeoutError: theirs'),
    'fail(SystemExit(2))': (VerifierError, 'SystemExit: 2'),
    '0.5': 0.5,
    'os._exit(3)': (VerifierError, 'died .exit code 3'),
    'float("nan")': (VerifierError, 'finite number, not nan'),
    'float("inf")': (VerifierError, 'finite number, not inf'),
    'None': (VerifierError, 'finite number, not None'),
    '[1.0]': (VerifierError, r'finite number, not \[1.0\]'),
    '"1"': (VerifierError, "finite number, not '1'"),
    'lambda: 1': (VerifierError, 'finite number, not <function'),
    '1j': (VerifierError, 'finite number, not 1j'),
    'False': 0.0,
    '-2': -2.0,
    'fractions.Fraction(1, 4)': 0.25,
    '__import__("numpy").float32(0.5)': 0.5,
    '__import__("numpy").bool_(True)': 1.0,
  }
  results = judge(pool, *cases)
  for expected, result in zip(cases.values(), results, strict=True):
    if isinstance(expected, float):
      assert result == expected
      assert type(result) is float
    else:
      with pytest.raises(expected[0], match=expected[1]):
        raise result
      assert type(result) is expected[0]
  assert judge(pool, '1', '0') == [1.0, 0.0]
  assert time.monotonic() - started < 15


def test_native_code_that_hangs_is_killed_as_fast(pool):
  judge(pool, '0', '0')  # the workers have started
  started = time.monotonic()
  (result,) = judge(pool, '9 ** 9 ** 9')
  assert isinstance(result, TimeoutError)
  assert time.monotonic() - started < LIMIT + 2


def wait_for_the_end_of(pid):
  until = time.monotonic() + 60
  while pathlib.Path(f'/proc/{pid}/cmdline').exists() and (
    pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()  # empty: a zombie
  ):
    assert time.monotonic() < until
    time.sleep(0.1)


def test_what_a_verifier_has_started_dies_with_its_worker(pool, tmp_path):
  note = tmp_path / 'child'
  (result,) = judge(
    pool,
    f"open({str(note)!r}, 'w').write(str(__import__('subprocess').Popen("
    "['sleep', '600']).pid)) and hang()",
  )
  assert isinstance(result, TimeoutError)
  wait_for_the_end_of(note.read_text())


SCRIPT = """
from train.verifiers import FunctionVerifier, VerifierPool

if __name__ == '__main__':
  verifier = FunctionVerifier('user_rewards:judge')
  with VerifierPool(verifier, workers=1, timeout=1000) as pool:
    print(int(pool([''], ['os.getpid()'], [''])[0]), flush=True)
    pool([''], ['9 ** 9 ** 9'], [''])  # does not let other threads run
"""


def test_a_worker_dies_with_the_process_it_works_for(rewards_folder):
  (rewards_folder / 'script.py').write_text(SCRIPT)
  script = subprocess.Popen(
    [sys.executable, 'script.py'],
    cwd=rewards_folder,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
    stdout=subprocess.PIPE,
    text=True,
  )
  worker = script.stdout.readline().strip()
  time.sleep(0.5)
  script.kill()
  script.wait()
  wait_for_the_end_of(worker)


def test_the_death_of_an_idle_worker_costs_no_reward(pool):
  (worker,) = judge(pool, 'os.getpid()')
  os.kill(int(worker), signal.SIGKILL)
  assert judge(pool, *'12345') == [1, 2, 3, 4, 5]
  assert judge(pool, *'54321') == [5, 4, 3, 2, 1]


def test_a_worker_ignores_ctrl_c(pool):
  assert judge(pool, 'ignores_ctrl_c()') == [1.0]


def test_time_to_import_does_not_count(in_folder):
  (in_folder / 'slow_rewards.py').write_text(
    f'import time\ntime.sleep({1.5 * LIMIT})\ndef reward(*texts): return 1'
  )
  verifier = FunctionVerifier('slow_rewards:reward')
  with VerifierPool(verifier, workers=1, timeout=LIMIT) as pool:
    assert judge(pool, '', '') == [1.0, 1.0]


def test_a_verifier_that_cannot_start_says_so(in_folder):
  verifier = FunctionVerifier('no_such_module:reward')
  with VerifierPool(verifier, workers=1, timeout=LIMIT) as pool:
    results = judge(pool, '', '')
  assert [type(result) for result in results] == [VerifierError] * 2
  assert 'no module named' in str(results[0])


def test_a_verifier_that_kills_its_workers_is_contained(in_folder):
  (in_folder / 'deadly_rewards.py').write_text('import os\nos._exit(1)')
  verifier = FunctionVerifier('deadly_rewards:reward')
  with VerifierPool(verifier, workers=1, timeout=LIMIT) as pool:
    results = judge(pool, *['x' * 1000] * 200)
  assert len(results) == 200
  assert all(isinstance(result, VerifierError) for result in results)


def test_mathematics_is_judged_in_workers():
  completions = ['\\boxed{1/2}', '\\boxed{2}', '', '9']
  with VerifierPool(MathVerifier(), workers=1, timeout=10) as pool:
    results = pool([''] * 4, completions, ['0.5', '3', '4', '9'])
  assert results == [1.0, 0.0, 0.0, 1.0]


def test_closing_does_not_wait_for_a_hanging_worker(rewards_folder, in_folder):
  os.chdir(rewards_folder)
  verifier = FunctionVerifier('user_rewards:judge')
  pool = VerifierPool(verifier, workers=1, timeout=100)
  judge(pool, '0')
  previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
  try:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(KeyboardInterrupt):
      judge(pool, *['9 ** 9 ** 9'] * 200)
  finally:
    signal.signal(signal.SIGALRM, previous)
  started = time.monotonic()
  pool.close()
  pool.close()
  assert time.monotonic() - started < 4
  with pytest.raises(RuntimeError, match='closed'):
    judge(pool, '0')


def test_wrong_arguments_are_refused(pool):
  verifier = MathVerifier()
  for workers, timeout in [(0, 1), (1, 0), (1, -1), (1, float('nan'))]:
    with pytest.raises(ValueError, match='must be'):
      VerifierPool(verifier, workers=workers, timeout=timeout)
  with pytest.raises(ValueError, match='shorter'):
    pool(['', ''], [''], [''])
